//! What a machine is fit for: findings, each with severity, evidence, meaning and remedy.
//!
//! Whoever calls the driver is a process that somebody watches: it tells what it is about to do and what it saw
//! ([`told`]). The rules that make findings of it do no IO; the daemon and the command line share them.

mod device;
mod driver;
pub mod mps;
pub mod text;
pub mod told;

use serde::Serialize;

pub use self::device::Machine;
pub use self::driver::{Circumstances, judge};

/// How many hardware connections a context has: what the driver reads of the environment.
pub const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// What a device process has there: a stream that waits holds one, so as many as there can be.
pub const DAEMON_CONNECTIONS: &str = "32";

/// How bad a finding is. The order is that of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something will not work.
    Problem,
    /// It works, and worse than it could, or not for long.
    Warning,
    /// Worth knowing.
    Note,
    /// As it should be.
    Ok,
}

impl Severity {
    /// Its name in JSON, on the wire and in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
            Self::Note => "note",
            Self::Ok => "ok",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at: a name that does not change.
    pub check: &'static str,
    /// The device that it is about, as `--device` takes it.
    pub device: Option<String>,
    /// What was found: a number, or the system's own words.
    pub evidence: String,
    /// What that means for statecopy.
    pub meaning: String,
    /// What to do about it; empty where nothing is to be done.
    pub remedy: String,
}

impl Finding {
    /// One about the machine, with nothing to be done.
    #[must_use]
    pub fn new(severity: Severity, check: &'static str, evidence: impl Into<String>) -> Self {
        Self {
            severity,
            check,
            device: None,
            evidence: evidence.into(),
            meaning: String::new(),
            remedy: String::new(),
        }
    }

    /// It is about this device.
    #[must_use]
    pub fn of_device(self, ordinal: u32) -> Self {
        Self { device: Some(format!("cuda:{ordinal}")), ..self }
    }

    /// With what it means for statecopy.
    #[must_use]
    pub fn means(self, meaning: impl Into<String>) -> Self {
        Self { meaning: meaning.into(), ..self }
    }

    /// With what is to be done.
    #[must_use]
    pub fn remedied_by(self, remedy: impl Into<String>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }
}

/// The bytes of a page, for the record.
#[must_use]
pub fn page_size(bytes: usize) -> Finding {
    Finding::new(Severity::Ok, "page_size", format!("{bytes} bytes"))
}

/// How many CPUs this process may use.
#[must_use]
pub fn cpus(allowed: usize) -> Finding {
    let evidence = format!("{allowed} may be used (affinity and quota of this process)");
    if allowed >= 2 {
        return Finding::new(Severity::Ok, "cpus", evidence);
    }
    Finding::new(Severity::Warning, "cpus", evidence)
        .means("Below two the executor never spins: each request wakes a sleeping thread, which costs tens of microseconds.")
        .remedied_by("Let the daemon use two CPUs or more (the container's CPU limit, taskset).")
}
