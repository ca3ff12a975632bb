//! Runs the cases one after the other, and says what became of each.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, absolute};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Serialize;
use statecopy_kernels::cuda::MANAGEMENT_LIBRARY;
use statecopy_kernels::cuda::probe::Probe;

use crate::RunOptions;
use crate::cases::{CASES, Case};
use crate::daemon::Daemon;
use crate::setup::Setup;

/// How long a case may take. The slowest takes a tenth of it.
const CASE_WITHIN: Duration = Duration::from_secs(120);
const STEP: Duration = Duration::from_millis(5);
/// How much of what a failed case said stands in its line.
const REASON_CHARACTERS: usize = 600;

/// What became of one case.
#[derive(Debug, Serialize)]
struct Verdict {
    name: &'static str,
    ok: bool,
    seconds: f64,
    /// What was seen, or why it failed.
    detail: String,
}

impl Verdict {
    fn without_a_daemon(case: &Case, error: &anyhow::Error) -> Self {
        let detail = format!("not run, because no daemon starts: {error:#}");
        Self { name: case.name, ok: false, seconds: 0.0, detail }
    }
}

/// What is kept of a run.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    commit: Option<String>,
    device: String,
    family: String,
    uuid: String,
    mps: bool,
    ok: usize,
    failed: usize,
    skipped: Vec<&'static str>,
    verdicts: Vec<Verdict>,
}

/// Runs the cases that were asked for.
///
/// # Errors
/// When the suite itself cannot run.
pub(crate) fn run(options: &RunOptions) -> Result<ExitCode> {
    let home = tempfile::Builder::new().prefix("sc").tempdir()?;
    let shared = home.path().join("shared");
    fs::create_dir(&shared)?;
    let setup = setup(options, home.path(), &shared)?;
    fs::create_dir_all(&options.output)?;
    let asked = |case: &&Case| {
        options.cases.is_empty() || options.cases.iter().any(|part| case.name.contains(part))
    };
    let (run, skipped): (Vec<&Case>, Vec<&Case>) =
        CASES.iter().filter(asked).partition(|case| case.lacks(&setup).is_none());
    let log = setup.output.join("daemon.log");
    let start = || Daemon::start(&setup, &shared, &log, "off");
    let first = start().with_context(|| format!("see {}", log.display()))?;
    let device = first.device()?.device.context("a device")?;
    let mut daemon = Some(first);
    println!("{} {} {}", device.name, device.family, device.uuid);
    for case in &skipped {
        println!("skip {}  needs {}", case.name, case.lacks(&setup).unwrap_or_default());
    }
    let mut verdicts = Vec::new();
    for case in run {
        if !daemon.as_mut().is_some_and(Daemon::runs) {
            daemon = None;
        }
        let serving = match daemon.take() {
            Some(serving) => Ok(serving),
            None => start(),
        };
        let verdict = match serving {
            Ok(serving) => {
                daemon = Some(serving);
                verdict(&setup, case)?
            }
            Err(error) => Verdict::without_a_daemon(case, &error),
        };
        println!("{:<4} {}  {}", label(verdict.ok), verdict.name, verdict.detail);
        io::stdout().flush()?;
        if !verdict.ok {
            // What failed may have left a device process that serves nobody: the next case is to be judged by itself.
            daemon = None;
        }
        verdicts.push(verdict);
    }
    let ok = verdicts.iter().filter(|verdict| verdict.ok).count();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        commit: options.commit.clone(),
        device: device.name,
        family: device.family,
        uuid: device.uuid,
        mps: setup.mps,
        ok,
        failed: verdicts.len() - ok,
        skipped: skipped.iter().map(|case| case.name).collect(),
        verdicts,
    };
    let file = setup.output.join("verdicts.json");
    fs::write(file, serde_json::to_string_pretty(&report)? + "\n")?;
    let mps = if setup.mps { "with" } else { "without" };
    println!("{} ok, {} failed, {mps} MPS", report.ok, report.failed);
    Ok(ExitCode::from(u8::from(report.failed > 0)))
}

/// Whether the driver lets the processes that start now share a device through MPS. Whoever asks may be a client of the MPS
/// server until its end.
///
/// # Errors
/// When there is no such device.
pub(crate) fn is_shared_by_mps(device: &str, driver_library: &Path) -> Result<bool> {
    let probe = Probe::open(driver_library, Path::new(MANAGEMENT_LIBRARY))?;
    let devices = probe.devices(Some(device.parse()?))?;
    Ok(devices.first().and_then(|device| device.shared_by_mps).unwrap_or(false))
}

/// As [`is_shared_by_mps`], asked by a process that ends.
fn ask_for_mps(options: &RunOptions) -> Result<bool> {
    let said = Command::new(std::env::current_exe()?)
        .args(["shared-by-mps", &options.device])
        .arg(&options.driver_library)
        .output()?;
    ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr).trim());
    let mps = String::from_utf8_lossy(&said.stdout).trim() == "true";
    ensure!(mps || !options.mps, "The driver does not share device {} by MPS", options.device);
    Ok(mps)
}

fn setup(options: &RunOptions, home: &Path, shared: &Path) -> Result<Setup> {
    Ok(Setup {
        mps: ask_for_mps(options)?,
        statecopyd: absolute(&options.statecopyd)?,
        device: options.device.clone(),
        kernels: options.kernels.as_deref().map(absolute).transpose()?,
        compiler: None,
        driver: options.driver_library.clone(),
        small: options.stub,
        home: home.to_owned(),
        socket: shared.join("run/statecopyd.sock"),
        output: absolute(&options.output)?,
    })
}

fn label(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAIL" }
}

/// Runs one case in a process group of its own, of which nothing is left afterwards.
fn verdict(setup: &Setup, case: &Case) -> Result<Verdict> {
    let said = setup.home.join("said");
    let log = setup.output.join(format!("{}.log", case.name));
    let started = Instant::now();
    let child = Command::new(std::env::current_exe()?)
        .args(["case", case.name, &serde_json::to_string(setup)?])
        .stdin(Stdio::null())
        .stdout(File::create(&said)?)
        .stderr(File::create(&log)?)
        .process_group(0)
        .spawn()?;
    let status = wait(child)?;
    let ok = status.is_some_and(|status| status.success());
    let detail = if ok {
        let _empty = fs::remove_file(&log);
        fs::read_to_string(&said)?.trim().to_owned()
    } else {
        reason(status, &log)?
    };
    Ok(Verdict { name: case.name, ok, seconds: started.elapsed().as_secs_f64(), detail })
}

/// Waits for the end of a case, and ends whatever it left; `None` when its time was over.
fn wait(mut child: Child) -> Result<Option<ExitStatus>> {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process id")?;
    let deadline = Instant::now() + CASE_WITHIN;
    // It stays a zombie until its group is gone, so that the group's number is nobody else's.
    let ends = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let mut ended = false;
    while !ended && Instant::now() < deadline {
        ended = waitid(WaitId::Pid(group), ends)?.is_some();
        if !ended {
            thread::sleep(STEP);
        }
    }
    kill_process_group(group, Signal::KILL)?;
    let status = child.wait()?;
    Ok(ended.then_some(status))
}

/// Why a case failed, in one line.
fn reason(status: Option<ExitStatus>, log: &Path) -> Result<String> {
    let how = match status {
        None => format!("not within {} s", CASE_WITHIN.as_secs()),
        Some(status) if status.code() == Some(1) => String::new(),
        Some(status) => status.to_string(),
    };
    let said = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let parts = said.lines().map(str::trim).chain([how.as_str()]).filter(|part| !part.is_empty());
    let mut parts: Vec<_> = parts.collect();
    parts.dedup();
    let line = parts.join(" | ");
    let skipped = line.chars().count().saturating_sub(REASON_CHARACTERS);
    Ok(line.chars().skip(skipped).collect())
}
