//! The CUDA device over the stub driver: the conformance suite, and what only a driver on demand can show.

mod exports;
mod guest;
mod kernel_graphs;
mod launches;
mod legacy;
mod opening;
mod order;
mod pieces;
mod probing;

use std::path::Path;
use std::process;
use std::sync::Arc;

use statecopy_proto::RefusalCode;
use statecopy_stub_cuda::{Entered, Object, ProcessReport, Stub, StubDevice};

use super::compile::Compiler;
use super::store::{ArtifactKey, Store};
use super::*;
use crate::conformance::DeviceUnderTest;
use crate::device::{Import as _, Piece, Region as _};

/// A store with code of every class for the device, as far as the stub looks at code; and no compiler.
fn artifacts(stub: &Stub) -> Artifacts {
    let store = Store::create(stub.directory().join("kernels")).unwrap();
    for class in CudaClass::all() {
        let compiler = "nvrtc-0.0".to_owned();
        let source = compile::source_hash();
        let key = ArtifactKey { arch: Arch::of_capability(9, 0), class, source, compiler };
        if store.load(&key).unwrap().is_none() {
            store.save(&key, b"\x7fELF of no compiler").unwrap();
        }
    }
    Artifacts::new(vec![store], None, Compiler::open(Some(Path::new("/nowhere"))))
}

/// A device over a stub, in this process. What the process holds of the driver goes before the stub.
pub(super) struct Bed {
    pub(super) device: CudaDevice,
    pub(super) exporter: CudaExporter,
    entered: Entered,
    pub(super) stub: Stub,
}

const SELECTED_MAX: u64 = 4096;

pub(super) fn options(stub: &Stub, selector: CudaSelector) -> CudaOptions {
    let guard = Arc::new(ServingGuard::new(true));
    let mut options = CudaOptions::new(selector, Arc::new(artifacts(stub)), SELECTED_MAX, guard);
    options.driver_library = stub.library();
    options.management_library = "/nowhere".into();
    options
}

impl Bed {
    pub(super) fn open() -> Self {
        Self::over(Stub::create().unwrap())
    }

    /// With the first device of a stub.
    pub(super) fn over(stub: Stub) -> Self {
        let entered = stub.enter();
        let device = CudaDevice::open(options(&stub, CudaSelector::Ordinal(0))).unwrap();
        let exporter = CudaExporter::open(&stub.library()).unwrap();
        Self { device, exporter, entered, stub }
    }

    /// What this process did and holds.
    pub(super) fn report(&self) -> ProcessReport {
        self.stub.process(process::id()).unwrap()
    }

    pub(super) fn held(&self) -> Vec<(Object, u64)> {
        self.report().held()
    }

    /// A worker's memory, as it is allocated on the first device.
    pub(super) fn allocate(&self, bytes: u64, allocator: Allocator) -> CudaMemory {
        self.exporter.allocate(CudaSelector::Ordinal(0), bytes, allocator).unwrap()
    }

    /// Takes all pieces of a worker's memory.
    pub(super) fn export(&self, memory: &CudaMemory) -> (Announced, Vec<Piece>) {
        let mut export = self.exporter.export(memory.address(), memory.bytes()).unwrap();
        (export.announced(), export.next_pieces(usize::MAX).unwrap())
    }

    pub(super) fn import(
        &self,
        announced: Announced,
        pieces: Vec<Piece>,
    ) -> Result<CudaRegion, Refusal> {
        self.device.import(announced)?.of(pieces)
    }

    /// An import that is refused and leaves no object of the driver.
    pub(super) fn refused(&self, announced: Announced, pieces: Vec<Piece>) -> Refusal {
        let held = self.held();
        let refusal = self.import(announced, pieces).map(|_| ()).unwrap_err();
        assert_eq!(self.held(), held, "after {refusal}");
        refusal
    }

    /// Bytes of the first device that anyone maps or has a descriptor of.
    pub(super) fn used_bytes(&self) -> u64 {
        self.stub.used_bytes(&StubDevice::default()).unwrap()
    }
}

/// Memory in small pieces, so that every region of some size has several.
const PIECE_BYTES: u64 = 2 << 20;

impl DeviceUnderTest for Bed {
    type Device = CudaDevice;

    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn allocate(&self, bytes: u64) -> Arc<CudaRegion> {
        if bytes < PIECE_BYTES / 8 {
            // Most of the suite's regions are small, and made in no time this way.
            return Arc::new(self.device.scratch(bytes).unwrap());
        }
        let piece_bytes = PIECE_BYTES.max(bytes / 16);
        let memory = Self::allocate(self, bytes, Allocator::Virtual { piece_bytes, shared: true });
        let (announced, pieces) = self.export(&memory);
        Arc::new(self.import(announced, pieces).unwrap())
    }

    fn write(&self, region: &CudaRegion, offset: u64, bytes: &[u8]) {
        region.write(offset, bytes).unwrap();
    }

    fn read(&self, region: &CudaRegion, offset: u64, into: &mut [u8]) {
        region.read(offset, into).unwrap();
    }
}

mod conformance {
    crate::conformance_tests! { super::Bed::open() }
}

#[test]
fn what_was_taken_of_the_driver_is_given_back() {
    let Bed { device, exporter, entered, stub } = Bed::open();
    let report = || stub.process(process::id()).unwrap();
    let launcher = device.launcher().unwrap();
    let scratch = device.scratch(100).unwrap();
    assert_eq!(scratch.bytes(), 100);
    let mut bytes = [7; 100];
    scratch.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 100]);
    let footprint = device.footprint();
    assert!(footprint.tables >= 1 << 20 && footprint.words > 0);
    drop((launcher, scratch, exporter, device));
    assert_eq!((report().held(), report().torn_down()), (vec![], 0));
    drop(entered);
}

#[test]
fn each_thread_makes_the_context_current_once() {
    use statecopy_stub_cuda::Function;

    let bed = Bed::open();
    let region = bed.device.scratch(16).unwrap();
    let entered = |times: u64| {
        assert_eq!(bed.report().count(Function::cuCtxSetCurrent), times);
    };
    entered(1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                region.write(0, &[1; 16]).unwrap();
            }
        });
    });
    region.write(0, &[1; 16]).unwrap();
    entered(2);
}

#[test]
fn compiler_environment_and_allocator_are_behind_the_guard() {
    let bed = Bed::open();
    let guard = Arc::clone(&bed.device.options.guard);
    let entries = || Door::ALL.map(|door| guard.entries(door));
    let class = KernelClass {
        kind: statecopy_proto::PlanKind::ByteCopy,
        dtype: DataType::Int8,
        payload_bytes: 5,
        base_mod_16: 0,
    };
    let before = entries();
    bed.device.compile(&class).unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1], before[2]]);
    let _configuration = bed.device.configuration();
    bed.device.check_hooks().unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1] + 2, before[2]]);
    bed.device.scratch(4).unwrap();
    bed.device.launcher().unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1] + 2, before[2] + 2]);
}

#[test]
fn the_configuration_names_driver_device_and_code() {
    let bed = Bed::open();
    let configuration = bed.device.configuration();
    let value = |name: &str| {
        let found = configuration.entries.iter().find(|(entry, _)| entry == name);
        found.unwrap_or_else(|| panic!("no {name}")).1.as_str()
    };
    assert!(value("cuda driver").parse::<u32>().unwrap() >= 11_000);
    assert!(value("cuda driver library").contains("cuda"));
    assert_eq!(value("architecture"), "sm_90");
    assert_eq!(value("source"), compile::source_hash());
    assert_eq!(value("compiler"), "none");
}

#[test]
fn more_tables_than_the_device_has_room_for_are_refused() {
    let bed = Bed::open();
    let layout = crate::conformance::cache(DataType::Float32, 1, 4, 4);
    let region = Arc::new(bed.device.scratch(layout.span_bytes()).unwrap());
    let placement = layout.place(0, region.bytes()).unwrap();
    // A mebibyte of addresses each.
    let layers = vec![(region, placement); 1 << 17];
    let mut bound: Vec<CudaCaches> = (0..8).map(|_| bed.device.bind(&layers).unwrap()).collect();
    let refusal = bed.device.bind(&layers).map(|_| ()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    bound.swap_remove(3);
    bound.push(bed.device.bind(&layers).unwrap());
}
