//! `statecopy doctor`: whether this machine can serve, before anything is deployed.
//!
//! Facts are gathered first: the driver is tried by a child (`probe`) that a parent watches (`watch`), because its calls may
//! never return; the rest is read here. What they mean (`driver`, `device`, `host`) is worked out without another look.

mod device;
mod driver;
mod finding;
mod host;
mod mps;
pub(crate) mod probe;
mod watch;

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::geteuid;
use statecopy_kernels::cuda::store::Store;
use statecopyd::config::{self, DeviceName, Flags, Settings};

use self::driver::Circumstances;
use self::finding::{Finding, Report, Severity};
use self::mps::Mps;
use self::probe::Libraries;
use crate::cli::DoctorOptions;
use crate::failure::EXIT_UNFIT;
use crate::terminal;

/// How many hardware connections a context has.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Looks at the machine, and says what it found.
///
/// # Errors
/// When the address or the output is of no use, or the program cannot start itself again.
pub(crate) fn run(options: &DoctorOptions) -> anyhow::Result<ExitCode> {
    let address = options.ask.address()?;
    let mut findings = Vec::new();
    let settings = settings().unwrap_or_else(|error| {
        let meaning = "A daemon of this environment does not start: it ends with 78. The rest was looked at with the defaults.";
        findings.push(
            Finding::new(Severity::Problem, "settings", format!("{error:#}"))
                .means(meaning)
                .remedied_by("Correct the file or the variable named here; `statecopyd config` prints every setting."),
        );
        Settings::default()
    });
    if options.device != Some(DeviceName::Host) {
        findings.extend(gpus(options, &settings)?);
    }
    findings.extend(host::judge(&address, options.ask.timeout()));
    let report = Report::of(findings);
    if options.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&report.text())?;
    }
    Ok(if report.problems == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_UNFIT) })
}

fn gpus(options: &DoctorOptions, settings: &Settings) -> anyhow::Result<Vec<Finding>> {
    let selector = match options.device {
        Some(DeviceName::Cuda(selector)) => Some(selector),
        Some(DeviceName::Host) | None => None,
    };
    let served = settings.devices.iter().any(|device| matches!(device, DeviceName::Cuda(_)));
    let directory = variable("CUDA_MPS_PIPE_DIRECTORY").filter(|path| !path.is_empty());
    let directory = directory.map_or_else(|| mps::DEFAULT_DIRECTORY.into(), PathBuf::from);
    let connections = variable(CONNECTIONS);
    let circumstances = Circumstances {
        mps: Mps::look(directory, Path::new("/proc"), geteuid().as_raw()),
        gpu_wanted: selector.is_some() || served,
        chips: chips(settings),
        searched: settings.cuda.nvrtc_directory.as_ref().map_or_else(
            || "looked for where the loader searches".to_owned(),
            |directory| format!("looked for in {}", directory.display()),
        ),
        selected_max: settings.limits.selected_max,
        connections: connections.map(|text| text.to_string_lossy().into_owned()),
        daemon_connections: watch::daemon_connections(),
    };
    let libraries = Libraries {
        driver: settings.cuda.driver_library.clone(),
        nvrtc_directory: settings.cuda.nvrtc_directory.clone(),
    };
    let deadline = Duration::from_millis(options.driver_timeout_ms.into());
    let probed = watch::try_driver(&libraries, selector, deadline)?;
    Ok(driver::judge(&probed, &circumstances))
}

/// The chips that the stores of the daemon's settings hold kernels for. A store that cannot be read holds none.
fn chips(settings: &Settings) -> Vec<String> {
    let stores = settings.artifact_stores.iter().chain([&settings.artifact_store]);
    let entries =
        stores.filter_map(|directory| Store::open(directory).ok()?.entries().ok()).flatten();
    let mut chips: Vec<String> =
        entries.filter_map(|entry| Some(entry.found.ok()?.arch.to_string())).collect();
    chips.sort();
    chips.dedup();
    chips
}

/// What a daemon of this environment is configured with.
#[expect(clippy::disallowed_methods, reason = "the daemon's own variables, which it is given too")]
fn settings() -> anyhow::Result<Settings> {
    let environment = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Ok(config::load(&Flags::default(), environment)?.settings)
}

#[expect(clippy::disallowed_methods, reason = "what the driver itself reads of the environment")]
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name)
}
