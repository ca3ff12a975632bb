//! Copies in the order of streams of a machine with two devices, over the stub driver.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    DataType, Direction, Error, IndexWidth, Indices, Layer, Ordered, Rebind, RefusalCode,
    Registration, Request, Slice, StreamLane, Strides,
};
use statecopy_kernels::cuda::{CudaMemory, CudaSelector, GuestWords, WordOp, WorkerStream};
use statecopy_stub_cuda::{
    Act, CUresult, Fault, Function, Object, ProcessReport, StubDevice, Whose,
};
use statecopy_tests::{CudaBed, CudaWorker, Daemon, PATIENCE, PIECES, random_bytes, until};

const ROWS: u64 = 4;
const PAYLOAD: u64 = 512;

/// A layer on the first device, and indices: slot `n` names row `n`.
struct Worker {
    plan: Plan,
    client: Client,
    packed: CudaMemory,
    packed_at: Slice,
    inputs_at: Slice,
    rows: Vec<u8>,
    _cache: CudaMemory,
    _inputs: CudaMemory,
}

impl Worker {
    fn new(bed: &CudaBed, daemon: &Daemon) -> Self {
        Self::of(bed, daemon, DataType::Float32).unwrap()
    }

    fn of(bed: &CudaBed, daemon: &Daemon, dtype: DataType) -> Result<Self, Error> {
        let client = bed.client(daemon);
        let memory = |bytes: &[u8]| {
            let memory = bed.allocate(bytes.len() as u64, PIECES);
            memory.write(0, bytes).unwrap();
            let at = client.register_device_memory(memory.address(), memory.bytes()).unwrap();
            (memory, at)
        };
        let rows = random_bytes(3, ROWS * PAYLOAD);
        let named: Vec<u8> =
            (0..ROWS).flat_map(|row| [row, 0]).flat_map(u64::to_le_bytes).collect();
        let (cache, cache_at) = memory(&rows);
        let (packed, packed_at) = memory(&vec![0; rows.len()]);
        let (inputs, inputs_at) = memory(&named);
        let layer = Layer {
            name: "layers.0".to_owned(),
            dtype,
            shape: [ROWS, 1, 1, PAYLOAD / dtype.item_bytes()],
            strides: Strides::PageStride(PAYLOAD / dtype.item_bytes()),
            region: cache_at.region,
            offset_bytes: cache_at.offset,
            max_selected: 1,
            check_unique: false,
        };
        let bindings = client.register(&Registration::new().layer(layer), |_| {})?;
        let plan = bindings.layer("layers.0").unwrap().clone();
        Ok(Self {
            plan,
            client,
            packed,
            packed_at,
            inputs_at,
            rows,
            _cache: cache,
            _inputs: inputs,
        })
    }

    fn request(&self, row: u64) -> Request<'static> {
        let at = self.inputs_at.region.at(self.inputs_at.offset + row * 16);
        let packed = self.packed_at.region.at(self.packed_at.offset + row * PAYLOAD);
        Request::new(Indices::Shared { width: IndexWidth::Int64, at, selected: 1 }, packed)
    }

    /// A lane, and a stream of the worker's device that reaches its words.
    fn on_a_stream(&self, bed: &CudaBed) -> (StreamLane, Arc<GuestWords>, WorkerStream) {
        let here = bed.exporter.worker(CudaSelector::Ordinal(0), &bed.stub.library()).unwrap();
        let lane = self.client.open_lane().unwrap();
        let (mapping, range) = lane.memory();
        let words = Arc::new(here.guest().share_words(mapping, range).unwrap());
        (lane, words, here.stream().unwrap())
    }

    fn has(&self, row: u64) -> bool {
        let at = usize::try_from(row * PAYLOAD).unwrap();
        let mut found = vec![0; usize::try_from(PAYLOAD).unwrap()];
        self.packed.read(row * PAYLOAD, &mut found).unwrap();
        found == self.rows[at..at + found.len()]
    }
}

/// What a stream is asked for an accepted copy.
fn steps(ordered: &Ordered<'_>) -> [WordOp; 2] {
    let (bell, done) = (ordered.bell(), ordered.done());
    [
        WordOp::Write { offset: bell.offset, value: bell.value },
        WordOp::WaitAtLeast { offset: done.offset, value: done.value },
    ]
}

fn finish(stream: &WorkerStream) {
    until("the stream is done", || stream.is_idle().unwrap());
}

#[test]
fn a_stream_of_another_device_orders_copies_too_because_words_are_memory_of_the_host() {
    let other = StubDevice { uuid: [2; 16], name: "other".to_owned(), ..StubDevice::default() };
    let bed = CudaBed::over(&[StubDevice::default(), other]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let mut neighbour =
        CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    let on = |ordinal| bed.exporter.worker(CudaSelector::Ordinal(ordinal), &bed.stub.library());
    let (here, elsewhere) = (on(0).unwrap(), on(1).unwrap());
    let mut lane = worker.client.open_lane().unwrap();
    let (mapping, range) = lane.memory();
    let words = Arc::new(here.guest().share_words(mapping, range).unwrap());
    let mut streams = [elsewhere.stream().unwrap(), here.stream().unwrap()];
    for (row, stream) in (0..ROWS).zip([0, 1, 0, 1]) {
        let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(row)).unwrap();
        streams[stream].enqueue(&words, &steps(&ordered)).unwrap();
        finish(&streams[stream]);
        assert!(worker.has(row), "row {row}");
        lane.check().unwrap();
        neighbour.copy_both_ways();
    }
    let device = bed.report(daemon.device_process());
    assert_eq!(device.count(Function::cuDevicePrimaryCtxRetain), 1, "the daemon has one device");
}

#[test]
fn a_copy_that_runs_when_its_client_is_let_go_of_is_waited_for_by_its_stream() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let (mut lane, words, mut stream) = worker.on_a_stream(&bed);
    let device = daemon.device_process();
    let launches = || bed.report(device).count(Function::cuGraphLaunch);
    let before = launches();
    bed.stub.hold_kernels(Some(Whose::Process(device)));
    let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(2)).unwrap();
    stream.enqueue(&words, &steps(&ordered)).unwrap();
    until("the copy runs", || launches() > before);
    let Worker { plan, client, packed, packed_at, inputs_at, rows, _cache, _inputs } = worker;
    drop((lane, plan, client, packed_at, inputs_at));
    for _ in 0..20 {
        assert!(!stream.is_idle().unwrap(), "the copy is not done");
        thread::sleep(Duration::from_millis(10));
    }
    bed.stub.hold_kernels(None);
    finish(&stream);
    let mut found = vec![0; usize::try_from(PAYLOAD).unwrap()];
    packed.read(2 * PAYLOAD, &mut found).unwrap();
    let at = found.len() * 2;
    assert_eq!(found, rows[at..at + found.len()]);
    until("the session ends", || daemon.inspect().sessions.is_empty());
}

#[test]
fn a_device_that_fails_under_a_copy_lets_its_stream_go_once_its_process_is_gone() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let (mut lane, words, mut stream) = worker.on_a_stream(&bed);
    let failing = daemon.device_process();
    bed.stub.fault_next_kernel(Some(Whose::Process(failing)));
    let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    stream.enqueue(&words, &steps(&ordered)).unwrap();
    finish(&stream);
    let state = std::fs::read_to_string(format!("/proc/{failing}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "it may still write: {state}");
    let error = lane.check().unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::DeviceLost), "{error}");
    let mut other = worker.client.open_lane().unwrap();
    let ordered = other.order(&worker.plan, Direction::Gather, &worker.request(3)).unwrap();
    stream.enqueue(&words, &steps(&ordered)).unwrap();
    finish(&stream);
    other.check().unwrap();
    assert!(worker.has(3));
}

/// How often the device process gave a graph's kernel its parameter, and launched one.
fn prepared_and_launched(bed: &CudaBed, daemon: &Daemon) -> [u64; 2] {
    let report = bed.report(daemon.device_process());
    [Function::cuGraphExecKernelNodeSetParams_v2, Function::cuGraphLaunch]
        .map(|function| report.count(function))
}

#[test]
fn a_copy_is_prepared_for_before_its_bell_and_nothing_runs() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let (mut lane, words, mut stream) = worker.on_a_stream(&bed);
    let counts = || prepared_and_launched(&bed, &daemon);
    let [prepared, launched] = counts();
    let first = lane.order(&worker.plan, Direction::Gather, &worker.request(2)).unwrap();
    let first = steps(&first);
    let second = lane.order(&worker.plan, Direction::Gather, &worker.request(3)).unwrap();
    let second = steps(&second);
    until("the first is prepared for", || counts() == [prepared + 1, launched]);
    stream.enqueue(&words, &first).unwrap();
    finish(&stream);
    assert!(worker.has(2));
    until("so is the next one", || counts() == [prepared + 2, launched + 1]);
    stream.enqueue(&words, &second).unwrap();
    finish(&stream);
    assert!(worker.has(3));
    assert_eq!(counts(), [prepared + 2, launched + 2]);
}

#[test]
fn a_slot_is_prepared_for_before_its_graph_is_replayed() {
    const REPLAYS: u64 = 20;
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let counts = || prepared_and_launched(&bed, &daemon);
    let [prepared, launched] = counts();
    let mut lane = worker.client.open_graph_lane().unwrap();
    let armed = [1, 2, 3].map(|row| {
        let slot = lane.arm(&worker.plan, Direction::Gather, &worker.request(row)).unwrap();
        until("its first replay is prepared for", || counts()[0] > prepared);
        slot
    });
    let before = counts()[0];
    for replay in 0..REPLAYS {
        for (slot, at) in armed.iter().zip(1..) {
            slot.replay(&lane, PATIENCE).unwrap();
            let made = replay * 3 + at;
            until("the next one is prepared for", || counts()[0] >= before + made);
            assert_eq!(counts(), [before + made, launched + made]);
        }
    }
    assert!([1, 2, 3].into_iter().all(|row| worker.has(row)));
    lane.check().unwrap();
}

#[test]
fn a_copy_that_was_prepared_for_reaches_what_its_layer_is_bound_to_at_the_bell() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let worker = Worker::new(&bed, &daemon);
    let (mut lane, words, mut stream) = worker.on_a_stream(&bed);
    let counts = || prepared_and_launched(&bed, &daemon);
    let [prepared, _] = counts();
    let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    let steps = steps(&ordered);
    until("it is prepared for", || counts()[0] == prepared + 1);
    // The rows lie in another order now.
    let mut moved = worker.rows.clone();
    moved.reverse();
    let memory = bed.allocate(moved.len() as u64, PIECES);
    memory.write(0, &moved).unwrap();
    let at = worker.client.register_device_memory(memory.address(), memory.bytes()).unwrap();
    until("it is prepared for with the new region", || counts()[0] == prepared + 2);
    let layer = "layers.0".to_owned();
    worker.client.rebind(&[Rebind { layer, region: at.region, offset_bytes: at.offset }]).unwrap();
    until("it is prepared for again", || counts()[0] > prepared + 2);
    stream.enqueue(&words, &steps).unwrap();
    finish(&stream);
    let (start, bytes) = (PAYLOAD, usize::try_from(PAYLOAD).unwrap());
    let mut found = vec![0; bytes];
    worker.packed.read(start, &mut found).unwrap();
    assert_eq!(found, moved[bytes..2 * bytes]);
    // What was prepared for goes before what it names.
    drop(ordered);
    let before = counts()[0];
    let unrung = lane.order(&worker.plan, Direction::Gather, &worker.request(2)).unwrap();
    until("it is prepared for", || counts()[0] > before);
    drop(unrung);
    worker.client.release_layers().unwrap();
    let device = daemon.device_process();
    until("the kernels are unloaded", || {
        let report = bed.report(device);
        [Object::Executable, Object::Module].map(|object| report.live(object)) == [0, 0]
    });
}

/// Bytes that the driver may be asked to register or allocate at once while others are served. It makes their launches wait
/// meanwhile: for 6 ms where it pins 11 MiB, for 0.6 where it pins 24 KiB, for 0.1 where it allocates or maps little (H200).
const AT_ONCE_BYTES: u64 = 1 << 20;

#[test]
fn kernels_are_tried_without_large_calls_of_the_driver_and_those_of_another_class_pin_nothing() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let device = daemon.device_process();
    let mut before = bed.report(device);
    let mut workers = Vec::new();
    for dtype in [DataType::Float32, DataType::BFloat16, DataType::Int8, DataType::Float64] {
        workers.push(Worker::of(&bed, &daemon, dtype).unwrap());
        let after = bed.report(device);
        let loaded = |report: &ProcessReport| report.count(Function::cuModuleLoadData);
        assert_eq!(loaded(&after), loaded(&before) + 1, "{dtype} has a class of its own");
        let bytes_of = |function| {
            let calls = after.calls[before.calls.len()..].iter();
            calls.filter(move |call| call.function == function).map(|call| call.arguments[1])
        };
        assert!(bytes_of(Function::cuGraphLaunch).count() >= 4, "{dtype}: the variants were run");
        let pinned: Vec<u64> = bytes_of(Function::cuMemHostAlloc).collect();
        assert_eq!(pinned.len(), usize::from(workers.len() == 1), "{dtype}: {pinned:?}");
        let taken =
            bytes_of(Function::cuMemAlloc_v2).chain(bytes_of(Function::cuMemHostRegister_v2));
        let taken: Vec<u64> = taken.chain(pinned).collect();
        assert!(taken.iter().all(|bytes| *bytes <= AT_ONCE_BYTES), "{dtype}: {taken:?}");
        before = after;
    }
}

#[test]
fn what_tries_kernels_is_kept_when_a_registration_finds_no_memory() {
    let bed = CudaBed::over(&[StubDevice::default()]);
    let daemon = bed.daemon().start();
    let device = daemon.device_process();
    let worker = Worker::new(&bed, &daemon);
    let pinned = || bed.report(device).count(Function::cuMemHostAlloc);
    let before = pinned();
    let none_left = Fault::next(Act::Answer(CUresult::OUT_OF_MEMORY)).of(device);
    bed.stub.arm(Function::cuMemAlloc_v2, none_left);
    let Err(Error::Refused(refusal)) = Worker::of(&bed, &daemon, DataType::BFloat16) else {
        panic!("there was memory for scratch");
    };
    assert_eq!(refusal.code(), RefusalCode::PrepareFailed, "{refusal}");
    drop(worker);
    Worker::of(&bed, &daemon, DataType::BFloat16).unwrap();
    assert_eq!(pinned(), before);
}
