//! Opening a CUDA device with its stores and its compiler.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, Compiler};
use statecopy_kernels::cuda::probe::Probe;
use statecopy_kernels::cuda::store::{Artifacts, Store, StoreError};
use statecopy_kernels::cuda::{CudaDevice, CudaOptions, CudaSelector, MANAGEMENT_LIBRARY};
use statecopy_kernels::device::Device as _;
use statecopy_kernels::findings::told::{
    ASKING_DEVICES, Event, OPENING_COMPILER, PATIENCE, Refused, STARTING_DRIVER, SeenDevice,
};
use statecopy_kernels::guard::ServingGuard;
use statecopy_proto::{Refusal, RefusalCode};

use crate::config::DeviceSettings;

/// How long a start looks at a stream's wait that must not end. Doctor looks longer; a start has no time for it.
const HELD_AT_START: Duration = Duration::from_millis(20);

/// Opens a device, and tells each step before it is taken: a call of the driver may never return.
///
/// # Errors
/// DEVICE_NOT_VISIBLE or PREPARE_FAILED: no driver, no such device, no memory, or nothing that could ever be launched.
pub(super) fn open(
    selector: CudaSelector,
    settings: &DeviceSettings,
    guard: &Arc<ServingGuard>,
    tell: &dyn Fn(Event),
) -> Result<CudaDevice, Refusal> {
    let stores = settings.artifact_stores.iter().map(Store::open).collect::<Result<Vec<_>, _>>()?;
    let writable = match Store::create(&settings.artifact_store) {
        Ok(store) => Some(store),
        // On a file system that nobody writes to, what no other store has is compiled at each start.
        Err(error @ StoreError::Io { .. }) => {
            tracing::warn!(
                %error,
                remedy = "let artifact_store name a directory that this user may write",
                "compiled kernels are not kept"
            );
            None
        }
        Err(error) => return Err(error.into()),
    };
    tell(Event::begins(OPENING_COMPILER));
    let compiler = Compiler::open(settings.cuda.nvrtc_directory.as_deref());
    tell(match &compiler {
        Ok(compiler) => Event::Compiler { version: compiler.version().to_string() },
        Err(error) => Event::NoCompiler { reason: error.to_string() },
    });
    let artifacts = Arc::new(Artifacts::new(stores, writable, compiler));
    let ordinal = describe(selector, settings, tell)?;
    tell(Event::begins_context(ordinal));
    let device = CudaDevice::open(CudaOptions {
        driver_library: settings.cuda.driver_library.clone(),
        allowed_preloads: settings.allowed_preloads.clone(),
        passed_over: |error| {
            tracing::warn!(%error, remedy = error.remedy(), "a problem of an artifact store was passed over");
        },
        without_graphs: |reason| {
            tracing::warn!(
                reason,
                "the driver makes no graphs of a kernel: its copies take some 2 us more"
            );
        },
        ..CudaOptions::new(
            selector,
            Arc::clone(&artifacts),
            settings.selected_max,
            Arc::clone(guard),
        )
    })?;
    try_out(&device, ordinal, tell)?;
    check_code(&device, &artifacts)?;
    Ok(device)
}

/// Starts the driver, and tells of it and of the device. Returns the device's place in the driver's order.
fn describe(
    selector: CudaSelector,
    settings: &DeviceSettings,
    tell: &dyn Fn(Event),
) -> Result<u32, Refusal> {
    tell(Event::begins(STARTING_DRIVER));
    let probe = Probe::open(&settings.cuda.driver_library, Path::new(MANAGEMENT_LIBRARY))?;
    tell(Event::Driver { version: probe.version() });
    tell(Event::begins(ASKING_DEVICES));
    let devices = probe.devices(Some(selector))?;
    for device in &devices {
        tell(Event::begins_outside(device.ordinal));
        let outside = probe.seen_from_outside(device);
        tell(Event::Device { device: SeenDevice::new(device, outside) });
    }
    Ok(devices.first().map_or(0, |device| device.ordinal))
}

/// Tells what is left of a device beside its context, and whether its streams do what copies will ask of them.
fn try_out(device: &CudaDevice, ordinal: u32, tell: &dyn Fn(Event)) -> Result<(), Refusal> {
    let context = device.probed();
    let left = context.memory_left().map_err(|error| {
        let refused = Refused::of_context(&error);
        Refusal::new(RefusalCode::PrepareFailed, refused.sentence).remedied_by(refused.remedy)
    })?;
    let (free, total) = (left.free, left.total);
    tell(Event::Context { ordinal, context: context.bytes(), free, total });
    tell(Event::begins_streams(ordinal));
    let tried = context.try_stream_operations(PATIENCE, HELD_AT_START);
    tell(Event::Streams { ordinal, error: tried.err().map(|error| error.to_string()) });
    Ok(())
}

/// Refuses a device that nothing could ever be launched on: not ready is better than a refusal of each registration.
fn check_code(device: &CudaDevice, artifacts: &Artifacts) -> Result<(), Refusal> {
    let Err(error) = artifacts.compiler() else { return Ok(()) };
    let chip = device.description().family.clone().unwrap_or_default();
    // One whole artifact will do: which classes a worker needs is not known yet.
    let whole =
        |arch| CudaClass::all().into_iter().any(|class| artifacts.obtain(arch, class).is_ok());
    if chip.parse().is_ok_and(whole) {
        return Ok(());
    }
    let mut known: Vec<String> = artifacts.architectures().iter().map(Arch::to_string).collect();
    known.sort();
    known.dedup();
    let known = match known.as_slice() {
        [] => "none".to_owned(),
        known if known.contains(&chip) => {
            format!("{}, and none for {chip} is whole", known.join(", "))
        }
        known => known.join(", "),
    };
    let name = &device.description().name;
    let sentence = format!(
        "There are no kernels for {name} ({chip}): the artifact stores hold kernels for {known}; {error}"
    );
    Err(Refusal::new(RefusalCode::PrepareFailed, sentence).remedied_by(error.remedy()))
}
