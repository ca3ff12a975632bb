//! The real daemon, in a runtime directory of its own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use statecopy_proto::v1::InspectReply;
use tempfile::TempDir;

use crate::footprint::processor_ticks;
use crate::http::{self, Answer};
use crate::poll::{eventually, until};
use crate::wire::Wire;

/// A binary of this workspace, beside the running test; it is built first where it is missing.
///
/// # Panics
/// When it cannot be built.
#[must_use]
pub fn binary(package: &str, name: &str) -> PathBuf {
    static TURN: OnceLock<std::sync::Mutex<()>> = OnceLock::new();
    let test = std::env::current_exe().expect("the running test has a path");
    // target/PROFILE/deps/TEST
    let profile = test.parent().and_then(Path::parent).expect("cargo's folders");
    let path = profile.join(name);
    let turn = TURN.get_or_init(Default::default).lock();
    if !path.exists() {
        let mut build = Command::new(option_env!("CARGO").unwrap_or("cargo"));
        build.args(["build", "--locked", "--package", package, "--bin", name]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        build.env("CARGO_TARGET_DIR", profile.parent().expect("cargo's folders"));
        assert!(build.status().expect("cargo runs").success(), "{name} does not build");
    }
    drop(turn);
    path
}

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    settings: Vec<(String, String)>,
    environment: Vec<(OsString, OsString)>,
    runtime: Option<PathBuf>,
    log: Option<PathBuf>,
    descriptors: Option<(u32, u32)>,
}

impl DaemonOptions {
    /// Sets a key of the configuration file, in TOML, in place of what it was set to: `setting("drain_grace_ms", "500")`.
    #[must_use]
    pub fn setting(mut self, key: &str, value: &str) -> Self {
        self.settings.retain(|(set, _)| set != key);
        self.settings.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Uses a runtime directory that the test looks after.
    #[must_use]
    pub fn runtime(mut self, directory: &Path) -> Self {
        self.runtime = Some(directory.to_owned());
        self
    }

    /// Sends the log to a file that the test looks after.
    #[must_use]
    pub fn log_to(mut self, file: &Path) -> Self {
        self.log = Some(file.to_owned());
        self
    }

    /// Starts it with these limits of open files, the soft one and the hard one.
    #[must_use]
    pub fn descriptors(mut self, soft: u32, hard: u32) -> Self {
        self.descriptors = Some((soft, hard));
        self
    }

    /// Starts a daemon and waits until it is ready.
    ///
    /// # Panics
    /// When it ends instead, or is not ready in time.
    #[must_use]
    pub fn start(self) -> Daemon {
        let mut daemon = self.spawn();
        daemon.wait_until_ready();
        daemon
    }

    /// Starts a daemon and does not wait.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn(self) -> Daemon {
        let home = tempfile::Builder::new().prefix("sc").tempdir().expect("a folder");
        let runtime = self.runtime.unwrap_or_else(|| home.path().join("run"));
        let config = home.path().join("statecopyd.toml");
        let mut text = format!(
            "runtime_dir = {:?}\nhttp_address = \"127.0.0.1:0\"\n",
            runtime.display().to_string()
        );
        for (key, value) in &self.settings {
            text.push_str(&format!("{key} = {value}\n"));
        }
        fs::write(&config, text).expect("a configuration file");
        let log = self.log.unwrap_or_else(|| home.path().join("log"));
        let file = File::options().create(true).append(true).open(&log).expect("a log");
        let program = binary("statecopyd", "statecopyd");
        let mut command = match self.descriptors {
            None => Command::new(program),
            Some((soft, hard)) => {
                let limited =
                    format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$0\" \"$@\"");
                let mut shell = Command::new("sh");
                shell.arg("-c").arg(limited).arg(program);
                shell
            }
        };
        let child = command
            .arg("serve")
            .arg("--config")
            .arg(&config)
            .envs(self.environment)
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a descriptor"))
            .stderr(file)
            .spawn()
            .expect("statecopyd starts");
        Daemon {
            child,
            home,
            runtime,
            config,
            ended: None,
            wire: None,
            http_address: String::new(),
        }
    }
}

/// A running daemon. Dropping it ends it; a failing test prints its log.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    home: TempDir,
    runtime: PathBuf,
    config: PathBuf,
    ended: Option<ExitStatus>,
    wire: Option<Wire>,
    http_address: String,
}

impl Daemon {
    /// A daemon with the settings of a test and nothing else.
    ///
    /// # Panics
    /// When it is not ready in time.
    #[must_use]
    pub fn start() -> Self {
        DaemonOptions::default().start()
    }

    /// Waits until it is ready to serve.
    ///
    /// # Panics
    /// When it ends instead, or is not ready in time.
    pub fn wait_until_ready(&mut self) {
        eventually("the daemon is ready", || {
            if let Some(status) = self.try_wait() {
                panic!("the daemon ended with {status}:\n{}", self.log());
            }
            let wire = Wire::connect(&self.control_socket()).ok()?;
            let reply = wire.inspect().ok().filter(|reply| reply.ready)?;
            self.http_address = reply.http_address;
            self.wire = Some(wire);
            Some(())
        });
    }

    /// The connection that was made when it became ready.
    ///
    /// # Panics
    /// When it never did.
    #[must_use]
    pub fn wire(&self) -> &Wire {
        self.wire.as_ref().expect("the daemon was ready")
    }

    /// A new connection.
    ///
    /// # Panics
    /// When nobody listens.
    #[must_use]
    pub fn connect(&self) -> Wire {
        Wire::connect(&self.control_socket()).expect("the control socket")
    }

    /// What it shows of itself.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn inspect(&self) -> InspectReply {
        self.wire().inspect().expect("the daemon answers")
    }

    /// A counter of the device process, by name and label.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn counter(&self, name: &str, label: &str) -> u64 {
        let status = self.inspect();
        let mut counters = status.devices.iter().flat_map(|device| &device.counters);
        let counter = counters.find(|counter| counter.name == name && counter.label == label);
        counter.unwrap_or_else(|| panic!("no counter {name} {label}")).value
    }

    /// How often the executor has looked at bells between two sleeps.
    #[must_use]
    pub fn bell_looks(&self) -> u64 {
        self.counter("statecopy_bell_looks_total", "")
    }

    /// Watches the executor while a bell may ring and none does.
    ///
    /// # Panics
    /// When it does not look again and again, or not between sleeps.
    pub fn expect_sleeps_between_looks(&self) {
        until("it sleeps", || self.bell_looks() > 0);
        let device = self.device_process();
        let (before, begun) = (processor_ticks(device), Instant::now());
        let enough = self.bell_looks() + 2_000;
        until("it looks again and again", || self.bell_looks() > enough);
        let used = Duration::from_millis((processor_ticks(device) - before) * 10);
        // Aimed at 5 % of a processor; ten times that is a fault.
        assert!(used < begun.elapsed() / 2, "{used:?} of {:?}", begun.elapsed());
    }

    /// The value of a metric without labels.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.and_then(|value| value.parse().ok());
        value.unwrap_or_else(|| panic!("no metric {name}:\n{text}"))
    }

    /// The runtime directory.
    #[must_use]
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The configuration file.
    #[must_use]
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// The control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.runtime.join("statecopyd.sock")
    }

    /// The supervisor's process id.
    #[must_use]
    pub fn supervisor(&self) -> u32 {
        self.child.id()
    }

    /// The device process's id.
    ///
    /// # Panics
    /// When there is not one device.
    #[must_use]
    pub fn device_process(&self) -> u32 {
        let devices = self.inspect().devices;
        assert_eq!(devices.len(), 1, "{devices:?}");
        devices[0].device_process_pid
    }

    /// Asks its HTTP port.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn get(&self, path: &str) -> Answer {
        let address = &self.http_address;
        http::get(address, path).unwrap_or_else(|error| panic!("{address}{path}: {error}"))
    }

    /// Sends the supervisor a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        send_signal(self.supervisor(), signal).expect("the supervisor lives");
    }

    /// Its end, if it has ended.
    ///
    /// # Panics
    /// When the kernel does not say.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("it is our child");
        }
        self.ended
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the daemon ends", || self.try_wait())
    }

    /// What both processes wrote so far.
    ///
    /// # Panics
    /// When the log cannot be read.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).expect("a log")
    }

    /// What lies in the runtime directory, sorted.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn runtime_entries(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.runtime).expect("the runtime directory");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Daemon {
    #[expect(clippy::print_stderr, reason = "a failing test shows what the daemon said")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        }
        if self.try_wait().is_some() {
            return;
        }
        // The device process ends with its link to the supervisor.
        let device = self.wire.as_ref().and_then(|wire| wire.inspect().ok());
        let _ = self.child.kill();
        let _ = self.child.wait();
        let pids = device.iter().flat_map(|reply| &reply.devices).map(|at| at.device_process_pid);
        for pid in pids.filter(|pid| *pid != 0 && !std::thread::panicking()) {
            until("the device process ends with its supervisor", || !runs(pid));
        }
    }
}

/// Whether a process runs: it exists and is no zombie.
#[must_use]
pub fn runs(pid: u32) -> bool {
    // The state stands behind the name, which is in parentheses.
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(") ").map(|(_, rest)| !rest.starts_with('Z')))
        .unwrap_or(false)
}

/// Sends a process a signal.
///
/// # Errors
/// When there is no such process.
pub fn send_signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(kill_process(pid, signal)?)
}
