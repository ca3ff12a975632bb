//! What a watched process tells of the driver and the devices, and how that ended.
//!
//! It says what it is about to do before it does it: when it falls silent, the last words name the call that does not return.

use std::process::ExitStatus;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use statecopy_proto::Refusal;

use crate::cuda::probe::{ComputeMode, ProbedDevice, Seen};
use crate::cuda::{DriverError, MANAGEMENT_LIBRARY, OpenError};

/// How long a stream may take to write a word, or to see one.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// The one step that is not the driver's.
pub const OPENING_COMPILER: &str = "opening NVRTC";
/// The driver's first call.
pub const STARTING_DRIVER: &str = "starting the driver (cuInit)";
/// The first question.
pub const ASKING_DEVICES: &str = "asking the driver for its devices";

/// What the process tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It is about to do this.
    Begins {
        /// In words.
        step: String,
    },
    /// NVRTC is there.
    Compiler {
        /// Its version.
        version: String,
    },
    /// NVRTC is not there, or of no use.
    NoCompiler {
        /// Why.
        reason: String,
    },
    /// The driver has started.
    Driver {
        /// 1000 times the major one plus 10 times the minor one; 0 without a device.
        version: i32,
    },
    /// The driver does not start, or tells of no device.
    Refused {
        /// Its words.
        refused: Refused,
    },
    /// A device.
    Device {
        /// As it was seen.
        device: SeenDevice,
    },
    /// A context was made on a device; bytes.
    Context {
        /// Of the device.
        ordinal: u32,
        /// What the context takes; `None` where nobody can tell.
        context: Option<u64>,
        /// Left beside it.
        free: u64,
        /// Of the device.
        total: u64,
    },
    /// No context was made, or it is of no use.
    NoContext {
        /// Of the device.
        ordinal: u32,
        /// Why.
        refused: Refused,
    },
    /// Memory operations of streams work, or do not.
    Streams {
        /// Of the device.
        ordinal: u32,
        /// What does not work.
        error: Option<String>,
    },
}

/// The driver's own words, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Whether there is no driver at all, or one too old to be opened.
    pub no_driver: bool,
    /// What was said.
    pub sentence: String,
    /// What to do.
    pub remedy: String,
}

impl From<OpenError> for Refused {
    fn from(error: OpenError) -> Self {
        let no_driver = matches!(error, OpenError::Driver(_));
        let refusal = Refusal::from(error);
        Self {
            no_driver,
            sentence: refusal.sentence().to_owned(),
            remedy: refusal.remedy().to_owned(),
        }
    }
}

/// A device, as the driver and the management library describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenDevice {
    /// Its place in the order of the driver.
    pub ordinal: u32,
    /// For people.
    pub name: String,
    /// As text.
    pub uuid: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Whether fused plans are made on it.
    pub fuses: bool,
    /// Whether device and host share one space of addresses.
    pub unified_addressing: bool,
    /// Who may have a context.
    pub compute_mode: Mode,
    /// Whether contexts share it through MPS; `None` where the driver is too old to say.
    pub shared_by_mps: Option<bool>,
    /// What the management library says; `None` without it.
    pub outside: Option<SeenOutside>,
}

/// Who may have a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Any process.
    Shared,
    /// One process at a time.
    Exclusive,
    /// Nobody.
    Prohibited,
    /// The driver does not say.
    Unknown,
}

impl From<ComputeMode> for Mode {
    fn from(mode: ComputeMode) -> Self {
        match mode {
            ComputeMode::Shared => Self::Shared,
            ComputeMode::Exclusive => Self::Exclusive,
            ComputeMode::Prohibited => Self::Prohibited,
            ComputeMode::Unknown => Self::Unknown,
        }
    }
}

/// What the management library says of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenOutside {
    /// As in 580.65.06.
    pub driver_release: Option<String>,
    /// Whether it is a slice of a device.
    pub is_slice: bool,
    /// Whether the device is divided into slices (MIG).
    pub is_divided: Option<bool>,
    /// Processes that compute on it as clients of MPS.
    pub mps_clients: Option<u32>,
}

impl Event {
    /// It is about to do this.
    #[must_use]
    pub fn begins(step: impl Into<String>) -> Self {
        Self::Begins { step: step.into() }
    }

    /// It is about to ask the management library about a device.
    #[must_use]
    pub fn begins_outside(ordinal: u32) -> Self {
        Self::begins(format!("asking {MANAGEMENT_LIBRARY} about cuda:{ordinal}"))
    }

    /// It is about to make a context.
    #[must_use]
    pub fn begins_context(ordinal: u32) -> Self {
        Self::begins(format!("making a context on cuda:{ordinal}"))
    }

    /// It is about to try memory operations of a stream.
    #[must_use]
    pub fn begins_streams(ordinal: u32) -> Self {
        Self::begins(format!("trying memory operations of a stream on cuda:{ordinal}"))
    }
}

impl Refused {
    /// A context that was made and is of no use.
    #[must_use]
    pub fn of_context(error: &DriverError) -> Self {
        let remedy = "Let `nvidia-smi` show the state of the device; see the driver's log.";
        Self { no_driver: false, sentence: error.to_string(), remedy: remedy.to_owned() }
    }
}

impl SeenDevice {
    /// As the driver describes it, and the management library where it is there.
    #[must_use]
    pub fn new(device: &ProbedDevice, outside: Option<Seen>) -> Self {
        Self {
            ordinal: device.ordinal,
            name: device.name.clone(),
            uuid: device.uuid.to_string(),
            capability: device.capability,
            fuses: device.fuses,
            unified_addressing: device.unified_addressing,
            compute_mode: device.compute_mode.into(),
            shared_by_mps: device.shared_by_mps,
            outside: outside.map(|seen| SeenOutside {
                driver_release: seen.driver_release,
                is_slice: seen.is_slice,
                is_divided: seen.is_divided,
                mps_clients: seen.mps_clients,
            }),
        }
    }
}

/// What became of the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It lives, and serves.
    Lives,
    /// It ended by itself.
    Ended(ExitStatus),
    /// It was silent for so long, was killed, and is gone.
    Killed(Duration),
    /// It was silent for so long, was killed, and is still there: the kernel does not let it go.
    Stuck(Duration),
}

/// What the process told, and its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// In order.
    pub events: Vec<Event>,
    /// What became of it.
    pub ending: Ending,
}
