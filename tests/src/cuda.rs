//! CUDA without a GPU: a stub driver, a daemon and workers over it.

use std::path::Path;

use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, ConnectOptions, DataType, Error, Indices, Layer, Moved, Rebind, Registration, Request,
    Slice, Strides,
};
use statecopy_kernels::cuda::{Allocator, CudaExporter, CudaMemory, CudaSelector};
use statecopy_stub_cuda::{Entered, Object, ProcessReport, Stub, StubDevice};

use crate::daemon::{Daemon, DaemonOptions};
use crate::poll::{PATIENCE, eventually};
use crate::random::{Random, random_bytes};

/// Memory of pieces that can be shared, as small as they can be.
pub const PIECES: Allocator = Allocator::Virtual { piece_bytes: 0, shared: true };

/// A stub driver that this process uses, as a worker. Whatever holds memory of it goes before it.
#[derive(Debug)]
pub struct CudaBed {
    /// Asks that driver.
    pub exporter: CudaExporter,
    _entered: Entered,
    /// The driver.
    pub stub: Stub,
}

impl Default for CudaBed {
    fn default() -> Self {
        Self::over(&[StubDevice::default()])
    }
}

impl CudaBed {
    /// With these devices.
    ///
    /// # Panics
    /// When the stub cannot be made.
    #[must_use]
    pub fn over(devices: &[StubDevice]) -> Self {
        let stub = Stub::create_with(devices).expect("a stub driver");
        let entered = stub.enter();
        let exporter = CudaExporter::open(&stub.library()).expect("the stub driver opens");
        stub.fill_store();
        Self { exporter, _entered: entered, stub }
    }

    /// How a daemon is started that finds the stub, and kernels of every class in a store, and no compiler. It serves the first
    /// device.
    #[must_use]
    pub fn daemon(&self) -> DaemonOptions {
        let quoted = |path: &Path| format!("{:?}", path.display().to_string());
        let kernels = self.stub.store();
        let mut options = DaemonOptions::default()
            .setting("devices", "[\"cuda:0\"]")
            .setting("artifact_stores", &format!("[{}]", quoted(&kernels)))
            .setting("artifact_store", &quoted(&self.stub.directory().join("written")))
            .setting("cuda.nvrtc_directory", "\"/nowhere\"");
        for (name, value) in self.stub.environment() {
            options = options.variable(name, value);
        }
        options
    }

    /// A client of this process.
    ///
    /// # Panics
    /// When it is refused.
    #[must_use]
    pub fn client(&self, daemon: &Daemon) -> Client {
        let address = Address::in_directory(daemon.runtime()).expect("an address");
        Client::connect(address, self.options()).expect("a session")
    }

    /// How a client of this process connects.
    #[must_use]
    pub fn options(&self) -> ConnectOptions {
        ConnectOptions {
            wait_for: PATIENCE,
            cuda_driver_library: self.stub.library(),
            ..ConnectOptions::default()
        }
    }

    /// Memory of this process on the first device.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn allocate(&self, bytes: u64, allocator: Allocator) -> CudaMemory {
        let device = CudaSelector::Ordinal(0);
        self.exporter.allocate(device, bytes, allocator).expect("device memory")
    }

    /// What a process did to the driver, and holds of it.
    ///
    /// # Panics
    /// When it never used the driver.
    #[must_use]
    pub fn report(&self, pid: u32) -> ProcessReport {
        self.stub.process(pid).expect("the process uses the stub driver")
    }

    /// Waits until a process holds so many of each object again.
    ///
    /// # Panics
    /// When it does not in time.
    pub fn wait_for(&self, pid: u32, held: &[(Object, u64)]) {
        eventually(&format!("process {pid} holds {held:?}"), || {
            (self.report(pid).held() == held).then_some(())
        });
    }
}

/// A worker with one layer in device memory, whose rows are compared with what they must be after every copy.
#[derive(Debug)]
pub struct CudaWorker {
    /// Its client.
    pub client: Client,
    /// Its layer.
    pub plan: Plan,
    /// Where the cache lies.
    pub cache_at: Slice,
    cache: CudaMemory,
    packed: CudaMemory,
    packed_at: Slice,
    page_stride: u64,
    random: Random,
}

impl CudaWorker {
    /// Bytes of one state.
    pub const PAYLOAD: u64 = 2 * 4 * 16 * 4;
    /// Rows of the cache.
    pub const ROWS: u64 = 48;
    /// Where the cache begins in its memory.
    pub const OFFSET: u64 = 208;
    const SELECTED: u64 = 8;

    /// Registers a layer whose rows reach over all of `memory`.
    ///
    /// # Panics
    /// When anything is refused.
    #[must_use]
    pub fn register(bed: &CudaBed, client: Client, memory: CudaMemory) -> Self {
        let page_stride = (memory.bytes() - Self::OFFSET) / Self::ROWS / 4 * 4;
        let packed = bed.allocate(Self::SELECTED * Self::PAYLOAD, Allocator::Default);
        let packed_at = client.register_device_memory(packed.address(), packed.bytes());
        let (from, span) = (memory.address() + Self::OFFSET, memory.bytes() - Self::OFFSET);
        let cache_at = client.register_device_memory(from, span).expect("the cache is shared");
        let layer = Layer {
            name: "layers.0".to_owned(),
            dtype: DataType::Float32,
            shape: [Self::ROWS, 2, 4, 16],
            strides: Strides::PageStride(page_stride / 4),
            region: cache_at.region.clone(),
            offset_bytes: cache_at.offset,
            max_selected: Self::SELECTED,
            check_unique: false,
        };
        let bindings = client.register(&Registration::new().layer(layer), |_| {});
        let bindings = bindings.expect("the layer is published");
        Self {
            plan: bindings.layer("layers.0").expect("it was registered").clone(),
            client,
            cache_at,
            cache: memory,
            packed,
            packed_at: packed_at.expect("the packed buffer is shared"),
            page_stride,
            random: Random::new(7),
        }
    }

    /// Gathers and scatters rows from the first to the last, invalid ones among them, and compares every byte of them and
    /// what lies behind each.
    ///
    /// # Panics
    /// When a copy is refused, or a byte is wrong.
    pub fn copy_both_ways(&mut self) {
        self.try_copy_both_ways().expect("a gather");
    }

    /// The same where the gather may be refused.
    ///
    /// # Errors
    /// Why it was.
    ///
    /// # Panics
    /// When a byte is wrong.
    pub fn try_copy_both_ways(&mut self) -> Result<(), Error> {
        let canary = random_bytes(self.random.word(), 64);
        let rows = [Self::ROWS - 1, 0, self.random.below(Self::ROWS - 2) + 1];
        let written = rows.map(|row| {
            let bytes = random_bytes(self.random.word(), Self::PAYLOAD);
            self.cache.write(self.at(row), &bytes).expect("a write");
            if row + 1 < Self::ROWS {
                self.cache.write(self.at(row) + Self::PAYLOAD, &canary).expect("a write");
            }
            bytes
        });
        let row = rows.map(u64::cast_signed);
        let indices = [row[0], -1, row[1], Self::ROWS.cast_signed(), row[2], i64::MIN];
        let request = || Request::new(Indices::Int64(&indices), self.packed_at.clone());
        let moved = self.plan.gather(request())?;
        assert_eq!(moved, Moved { copied: 3, masked: 3 });
        let zeros = vec![0; written[0].len()];
        let gathered = [&written[0], &zeros, &written[1], &zeros, &written[2], &zeros];
        for (at, expected) in (0..).zip(gathered) {
            assert_eq!(self.read(&self.packed, at * Self::PAYLOAD), *expected, "gathered row {at}");
        }

        let computed = random_bytes(self.random.word(), 6 * Self::PAYLOAD);
        self.packed.write(0, &computed).expect("a write");
        let moved = self.plan.scatter(request()).expect("a scatter");
        assert_eq!(moved, Moved { copied: 3, masked: 3 });
        let bytes = written[0].len();
        for (at, row) in [0, 2, 4].into_iter().zip(rows) {
            let expected = &computed[at * bytes..(at + 1) * bytes];
            assert_eq!(self.read(&self.cache, self.at(row)), expected, "scattered row {row}");
            if row + 1 < Self::ROWS {
                let behind = self.read(&self.cache, self.at(row) + Self::PAYLOAD);
                assert_eq!(behind[..64], canary, "behind row {row}");
            }
        }
        Ok(())
    }

    /// Gives the cache's region back, registers its memory anew, and binds the layer to it.
    ///
    /// # Panics
    /// When anything is refused.
    pub fn wake(&mut self) {
        self.client.release_region(self.cache_at.region.clone()).expect("a release");
        let (from, span) = (self.cache.address() + Self::OFFSET, self.cache.bytes() - Self::OFFSET);
        self.cache_at = self.client.register_device_memory(from, span).expect("it is shared again");
        let Slice { region, offset } = self.cache_at.clone();
        let to = Rebind { layer: "layers.0".to_owned(), region, offset_bytes: offset };
        self.client.rebind(&[to]).expect("a rebind");
    }

    /// Where a row begins in the cache's memory.
    fn at(&self, row: u64) -> u64 {
        Self::OFFSET + row * self.page_stride
    }

    fn read(&self, memory: &CudaMemory, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(Self::PAYLOAD).expect("an address")];
        memory.read(offset, &mut bytes).expect("a read");
        bytes
    }
}
