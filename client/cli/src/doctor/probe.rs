//! The child that tries the driver, and what it tells: one JSON object a line.
//!
//! It says what it is about to do before it does it: when it falls silent, the last line names the call that does not return.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use statecopy_kernels::cuda::compile::Compiler;
use statecopy_kernels::cuda::probe::{ComputeMode, Probe, ProbedDevice};
use statecopy_kernels::cuda::{MANAGEMENT_LIBRARY, OpenError};
use statecopy_proto::Refusal;

use crate::cli::DoctorProbeOptions;
use crate::{spawn, terminal};

/// How long a stream may take to write a word, or to see one.
const PATIENCE: Duration = Duration::from_secs(2);

/// The one step that is not the driver's.
pub(super) const OPENING_COMPILER: &str = "opening NVRTC";

/// What the child tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// It is about to do this.
    Begins { step: String },
    /// NVRTC is there.
    Compiler { version: String },
    /// NVRTC is not there, or of no use.
    NoCompiler { reason: String },
    /// The driver has started.
    Driver { version: i32 },
    /// The driver does not start, or tells of no device.
    Refused { refused: Refused },
    /// A device.
    Device { device: SeenDevice },
    /// A context was made on a device; bytes.
    Context { ordinal: u32, context: Option<u64>, free: u64, total: u64 },
    /// No context was made, or it is of no use.
    NoContext { ordinal: u32, refused: Refused },
    /// Memory operations of streams work, or do not.
    Streams { ordinal: u32, error: Option<String> },
}

/// The driver's own words, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refused {
    /// Whether there is no driver at all, or one too old to be opened.
    pub(super) no_driver: bool,
    pub(super) sentence: String,
    pub(super) remedy: String,
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
pub(super) struct SeenDevice {
    pub(super) ordinal: u32,
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) capability: (u32, u32),
    pub(super) fuses: bool,
    pub(super) unified_addressing: bool,
    pub(super) compute_mode: Mode,
    pub(super) shared_by_mps: Option<bool>,
    /// What the management library says; `None` without it.
    pub(super) outside: Option<SeenOutside>,
}

/// Who may have a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    Shared,
    Exclusive,
    Prohibited,
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
pub(super) struct SeenOutside {
    pub(super) driver_release: Option<String>,
    pub(super) is_slice: bool,
    pub(super) is_divided: Option<bool>,
    pub(super) mps_clients: Option<u32>,
}

/// The hidden subcommand.
pub(crate) fn run(options: &DoctorProbeOptions) -> ExitCode {
    match spawn::end_with_parent().and_then(|()| tell_all(options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => crate::failure::report(&error),
    }
}

fn tell_all(options: &DoctorProbeOptions) -> anyhow::Result<()> {
    begin(OPENING_COMPILER)?;
    tell(&match Compiler::open(options.nvrtc_directory.as_deref()) {
        Ok(compiler) => Event::Compiler { version: compiler.version().to_string() },
        Err(error) => Event::NoCompiler { reason: error.to_string() },
    })?;
    begin("starting the driver (cuInit)")?;
    let probe = match Probe::open(&options.driver_library, Path::new(MANAGEMENT_LIBRARY)) {
        Ok(probe) => probe,
        Err(error) => return tell(&Event::Refused { refused: error.into() }),
    };
    tell(&Event::Driver { version: probe.version() })?;
    begin("asking the driver for its devices")?;
    let devices = match probe.devices(options.device) {
        Ok(devices) => devices,
        Err(error) => return tell(&Event::Refused { refused: error.into() }),
    };
    devices.iter().try_for_each(|device| tell_of_device(&probe, device))
}

fn tell_of_device(probe: &Probe, device: &ProbedDevice) -> anyhow::Result<()> {
    let ordinal = device.ordinal;
    begin(&format!("asking {MANAGEMENT_LIBRARY} about cuda:{ordinal}"))?;
    let outside = probe.seen_from_outside(device).map(|seen| SeenOutside {
        driver_release: seen.driver_release,
        is_slice: seen.is_slice,
        is_divided: seen.is_divided,
        mps_clients: seen.mps_clients,
    });
    tell(&Event::Device {
        device: SeenDevice {
            ordinal,
            name: device.name.clone(),
            uuid: device.uuid.to_string(),
            capability: device.capability,
            fuses: device.fuses,
            unified_addressing: device.unified_addressing,
            compute_mode: device.compute_mode.into(),
            shared_by_mps: device.shared_by_mps,
            outside,
        },
    })?;
    begin(&format!("making a context on cuda:{ordinal}"))?;
    let context = match probe.enter(device) {
        Ok(context) => context,
        Err(error) => return tell(&Event::NoContext { ordinal, refused: error.into() }),
    };
    let left = match context.memory_left() {
        Ok(left) => left,
        Err(error) => {
            let remedy = "Let `nvidia-smi` show the state of the device; see the driver's log.";
            let refused = Refused {
                no_driver: false,
                sentence: error.to_string(),
                remedy: remedy.to_owned(),
            };
            return tell(&Event::NoContext { ordinal, refused });
        }
    };
    let (free, total) = (left.free, left.total);
    tell(&Event::Context { ordinal, context: context.bytes(), free, total })?;
    begin(&format!("trying memory operations of a stream on cuda:{ordinal}"))?;
    let tried = context.try_stream_operations(PATIENCE);
    tell(&Event::Streams { ordinal, error: tried.err().map(|error| error.to_string()) })?;
    begin(&format!("giving the context on cuda:{ordinal} back"))
}

fn begin(step: &str) -> anyhow::Result<()> {
    tell(&Event::Begins { step: step.to_owned() })
}

fn tell(event: &Event) -> anyhow::Result<()> {
    terminal::print(&(serde_json::to_string(event)? + "\n"))
}

/// What the child is started with.
#[derive(Debug, Clone)]
pub(super) struct Libraries {
    pub(super) driver: PathBuf,
    pub(super) nvrtc_directory: Option<PathBuf>,
}
