//! What every case is given, and what it does first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use statecopy_client::blocking::Client;
use statecopy_client::{Address, ConnectOptions};
use statecopy_kernels::cuda::{
    Allocator, CudaExporter, CudaMemory, CudaSelector, CudaWorker, DriverError,
};

use crate::daemon::Daemon;

/// Where everything is. It goes from the suite to the process of a case, and from there to its workers, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// The daemon's program.
    pub(crate) statecopyd: PathBuf,
    /// Which device, as the driver counts or by UUID.
    pub(crate) device: String,
    /// Compiled kernels. Without any the daemon compiles.
    pub(crate) kernels: Option<PathBuf>,
    /// Where the daemon looks for its compiler, in place of where the loader searches.
    pub(crate) compiler: Option<PathBuf>,
    /// The CUDA driver.
    pub(crate) driver: PathBuf,
    /// Whether processes share the device through MPS.
    pub(crate) mps: bool,
    /// Small sizes, for a driver that is not a device.
    pub(crate) small: bool,
    /// A folder for what a case needs of the file system.
    pub(crate) home: PathBuf,
    /// The control socket of the daemon that cases share.
    pub(crate) socket: PathBuf,
    /// Where logs are kept.
    pub(crate) output: PathBuf,
}

impl Setup {
    /// A client of the daemon that cases share.
    pub(crate) fn client(&self) -> Result<Client> {
        self.client_of(&self.socket)
    }

    /// A client of the daemon behind a socket.
    pub(crate) fn client_of(&self, socket: &Path) -> Result<Client> {
        let options = ConnectOptions {
            label: "device suite".to_owned(),
            cuda_driver_library: self.driver.clone(),
            wait_for: Duration::from_secs(20),
            ..ConnectOptions::default()
        };
        Ok(Client::connect(Address::of_socket(socket)?, options)?)
    }

    /// A daemon of the case's own.
    pub(crate) fn own_daemon(&self, name: &str) -> Result<Daemon> {
        self.daemon_at(name, "off")
    }

    /// A daemon of the case's own that shows its health and metrics, on loopback.
    pub(crate) fn shown_daemon(&self, name: &str) -> Result<Daemon> {
        self.daemon_at(name, "127.0.0.1:0")
    }

    fn daemon_at(&self, name: &str, http_address: &str) -> Result<Daemon> {
        let folder = self.home.join(name);
        fs::create_dir_all(&folder)?;
        Daemon::start(self, &folder, &self.daemon_log(name), http_address)
    }

    /// Where such a daemon writes its log.
    pub(crate) fn daemon_log(&self, name: &str) -> PathBuf {
        self.output.join(format!("{name}.daemon.log"))
    }

    /// The device, for memory of this process.
    pub(crate) fn gpu(&self) -> Result<Gpu> {
        let exporter = CudaExporter::open(&self.driver)?;
        Ok(Gpu { exporter, selector: self.device.parse()? })
    }

    /// One of two sizes.
    pub(crate) fn size<T>(&self, device: T, small: T) -> T {
        if self.small { small } else { device }
    }
}

/// The driver cuts smaller allocations out of blocks of that size.
const BLOCK_BYTES: u64 = 2 << 20;

/// The device, as a worker without an allocator uses it.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) exporter: CudaExporter,
    selector: CudaSelector,
}

impl Gpu {
    /// Memory of this process, in blocks that the driver gives nobody else.
    pub(crate) fn allocate(&self, bytes: u64, allocator: Allocator) -> Result<CudaMemory> {
        let whole = allocator == Allocator::Default;
        let bytes = if whole { bytes.next_multiple_of(BLOCK_BYTES) } else { bytes };
        self.allocate_exactly(bytes, allocator)
    }

    /// Memory of this process, of that size and no other.
    pub(crate) fn allocate_exactly(&self, bytes: u64, allocator: Allocator) -> Result<CudaMemory> {
        let memory = self.exporter.allocate(self.selector, bytes, allocator);
        memory.with_context(|| format!("{bytes} bytes by {allocator:?}"))
    }

    /// Streams of this process, and what they do beside copies.
    pub(crate) fn worker(&self, setup: &Setup) -> Result<CudaWorker> {
        Ok(self.exporter.worker(self.selector, &setup.driver)?)
    }

    /// Lets a kernel of this process fault.
    pub(crate) fn fault(&self) -> Result<DriverError> {
        Ok(self.exporter.fault(self.selector)?)
    }

    /// Bytes that no process has.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        Ok(self.exporter.memory_left(self.selector)?.free)
    }
}
