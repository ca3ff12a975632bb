//! A CUDA device: device memory of this process, copied by the daemon's kernel on a stream of the worker.

use std::sync::Arc;

use statecopy_client::blocking::Client;
use statecopy_client::{Error, Slice, Use};
use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::Compiler;
use statecopy_kernels::cuda::store::{Artifacts, Store};
use statecopy_kernels::cuda::{
    CudaDevice, CudaLauncher, CudaOptions, CudaRegion, CudaSelector, Scheduling,
};
use statecopy_kernels::device::{Device as _, Launch, Moved, Region as _};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::plan::KernelClass;
use statecopy_proto::Refusal;
use statecopyd::config::Settings;

use super::{Shared, Target};

/// What sizes of allocations are rounded up to: what the driver gives a legacy handle of.
const GRANULE_BYTES: u64 = 2 << 20;

/// A GPU.
#[derive(Debug)]
pub(in super::super) struct Cuda {
    device: CudaDevice,
    artifacts: Arc<Artifacts>,
}

impl Cuda {
    /// Opens it, with the driver, compiler and stores that the daemon's settings name. Threads wait for the device as in any
    /// other worker.
    ///
    /// # Errors
    /// When there is none, or a store cannot be used.
    pub(in super::super) fn open(
        selector: CudaSelector,
        settings: &Settings,
        selected_max: u64,
        guard: &Arc<ServingGuard>,
    ) -> anyhow::Result<Self> {
        Ok(open(selector, settings, selected_max, guard).map_err(Error::from)?)
    }

    /// Whether kernels that no store has can be compiled.
    pub(in super::super) fn has_compiler(&self) -> bool {
        self.artifacts.compiler().is_ok()
    }

    /// The machine code of a class for this device.
    ///
    /// # Errors
    /// When there is none.
    pub(in super::super) fn code(&self, class: &KernelClass) -> anyhow::Result<Vec<u8>> {
        let chip = self.device.description().family.clone().unwrap_or_default();
        let artifact = self.artifacts.obtain(chip.parse()?, CudaClass::of(class));
        Ok(artifact.map_err(Error::from)?.code)
    }
}

fn open(
    selector: CudaSelector,
    settings: &Settings,
    selected_max: u64,
    guard: &Arc<ServingGuard>,
) -> Result<Cuda, Refusal> {
    let stores = settings.artifact_stores.iter().map(Store::open).collect::<Result<Vec<_>, _>>()?;
    let own = Store::create(&settings.artifact_store)?;
    let compiler = Compiler::open(settings.cuda.nvrtc_directory.as_deref());
    let artifacts = Arc::new(Artifacts::new(stores, Some(own), compiler));
    let usual = CudaOptions::new(selector, Arc::clone(&artifacts), selected_max, Arc::clone(guard));
    let device = CudaDevice::open(CudaOptions {
        driver_library: settings.cuda.driver_library.clone(),
        scheduling: Scheduling::Unchanged,
        ..usual
    })?;
    Ok(Cuda { device, artifacts })
}

impl Target for Cuda {
    type Device = CudaDevice;
    type Offer = ();

    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn allocate(&self, _name: &str, bytes: u64) -> anyhow::Result<Shared<Self>> {
        let region = self.device.scratch(bytes.next_multiple_of(GRANULE_BYTES));
        Ok(Shared { offer: (), region: Arc::new(region.map_err(Error::from)?) })
    }

    fn register(client: &Client, shared: &Shared<Self>, _purpose: Use) -> Result<Slice, Error> {
        client.register_device_memory(shared.region.address(), shared.region.bytes())
    }

    fn write(region: &CudaRegion, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(region.write(at, bytes)?)
    }

    fn read(region: &CudaRegion, at: u64, into: &mut [u8]) -> anyhow::Result<()> {
        Ok(region.read(at, into)?)
    }

    fn start(
        launcher: &mut CudaLauncher,
        launch: &Launch<'_, CudaDevice>,
    ) -> anyhow::Result<Moved> {
        Ok(launcher.enqueue(launch)?)
    }

    fn wait(launcher: &mut CudaLauncher) -> anyhow::Result<()> {
        Ok(launcher.synchronize()?)
    }
}
