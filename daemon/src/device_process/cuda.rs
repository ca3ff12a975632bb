//! Opening a CUDA device with its stores and its compiler.

use std::sync::Arc;

use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, Compiler};
use statecopy_kernels::cuda::store::{Artifacts, Store, StoreError};
use statecopy_kernels::cuda::{CudaDevice, CudaOptions, CudaSelector};
use statecopy_kernels::device::Device as _;
use statecopy_kernels::guard::ServingGuard;
use statecopy_proto::{Refusal, RefusalCode};

use crate::config::DeviceSettings;

/// Opens a device.
///
/// # Errors
/// DEVICE_NOT_VISIBLE or PREPARE_FAILED: no driver, no such device, no memory, or nothing that could ever be launched.
pub(super) fn open(
    selector: CudaSelector,
    settings: &DeviceSettings,
    guard: &Arc<ServingGuard>,
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
    let compiler = Compiler::open(settings.cuda.nvrtc_directory.as_deref());
    let artifacts = Arc::new(Artifacts::new(stores, writable, compiler));
    let device = CudaDevice::open(CudaOptions {
        driver_library: settings.cuda.driver_library.clone(),
        allowed_preloads: settings.allowed_preloads.clone(),
        passed_over: |error| {
            tracing::warn!(%error, remedy = error.remedy(), "a problem of an artifact store was passed over");
        },
        ..CudaOptions::new(
            selector,
            Arc::clone(&artifacts),
            settings.selected_max,
            Arc::clone(guard),
        )
    })?;
    check_code(&device, &artifacts)?;
    Ok(device)
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
