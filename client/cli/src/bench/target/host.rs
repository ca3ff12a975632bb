//! The host: shared memory files, copied by the CPU.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::Context;
use statecopy_client::blocking::Client;
use statecopy_client::{Error, Memory, Slice, Use};
use statecopy_kernels::device::{Launch, Launcher as _, Moved};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostLauncher, HostOptions, HostRegion};

use super::{Shared, Target};

/// The host with its copying threads.
#[derive(Debug)]
pub(in super::super) struct Host {
    device: HostDevice,
}

impl Host {
    /// Opens it with that many copying threads.
    ///
    /// # Errors
    /// When the host does not serve.
    pub(in super::super) fn open(
        copy_threads: NonZeroUsize,
        guard: &Arc<ServingGuard>,
    ) -> anyhow::Result<Self> {
        let options = HostOptions { copy_threads, ..HostOptions::new(Arc::clone(guard)) };
        Ok(Self { device: HostDevice::open(options).map_err(Error::from)? })
    }
}

impl Target for Host {
    type Device = HostDevice;
    type Offer = Memory;

    fn device(&self) -> &HostDevice {
        &self.device
    }

    fn allocate(&self, name: &str, bytes: u64) -> anyhow::Result<Shared<Self>> {
        let offer = Memory::allocate(name, bytes)?;
        let descriptor = offer.as_fd().try_clone_to_owned().context("Another descriptor")?;
        let region = self.device.adopt(descriptor, bytes).map_err(Error::from)?;
        Ok(Shared { offer, region: Arc::new(region) })
    }

    fn register(client: &Client, shared: &Shared<Self>, purpose: Use) -> Result<Slice, Error> {
        Ok(client.register_region(&shared.offer, purpose)?.at(0))
    }

    fn write(region: &HostRegion, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(region.mapping().write(at, bytes)?)
    }

    fn read(region: &HostRegion, at: u64, into: &mut [u8]) -> anyhow::Result<()> {
        Ok(region.mapping().read(at, into)?)
    }

    fn start(
        launcher: &mut HostLauncher,
        launch: &Launch<'_, HostDevice>,
    ) -> anyhow::Result<Moved> {
        let ticket = launcher.launch(launch)?;
        launcher.poll(ticket)?.context("A launch on the host is done at once")
    }

    fn wait(_launcher: &mut HostLauncher) -> anyhow::Result<()> {
        Ok(())
    }
}
