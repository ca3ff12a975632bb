//! What was found of the machine at a device's start, and what findings are made from beside what a process told.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::param::page_size;
use rustix::process::geteuid;
use statecopy_kernels::cuda::store::Store;
use statecopy_kernels::findings::mps::{self, Mps};
use statecopy_kernels::findings::told::{Ending, Event, Probed};
use statecopy_kernels::findings::{
    self, CONNECTIONS, Circumstances, DAEMON_CONNECTIONS, Finding, Machine, Severity,
};
use statecopy_kernels::host::cpus_allowed;

use crate::config::{DeviceName, DeviceSettings};

/// What was found at the start of one device process; nothing for the host device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The worst first.
    pub findings: Vec<Finding>,
    /// The same as metrics have it.
    pub machine: Machine,
}

impl Found {
    /// Of what a device process told, and what became of it.
    #[must_use]
    pub fn of(events: Vec<Event>, ending: Ending, circumstances: &Circumstances) -> Self {
        let probed = Probed { events, ending };
        let mut findings = findings::judge(&probed, circumstances);
        findings.sort_by_key(|finding| finding.severity);
        Self { findings, machine: Machine::of(&probed, circumstances) }
    }

    /// Logs what an earlier start had not found as it is now: figures that only move are not told again.
    pub fn log_beside(&self, earlier: &Self) {
        let same = |one: &Finding, other: &Finding| {
            (one.check, one.severity) == (other.check, other.severity)
        };
        for finding in &self.findings {
            if !earlier.findings.iter().any(|known| same(known, finding)) {
                log(finding);
            }
        }
    }
}

/// What is worth knowing of the host, and costs nothing.
#[must_use]
pub fn host() -> Vec<Finding> {
    let mut found = vec![findings::cpus(cpus_allowed().get()), findings::page_size(page_size())];
    found.sort_by_key(|finding| finding.severity);
    found
}

/// One line, as bad as the finding is.
pub fn log(finding: &Finding) {
    let Finding { severity, check, device, evidence, meaning, remedy } = finding;
    let device = device.as_deref().unwrap_or("host");
    match severity {
        Severity::Problem => tracing::error!(check, device, meaning, remedy, "{evidence}"),
        Severity::Warning => tracing::warn!(check, device, meaning, remedy, "{evidence}"),
        Severity::Note | Severity::Ok => {
            tracing::info!(check, device, meaning, remedy, "{evidence}");
        }
    }
}

/// Looks at what is there of MPS and at the stores. It reads files, and calls no driver.
#[must_use]
pub fn look(settings: &DeviceSettings) -> Circumstances {
    let directory = variable("CUDA_MPS_PIPE_DIRECTORY").filter(|path| !path.is_empty());
    let directory = directory.map_or_else(|| mps::DEFAULT_DIRECTORY.into(), PathBuf::from);
    let connections = variable(CONNECTIONS);
    Circumstances {
        mps: Mps::look(directory, Path::new("/proc"), geteuid().as_raw()),
        gpu_wanted: matches!(settings.device, DeviceName::Cuda(_)),
        chips: chips(settings),
        searched: settings.cuda.nvrtc_directory.as_ref().map_or_else(
            || "looked for where the loader searches".to_owned(),
            |directory| format!("looked for in {}", directory.display()),
        ),
        selected_max: settings.selected_max,
        connections: connections.map(|text| text.to_string_lossy().into_owned()),
        daemon_connections: DAEMON_CONNECTIONS,
    }
}

/// The chips that the stores hold kernels for. A store that cannot be read holds none.
fn chips(settings: &DeviceSettings) -> Vec<String> {
    let stores = settings.artifact_stores.iter().chain([&settings.artifact_store]);
    let entries =
        stores.filter_map(|directory| Store::open(directory).ok()?.entries().ok()).flatten();
    let mut chips: Vec<String> =
        entries.filter_map(|entry| Some(entry.found.ok()?.arch.to_string())).collect();
    chips.sort();
    chips.dedup();
    chips
}

#[expect(clippy::disallowed_methods, reason = "what the driver itself reads of the environment")]
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name)
}
