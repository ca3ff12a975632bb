//! `statecopy doctor`: whether this machine can serve, before anything is deployed.
//!
//! Facts are gathered first: the driver is tried by a child (`probe`) that a parent watches (`watch`), because its calls may
//! never return; the rest is read by the
//! daemon's own library. What they mean is worked out by the rules that the daemon has too (`statecopy_kernels::findings`).

mod finding;
mod host;
pub(crate) mod probe;
mod watch;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use statecopy_kernels::cuda::CudaSelector;
use statecopy_kernels::findings::{self, Circumstances, Finding, Severity};
use statecopyd::config::{self, DeviceName, Flags, Settings};
use statecopyd::machine;

use self::finding::Report;
use self::probe::Libraries;
use crate::cli::DoctorOptions;
use crate::failure::EXIT_UNFIT;
use crate::terminal;

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
    let named = DeviceName::Cuda(selector.unwrap_or(CudaSelector::Ordinal(0)));
    let circumstances = Circumstances {
        gpu_wanted: selector.is_some() || served,
        ..machine::look(&settings.device(named))
    };
    let libraries = Libraries {
        driver: settings.cuda.driver_library.clone(),
        nvrtc_directory: settings.cuda.nvrtc_directory.clone(),
    };
    let deadline = Duration::from_millis(options.driver_timeout_ms.into());
    let probed = watch::try_driver(&libraries, selector, deadline)?;
    Ok(findings::judge(&probed, &circumstances))
}

/// What a daemon of this environment is configured with.
#[expect(clippy::disallowed_methods, reason = "the daemon's own variables, which it is given too")]
fn settings() -> anyhow::Result<Settings> {
    let environment = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Ok(config::load(&Flags::default(), environment)?.settings)
}
