//! The device that is measured, as the one worker sees it: its memory, and the daemon's kernel called in this process.

mod cuda;
mod host;

use std::fmt;
use std::sync::Arc;

use statecopy_client::blocking::Client;
use statecopy_client::{Error, Slice, Use};
use statecopy_kernels::device::{Device, Launch, Moved};

pub(super) use self::cuda::Cuda;
pub(super) use self::host::Host;

/// What an in-process launcher of the device is.
pub(super) type LauncherOf<T> = <<T as Target>::Device as Device>::Launcher;
/// What memory of the device is.
pub(super) type RegionOf<T> = <<T as Target>::Device as Device>::Region;

/// A device whose copies are measured in this process and through the daemon.
pub(super) trait Target: fmt::Debug + Sized {
    /// The daemon's own code for it.
    type Device: Device;
    /// What the worker registers memory by.
    type Offer: fmt::Debug;

    /// The device, opened in this process.
    fn device(&self) -> &Self::Device;

    /// Memory that can be shared, all zero.
    ///
    /// # Errors
    /// When there is none.
    fn allocate(&self, name: &str, bytes: u64) -> anyhow::Result<Shared<Self>>;

    /// Registers it, and says where it begins in its region.
    ///
    /// # Errors
    /// When the daemon refuses.
    fn register(client: &Client, shared: &Shared<Self>, purpose: Use) -> Result<Slice, Error>;

    /// Fills a part of it.
    ///
    /// # Errors
    /// When the device does not.
    fn write(region: &RegionOf<Self>, at: u64, bytes: &[u8]) -> anyhow::Result<()>;

    /// Reads a part of it.
    ///
    /// # Errors
    /// When the device does not.
    fn read(region: &RegionOf<Self>, at: u64, into: &mut [u8]) -> anyhow::Result<()>;

    /// Starts the kernel, and says what it moves.
    ///
    /// # Errors
    /// When the device failed.
    fn start(
        launcher: &mut LauncherOf<Self>,
        launch: &Launch<'_, Self::Device>,
    ) -> anyhow::Result<Moved>;

    /// Waits until everything that was started is done.
    ///
    /// # Errors
    /// When the device failed.
    fn wait(launcher: &mut LauncherOf<Self>) -> anyhow::Result<()>;
}

/// Memory as the client offers it and as the kernel in process sees it.
#[derive(Debug)]
pub(super) struct Shared<T: Target> {
    /// To be registered with the daemon.
    pub(super) offer: T::Offer,
    /// The same bytes, for the kernel in process, and to be filled and looked at.
    pub(super) region: Arc<RegionOf<T>>,
}
