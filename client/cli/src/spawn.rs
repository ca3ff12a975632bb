//! This program as several processes: it starts itself again as the daemon, and as the workers of the demonstration.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::iter;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use statecopy_client::blocking::Admin;
use statecopy_client::{Address, RefusalCode};
use statecopyd::config::SelfProgram;
use tempfile::TempDir;

use crate::cli::{CacheOptions, DaemonOptions};
use crate::failure::Failure;

/// How long a daemon may take to get ready, and to end when it is asked to.
const START_MAX: Duration = Duration::from_secs(20);
const STOP_MAX: Duration = Duration::from_secs(20);
/// How long the kernel may take to tell of the end of a daemon that does not answer any more.
const END_SEEN_MAX: Duration = Duration::from_secs(1);
/// Between two looks at a process.
const POLL: Duration = Duration::from_millis(5);
/// The same where the time counts.
const READY_POLL: Duration = Duration::from_millis(1);
/// How much of the daemon's log a failure shows.
const LOG_LINES: usize = 10;

/// The subcommand that is the daemon, and its argument that is the device process.
const DAEMON: &str = "daemon";
const DEVICE_PROCESS: &str = "device-process";

/// This program again, with other arguments.
pub(crate) fn again(subcommand: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("statecopy").arg(subcommand).stdin(Stdio::null());
    command
}

/// Makes this process end with the one that started it.
pub(crate) fn end_with_parent() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("Asking to end with the parent")
}

/// The hidden subcommand: this process becomes the daemon, or a device process of it.
pub(crate) fn be_daemon(options: DaemonOptions) -> ExitCode {
    let parent = getppid();
    if options.directory.is_some()
        && let Err(error) = end_with_parent()
    {
        return crate::failure::report(&error);
    }
    let arguments = vec![DAEMON.to_owned(), DEVICE_PROCESS.to_owned()];
    let named = iter::once(OsString::from("statecopyd")).chain(options.arguments);
    let exit = statecopyd::cli::run(named, SelfProgram { arguments });
    if let Some(directory) = options.directory.filter(|_| getppid() != parent) {
        // The command was killed and cannot do it. Whatever is in the way stays.
        let _removed = fs::remove_dir_all(directory);
    }
    exit
}

/// A daemon of this command's own, in a runtime directory that goes with it.
#[derive(Debug)]
pub(crate) struct OwnDaemon {
    child: Child,
    address: Address,
    directory: TempDir,
}

impl OwnDaemon {
    /// Starts a daemon, with variables of the environment that hold settings of it, and waits until it is ready.
    ///
    /// # Errors
    /// When it ends or does not get ready in time; the failure shows the end of its log.
    pub(crate) fn start_with<S: AsRef<OsStr>>(settings: &[(S, S)]) -> anyhow::Result<Self> {
        let mut daemon = Self::spawn(settings, "off")?;
        daemon.wait_until_ready()?;
        Ok(daemon)
    }

    /// The same, and how long it took from exec to the first 200 of /readyz.
    ///
    /// # Errors
    /// As [`OwnDaemon::start_with`].
    pub(crate) fn time_to_ready<S: AsRef<OsStr>>(
        settings: &[(S, S)],
    ) -> anyhow::Result<(Self, Duration)> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let http = free.context("A free port")?;
        let start = Instant::now();
        let mut daemon = Self::spawn(settings, &http.to_string())?;
        while !is_ready(http) {
            daemon.check_alive(start + START_MAX)?;
            thread::sleep(READY_POLL);
        }
        Ok((daemon, start.elapsed()))
    }

    fn spawn<S: AsRef<OsStr>>(settings: &[(S, S)], http_address: &str) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new().prefix("statecopy-").tempdir();
        let directory = directory.map_err(|error| {
            Failure::other(
                format!("A temporary runtime directory cannot be made: {error}"),
                "Let TMPDIR name a directory that exists and that this user may write.",
            )
        })?;
        let address = Address::in_directory(directory.path().join("run"));
        let address = address.map_err(statecopy_client::Error::from)?;
        let log = File::create(directory.path().join("log")).context("The daemon's log")?;
        let child = again(DAEMON)
            .arg("--directory")
            .arg(directory.path())
            .args(["serve", "--http-address", http_address, "--log-level", "warn", "--runtime-dir"])
            .arg(directory.path().join("run"))
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::null())
            .stderr(log)
            // An interrupt from the terminal ends the command, which then ends the daemon in its own way.
            .process_group(0)
            .spawn()
            .context("Starting the daemon")?;
        Ok(Self { child, address, directory })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// When it ends with a failure, or not at all.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).context("Asking the daemon to end")?;
        match wait_within(&mut self.child, STOP_MAX)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.ended(status).into()),
            None => Err(self.failure("The daemon does not end when it is asked to", false).into()),
        }
    }

    fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_MAX;
        loop {
            let left = self.check_alive(deadline)?;
            if Admin::connect(self.address.clone(), left)
                .and_then(|admin| admin.inspect())
                .is_ok_and(|reply| reply.ready)
            {
                return Ok(());
            }
            thread::sleep(POLL);
        }
    }

    /// How long there is left for it to get ready.
    fn check_alive(&mut self, deadline: Instant) -> anyhow::Result<Duration> {
        if let Some(status) = self.child.try_wait().context("Looking at the daemon")? {
            return Err(self.ended(status).into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.failure("The daemon does not get ready", false).into());
        }
        Ok(left)
    }

    fn ended(&self, status: ExitStatus) -> Failure {
        self.failure(&format!("The daemon ended with {status}"), status.signal().is_some())
    }

    /// Whoever is killed logs nothing of it: what its log ends with is not why.
    fn failure(&self, what: &str, was_killed: bool) -> Failure {
        let mut log = String::new();
        // Without a log there is nothing more to say.
        let _read = File::open(self.directory.path().join("log"))
            .and_then(|mut file| file.read_to_string(&mut log));
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        let mut remedy = Vec::new();
        if last.is_empty() || was_killed {
            remedy.push(
                "If nobody killed it, the kernel's log tells why (out of memory?), or `statecopyd serve` started by hand does."
                    .to_owned(),
            );
        }
        if !last.is_empty() {
            remedy.push(format!("Its log ends with:\n    {}", last.join("\n    ")));
        }
        Failure::other(what, remedy.join("\n  "))
    }
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        // It has ended already unless something failed; then it must not outlive its directory.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A daemon to work with: the one named, or one of this command's own.
#[derive(Debug)]
pub(crate) enum DaemonInUse {
    /// Somebody else's.
    Given(Address),
    /// Ours.
    Own(OwnDaemon),
}

impl DaemonInUse {
    /// Uses the daemon named, or starts one.
    ///
    /// # Errors
    /// When none can be started.
    pub(crate) fn get(options: &CacheOptions) -> anyhow::Result<Self> {
        match &options.address {
            Some(address) => Ok(Self::Given(address.clone())),
            None => {
                let devices = ("STATECOPY_DEVICES", options.device.to_string());
                Ok(Self::Own(OwnDaemon::start_with(&[(devices.0, devices.1.as_str())])?))
            }
        }
    }

    /// Works with it, and then ends it if it is ours.
    ///
    /// # Errors
    /// When the work fails, or the daemon ends with a failure. Where a daemon of ours ended first, that is what failed.
    pub(crate) fn serve<T>(
        mut self,
        work: impl FnOnce(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        match work(&self) {
            Ok(done) => self.release().map(|()| done),
            Err(error) => Err(self.explain(error)),
        }
    }

    fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        let Self::Own(daemon) = self else { return error };
        // Whoever loses a daemon that was killed may know it before the kernel tells of its end.
        let lost = Failure::of(&error).exit == RefusalCode::Unavailable.exit_code();
        let patience = if lost { END_SEEN_MAX } else { Duration::ZERO };
        match wait_within(&mut daemon.child, patience) {
            Ok(Some(status)) => daemon.ended(status).into(),
            _ => error,
        }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> &Address {
        match self {
            Self::Given(address) => address,
            Self::Own(daemon) => daemon.address(),
        }
    }

    fn release(self) -> anyhow::Result<()> {
        match self {
            Self::Given(_) => Ok(()),
            Self::Own(daemon) => daemon.stop(),
        }
    }
}

/// Whether /readyz answers 200.
fn is_ready(http: SocketAddr) -> bool {
    let ask = || -> io::Result<[u8; 12]> {
        let mut stream = TcpStream::connect(http)?;
        stream.set_read_timeout(Some(START_MAX))?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status)
    };
    ask().is_ok_and(|status| status.ends_with(b" 200"))
}

/// The end of a child, where it comes in that time.
///
/// # Errors
/// When it cannot be looked at.
pub(crate) fn wait_within(child: &mut Child, time: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + time;
    loop {
        if let Some(status) = child.try_wait().context("Waiting for a process")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}
