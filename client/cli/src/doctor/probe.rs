//! The child that tries the driver, and what it tells: one JSON object a line.
//!
//! It says what it is about to do before it does it: when it falls silent, the last line names the call that does not return.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use statecopy_kernels::cuda::MANAGEMENT_LIBRARY;
use statecopy_kernels::cuda::compile::Compiler;
use statecopy_kernels::cuda::probe::{HELD, Probe, ProbedDevice};
use statecopy_kernels::findings::told::{
    ASKING_DEVICES, Event, OPENING_COMPILER, PATIENCE, Refused, STARTING_DRIVER, SeenDevice,
};

use crate::cli::DoctorProbeOptions;
use crate::{spawn, terminal};

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
    begin(STARTING_DRIVER)?;
    let probe = match Probe::open(&options.driver_library, Path::new(MANAGEMENT_LIBRARY)) {
        Ok(probe) => probe,
        Err(error) => return tell(&Event::Refused { refused: error.into() }),
    };
    tell(&Event::Driver { version: probe.version() })?;
    begin(ASKING_DEVICES)?;
    let devices = match probe.devices(options.device) {
        Ok(devices) => devices,
        Err(error) => return tell(&Event::Refused { refused: error.into() }),
    };
    devices.iter().try_for_each(|device| tell_of_device(&probe, device))
}

fn tell_of_device(probe: &Probe, device: &ProbedDevice) -> anyhow::Result<()> {
    let ordinal = device.ordinal;
    tell(&Event::begins_outside(ordinal))?;
    let device_seen = SeenDevice::new(device, probe.seen_from_outside(device));
    tell(&Event::Device { device: device_seen })?;
    tell(&Event::begins_context(ordinal))?;
    let context = match probe.enter(device) {
        Ok(context) => context,
        Err(error) => return tell(&Event::NoContext { ordinal, refused: error.into() }),
    };
    let left = match context.memory_left() {
        Ok(left) => left,
        Err(error) => {
            return tell(&Event::NoContext { ordinal, refused: Refused::of_context(&error) });
        }
    };
    let (free, total) = (left.free, left.total);
    tell(&Event::Context { ordinal, context: context.bytes(), free, total })?;
    tell(&Event::begins_streams(ordinal))?;
    let tried = context.try_stream_operations(PATIENCE, HELD);
    tell(&Event::Streams { ordinal, error: tried.err().map(|error| error.to_string()) })?;
    begin(&format!("giving the context on cuda:{ordinal} back"))
}

fn begin(step: &str) -> anyhow::Result<()> {
    tell(&Event::begins(step))
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
