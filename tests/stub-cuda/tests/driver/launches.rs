//! Kernels, and the order of what a stream does.

use std::ffi::c_void;
use std::ptr;

use statecopy_kernels::cuda::arguments::{
    Arguments, CHUNK_BYTES, DIRECTION_SCATTER, SHAPE_BATCH, SHAPE_FLAGS_ADDRESS,
    SHAPE_FLAGS_INLINE, SHAPE_INDICES_INLINE, SHAPE_ROW_STATES,
};
use statecopy_stub_cuda::{CUresult, Knob, Stub, Whose};

use crate::calls::{Answer, Driver, KernelNode, out};
use crate::until;

/// Two layers of four rows of two bytes, four bytes apart.
const LAYER: [u8; 16] = [1, 2, 90, 91, 3, 4, 92, 93, 5, 6, 94, 95, 7, 8, 96, 97];
const ROWS: u64 = 4;
const SELECTED: usize = 3;

/// A driver with a module, a stream, a host word, and two layers.
struct Rig {
    driver: Driver,
    module: u64,
    stream: u64,
    host: u64,
    layers: [u64; 2],
    packed: u64,
}

impl Rig {
    fn new(stub: &Stub) -> Self {
        let driver = Driver::open(stub);
        let (module, stream) = (driver.load_module().unwrap(), driver.stream().unwrap());
        let host = out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
        let second = LAYER.map(|byte| byte + 100);
        let layers = [driver.holding(&LAYER), driver.holding(&second)];
        let packed = driver.holding(&[77; 2 * SELECTED * 2]);
        Self { driver, module, stream, host, layers, packed }
    }

    /// What every launch of one layer says.
    fn arguments(&self) -> Arguments {
        Arguments {
            base: self.layers[0],
            packed: self.packed,
            shape: SHAPE_INDICES_INLINE | SHAPE_ROW_STATES,
            row_states: self.host + 64,
            rows: ROWS,
            page_stride: 4,
            payload: 2,
            selected: 3,
            ..Arguments::zeroed()
        }
    }

    /// Launches, then has the stream write the host word.
    fn launch(&self, name: &str, arguments: &Arguments, rows: u32) -> Answer {
        let function = self.driver.function(self.module, name)?;
        self.driver.launch(function, self.stream, arguments, rows)?;
        self.driver.cuStreamWriteValue64_v2(self.stream, self.host, 1, 0)
    }

    fn run(&self, name: &str, arguments: &Arguments, rows: u32) -> Answer {
        self.launch(name, arguments, rows)?;
        self.driver.cuStreamSynchronize(self.stream)
    }

    fn packed(&self) -> Vec<u8> {
        self.driver.read(self.packed, 2 * SELECTED * 2).unwrap()
    }

    fn states(&self, rows: usize) -> Vec<u8> {
        self.driver.read(self.host + 64, rows).unwrap()
    }

    fn done(&self) -> bool {
        self.driver.read(self.host, 1).unwrap() == [1]
    }
}

fn inline(arguments: &mut Arguments, bytes: &[u8], at: usize) {
    arguments.inline_bytes[at..at + bytes.len()].copy_from_slice(bytes);
}

fn int32(indices: [i32; SELECTED]) -> Vec<u8> {
    indices.iter().flat_map(|index| index.to_le_bytes()).collect()
}

fn int64(indices: [i64; SELECTED]) -> Vec<u8> {
    indices.iter().flat_map(|index| index.to_le_bytes()).collect()
}

#[test]
fn a_gather_copies_wanted_rows_and_clears_the_others() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let mut arguments = rig.arguments();
    inline(&mut arguments, &int32([3, -1, 0]), 0);
    rig.run("gather_int32", &arguments, 3).unwrap();
    assert_eq!(rig.packed()[..6], [7, 8, 0, 0, 1, 2]);
    assert_eq!(rig.states(3), [1, 0, 1]);
    assert!(rig.done());
    arguments.shape |= SHAPE_FLAGS_INLINE;
    arguments.inline_flags_at = 12;
    inline(&mut arguments, &[255, 1, 0], 12);
    rig.run("gather_int32", &arguments, 3).unwrap();
    assert_eq!(rig.packed()[..6], [7, 8, 0, 0, 0, 0]);
}

#[test]
fn indices_and_flags_are_read_where_they_lie() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let mut arguments = rig.arguments();
    arguments.set_indices_address(rig.driver.holding(&int64([i64::MIN, 4, 2])));
    arguments.flags = rig.driver.holding(&[1, 1, 2]);
    arguments.shape = SHAPE_FLAGS_ADDRESS | SHAPE_ROW_STATES;
    rig.run("gather_int64", &arguments, 3).unwrap();
    assert_eq!(rig.packed()[..6], [0, 0, 0, 0, 5, 6]);
}

#[test]
fn a_part_of_a_batch_moves_its_rows_and_no_others() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let bases: Vec<u8> = rig.layers.iter().flat_map(|base| base.to_le_bytes()).collect();
    let mut arguments = rig.arguments();
    arguments.bases = rig.driver.holding(&bases);
    arguments.first_row = 2;
    arguments.shape |= SHAPE_BATCH;
    inline(&mut arguments, &int32([0, 1, 2]), 0);
    rig.run("gather_int32", &arguments, 2).unwrap();
    assert_eq!(rig.packed(), [77, 77, 77, 77, 5, 6, 101, 102, 77, 77, 77, 77]);
    assert_eq!(rig.states(3), [1, 1, 0]);
}

#[test]
fn a_grid_that_is_too_narrow_leaves_the_end_of_a_row_alone() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let chunk = usize::try_from(CHUNK_BYTES).unwrap();
    let cache = rig.driver.holding(&vec![1; chunk + 100]);
    let packed = rig.driver.holding(&vec![2; chunk + 100]);
    let payload = CHUNK_BYTES + 100;
    let arguments = Arguments { base: cache, packed, payload, rows: 1, ..rig.arguments() };
    rig.run("gather_int32", &arguments, 1).unwrap();
    let read = rig.driver.read(packed, chunk + 100).unwrap();
    assert!(read[..chunk].iter().all(|byte| *byte == 1));
    assert!(read[chunk..].iter().all(|byte| *byte == 2));
}

#[test]
fn a_scatter_skips_invalid_rows_and_ignores_flags() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    for name in ["scatter_int64", "byte_copy"] {
        let mut arguments = rig.arguments();
        arguments.packed = rig.driver.holding(&[21, 22, 23, 24, 25, 26]);
        (arguments.direction, arguments.index_width) = (DIRECTION_SCATTER, 8);
        arguments.shape |= SHAPE_FLAGS_INLINE;
        arguments.inline_flags_at = 24;
        inline(&mut arguments, &int64([1, i64::MAX, 0]), 0);
        rig.driver.cuMemcpyHtoD_v2(rig.layers[0], LAYER.as_ptr().cast(), 16).unwrap();
        rig.run(name, &arguments, 3).unwrap();
        let cache = rig.driver.read(rig.layers[0], 16).unwrap();
        assert_eq!(cache[..8], [25, 26, 90, 91, 21, 22, 92, 93], "{name}");
        assert_eq!(cache[8..], LAYER[8..], "{name}");
        assert_eq!(rig.states(3), [1, 0, 1], "{name}");
    }
}

#[test]
fn an_address_that_nobody_mapped_fails_the_device_for_good() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let mut arguments = rig.arguments();
    arguments.rows = 1 << 40;
    inline(&mut arguments, &int64([1 << 39, 0, 0]), 0);
    stub.hold_kernels(Some(Whose::Any));
    rig.launch("gather_int64", &arguments, 1).unwrap();
    stub.hold_kernels(None);
    let synchronised = rig.driver.cuStreamSynchronize(rig.stream);
    assert_eq!(synchronised, Err(CUresult::ILLEGAL_ADDRESS));
    assert_eq!(rig.driver.cuStreamQuery(rig.stream), Err(CUresult::ILLEGAL_ADDRESS));
    assert_eq!(rig.driver.allocate(1), Err(CUresult::ILLEGAL_ADDRESS));
    let mut count = 0;
    rig.driver.cuDeviceGetCount(&raw mut count).unwrap();
    let word = ptr::with_exposed_provenance::<u64>(usize::try_from(rig.host).unwrap());
    // SAFETY: the word is host memory, which the stream writes by an atomic store if at all.
    let done = unsafe { word.read_volatile() };
    assert_eq!(done, 0, "no word says that it was done");
}

#[test]
fn a_held_kernel_runs_when_it_is_let_go() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    stub.hold_kernels(Some(Whose::Process(std::process::id())));
    rig.launch("gather_int32", &rig.arguments(), 3).unwrap();
    assert_eq!(rig.driver.cuStreamQuery(rig.stream), Err(CUresult::NOT_READY));
    assert!(!rig.done());
    stub.hold_kernels(None);
    until("the kernel runs", || rig.done());
    rig.driver.cuStreamSynchronize(rig.stream).unwrap();
    rig.driver.cuStreamQuery(rig.stream).unwrap();
}

#[test]
fn a_destroyed_stream_still_does_its_work_and_memory_waits_for_it() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    stub.hold_kernels(Some(Whose::Any));
    rig.launch("gather_int32", &rig.arguments(), 3).unwrap();
    rig.driver.cuStreamDestroy_v2(rig.stream).unwrap();
    stub.hold_kernels(None);
    rig.driver.cuMemFree_v2(rig.packed).unwrap();
    assert!(rig.done());
}

#[test]
fn a_stream_waits_for_a_word() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let other = rig.driver.stream().unwrap();
    rig.driver.cuStreamWaitValue64_v2(rig.stream, rig.host + 8, 5, 0).unwrap();
    rig.driver.cuStreamWriteValue64_v2(rig.stream, rig.host, 1, 0).unwrap();
    assert!(!rig.done());
    rig.driver.cuStreamWriteValue64_v2(other, rig.host + 8, 6, 0).unwrap();
    until("the stream goes on", || rig.done());
    rig.driver.cuStreamDestroy_v2(other).unwrap();
    assert_eq!(rig.driver.cuStreamQuery(other), Err(CUresult::INVALID_HANDLE));
}

#[test]
fn a_module_is_loaded_where_there_is_code_for_the_device() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let nothing = [0_u8; 4];
    let loaded = out(|at| driver.cuModuleLoadData(at, nothing.as_ptr().cast()));
    assert_eq!(loaded, Err(CUresult::INVALID_IMAGE));
    let module = driver.load_module().unwrap();
    assert_eq!(driver.function(module, "gather_int16"), Err(CUresult::NOT_FOUND));
    driver.function(module, "byte_copy").unwrap();
    driver.cuModuleUnload(module).unwrap();
    assert_eq!(driver.function(module, "byte_copy"), Err(CUresult::INVALID_HANDLE));
    stub.set(Knob::NoBinary, true);
    assert_eq!(driver.load_module(), Err(CUresult::NO_BINARY_FOR_GPU));
}

#[test]
fn a_stream_that_waits_holds_up_the_others_of_its_connection() {
    const GEQ: u32 = 0;
    // As a client of MPS a process has two.
    for (shared, held) in [(false, 0), (true, 1)] {
        let stub = Stub::create().unwrap();
        stub.set(Knob::Mps, true);
        stub.set(Knob::SharedConnections, shared);
        let driver = Driver::open(&stub);
        let words = out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
        let streams = [(); 3].map(|()| driver.stream().unwrap());
        driver.cuStreamWaitValue64_v2(streams[0], words, 1, GEQ).unwrap();
        for (stream, place) in streams.iter().zip(0..).skip(1) {
            driver.cuStreamWriteValue64_v2(*stream, words + 8 + 8 * place, 1, 0).unwrap();
        }
        let written = || {
            let bytes = driver.read(words + 16, 16).unwrap();
            bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>()
        };
        driver.cuStreamSynchronize(streams[1]).unwrap();
        if !shared {
            driver.cuStreamSynchronize(streams[2]).unwrap();
        }
        assert_eq!(written(), 2 - held);
        let one = 1_u64.to_le_bytes();
        driver.cuMemcpyHtoD_v2(words, one.as_ptr().cast(), one.len()).unwrap();
        until("the streams go on", || written() == 2);
    }
}

/// A kernel of a graph, over so many rows.
fn node(function: u64, parameters: &mut [*mut c_void; 1], rows: u32) -> KernelNode {
    KernelNode {
        function,
        grid: [1, rows, 1],
        block: [256, 1, 1],
        shared: 0,
        parameters: parameters.as_mut_ptr(),
        extra: 0,
        kernel: 0,
        context: 0,
    }
}

#[test]
fn a_kernel_of_a_graph_is_what_it_was_when_the_graph_was_launched() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let driver = &rig.driver;
    let function = driver.function(rig.module, "gather_int32").unwrap();
    let [mut first, mut second] = [[3, -1, 0], [0, 0, 0]].map(|indices| {
        let mut arguments = rig.arguments();
        inline(&mut arguments, &int32(indices), 0);
        arguments
    });
    let mut parameters = [(&raw mut first).cast::<c_void>()];
    let kernel = node(function, &mut parameters, 3);
    let graph = out(|at| driver.cuGraphCreate(at, 0)).unwrap();
    let added =
        out(|at| driver.cuGraphAddKernelNode_v2(at, graph, ptr::null(), 0, &raw const kernel));
    let executable = out(|at| driver.cuGraphInstantiateWithFlags(at, graph, 0)).unwrap();
    driver.cuGraphUpload(executable, rig.stream).unwrap();
    driver.cuStreamSynchronize(rig.stream).unwrap();
    assert_eq!(rig.packed()[..6], [77; 6], "an upload runs nothing");

    stub.hold_kernels(Some(Whose::Any));
    driver.cuGraphLaunch(executable, rig.stream).unwrap();
    let mut parameters = [(&raw mut second).cast::<c_void>()];
    let kernel = node(function, &mut parameters, 1);
    let set = |node| driver.cuGraphExecKernelNodeSetParams_v2(executable, node, &raw const kernel);
    assert_eq!(set(1), Err(CUresult::INVALID_VALUE), "no such kernel");
    set(added.unwrap()).unwrap();
    stub.hold_kernels(None);
    driver.cuStreamSynchronize(rig.stream).unwrap();
    assert_eq!(rig.packed()[..6], [7, 8, 0, 0, 1, 2]);
    driver.cuGraphLaunch(executable, rig.stream).unwrap();
    driver.cuStreamSynchronize(rig.stream).unwrap();
    assert_eq!(rig.packed()[..6], [1, 2, 0, 0, 1, 2]);

    driver.cuModuleUnload(rig.module).unwrap();
    let launched = driver.cuGraphLaunch(executable, rig.stream);
    assert_eq!(launched, Err(CUresult::INVALID_HANDLE), "the kernel's code is gone");
    driver.cuGraphExecDestroy(executable).unwrap();
    driver.cuGraphDestroy(graph).unwrap();
}
