//! Order: launches that come one after the other and tell of their end, and the worker's streams that wait for it.

use std::ops::Range;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use statecopy_descriptors::{Mapping, SealedMemory};
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Whose};

use super::launches::Gathering;
use super::*;
use crate::device::{Launcher as _, Moved, Signal, Ticket};
use crate::sync::Ordering;

const PATIENCE: Duration = Duration::from_secs(10);
const FREED: u64 = i64::MAX as u64;

fn until(mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "It does not come");
        std::thread::yield_now();
    }
}

/// Words in the second of three pages.
struct Words {
    mapping: Arc<Mapping>,
    start: u64,
}

impl Words {
    fn new() -> Self {
        let page = rustix::param::page_size() as u64;
        let memory = SealedMemory::create("test", 3 * page).unwrap();
        Self { mapping: Arc::new(memory.map().unwrap()), start: page }
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start + 1024
    }

    fn at(&self, number: u64) -> u64 {
        self.start + 128 * number
    }

    fn load(&self, number: u64) -> u64 {
        self.mapping.atomic_u64(self.at(number)).unwrap().load(Ordering::Acquire)
    }

    fn store(&self, number: u64, value: u64) {
        self.mapping.atomic_u64(self.at(number)).unwrap().store(value, Ordering::Release);
    }
}

impl Drop for Words {
    /// Lets go whatever waits, so that a test that failed ends.
    fn drop(&mut self) {
        (0..8).for_each(|number| self.store(number, FREED));
    }
}

/// Lets a stream wait for what another was asked until now.
///
/// # Safety
/// Both live, and neither is captured.
unsafe fn order_after(worker: &Worker<'_>, stream: u64, other: u64) {
    // SAFETY: the caller's own promise.
    let mark = unsafe { worker.guest.mark(other) }.unwrap();
    // SAFETY: the caller's own promise.
    unsafe { worker.guest.order_after_mark(stream, &mark) }.unwrap();
}

fn in_order(
    gathering: &mut Gathering,
    stream: u32,
    signal: Option<Signal<'_, CudaDevice>>,
    rows: u64,
) -> Ticket {
    gathering.start_rows(rows, |launcher, launch| {
        launcher.launch_in_order(launch, stream, signal).unwrap()
    })
}

#[test]
fn a_launch_in_order_writes_its_signal_after_its_bytes() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let words = Words::new();
    let shared = bed.device.share_words(&words.mapping, words.range()).unwrap();
    let signal = |number, value| Some(Signal { words: &shared, offset: words.at(number), value });
    bed.stub.hold_kernels(Some(Whose::Any));
    let ticket = in_order(&mut gathering, 3, signal(1, 7), 1);
    // One of no rows comes after it.
    let empty = in_order(&mut gathering, 3, signal(2, 9), 0);
    assert_eq!(gathering.launcher.poll(empty), Ok(None));
    assert_eq!((words.load(1), words.load(2)), (0, 0));
    bed.stub.hold_kernels(None);
    until(|| words.load(1) == 7);
    let bytes = usize::try_from(gathering.layout.payload_bytes()).unwrap();
    let mut packed = vec![0; bytes];
    gathering.packed.read(0, &mut packed).unwrap();
    let row = usize::try_from(3 * gathering.layout.page_stride_bytes()).unwrap();
    assert_eq!(packed, gathering.contents[row..row + bytes]);
    assert_eq!(gathering.outcome(ticket), Moved { copied: 1, masked: 0 });
    assert_eq!(gathering.outcome(empty), Moved::default());
    assert_eq!(words.load(2), 9, "told before the ticket answers");
    drop(shared);
    assert_eq!(bed.report().live(Object::Registration), 0);
}

#[test]
fn orders_do_not_wait_for_one_another() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let words = Words::new();
    let shared = bed.device.share_words(&words.mapping, words.range()).unwrap();
    let signal = |number| Some(Signal { words: &shared, offset: words.at(number), value: 1 });
    bed.stub.hold_kernels(Some(Whose::Any));
    let held = in_order(&mut gathering, 0, signal(0), 1);
    let behind = in_order(&mut gathering, 32, signal(1), 0);
    let beside = in_order(&mut gathering, 1, signal(2), 0);
    gathering.outcome(beside);
    assert_eq!((words.load(0), words.load(1), words.load(2)), (0, 0, 1));
    assert_eq!(gathering.launcher.poll(behind), Ok(None), "32 is 0 again");
    bed.stub.hold_kernels(None);
    gathering.outcome(behind);
    gathering.outcome(held);
    assert_eq!((words.load(0), words.load(1)), (1, 1));
}

#[test]
fn a_fault_in_one_order_is_seen_there() {
    let bed = Bed::open();
    let mut gathering = Gathering::of(&bed);
    let words = Words::new();
    let shared = bed.device.share_words(&words.mapping, words.range()).unwrap();
    bed.stub.hold_kernels(Some(Whose::Any));
    bed.stub.fault_next_kernel(Some(Whose::Any));
    let signal = Signal { words: &shared, offset: words.at(0), value: 1 };
    let ticket = in_order(&mut gathering, 5, Some(signal), 1);
    bed.stub.hold_kernels(None);
    let fault = gathering.fault(ticket);
    assert!(fault.0.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
    assert_eq!(words.load(0), 0, "nothing says that the bytes are there");
    // What the device may still write stays.
    let held = bed.report().live(Object::Registration);
    drop(shared);
    assert_eq!(bed.report().live(Object::Registration), held);
}

#[test]
fn words_that_cannot_be_shared_are_refused() {
    let bed = Bed::open();
    let words = Words::new();
    let bytes = words.mapping.len() as u64;
    for range in [bytes - 8..bytes + 8, 64..64, bytes..bytes + 8] {
        let refusal = bed.device.share_words(&words.mapping, range).map(drop).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PrepareFailed);
    }
    for function in [Function::cuMemHostRegister_v2, Function::cuMemHostGetDevicePointer_v2] {
        bed.stub.arm(function, Fault::next(Act::Answer(CUresult::NOT_SUPPORTED)));
        let refusal = bed.device.share_words(&words.mapping, 0..64).map(drop).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PrepareFailed);
        assert!(refusal.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{refusal}");
        assert_eq!(bed.report().live(Object::Registration), 0);
    }
}

/// A worker's side, and what its own library does with the driver.
struct Worker<'a> {
    bed: &'a Bed,
    guest: CudaGuest,
    words: Words,
    shared: GuestWords,
}

/// Calls a function of the driver that the product itself does not use.
macro_rules! driver {
    ($bed:expr, $name:ident($($argument:expr => $type:ty),*)) => {{
        let name = stringify!($name).as_bytes();
        // SAFETY: the symbol is a function of the driver's interface, of this type.
        let function = unsafe {
            $bed.entered.library().get::<unsafe extern "C" fn($($type),*) -> i32>(name)
        };
        // SAFETY: the arguments are values, or point to what the driver writes.
        let status = unsafe { function.unwrap()($($argument),*) };
        assert_eq!(status, 0, stringify!($name));
    }};
}

impl<'a> Worker<'a> {
    fn new(bed: &'a Bed) -> Self {
        let guest = bed.exporter.guest(CudaSelector::Ordinal(0)).unwrap();
        let words = Words::new();
        let shared = guest.share_words(&words.mapping, words.range()).unwrap();
        Self { bed, guest, words, shared }
    }

    fn stream(&self) -> u64 {
        let mut stream = 0;
        driver!(self.bed, cuStreamCreateWithPriority(&raw mut stream => *mut u64, 1 => u32, 0 => i32));
        stream
    }

    fn at(&self, number: u64) -> u64 {
        self.shared.address(self.words.at(number))
    }

    fn enqueue(&self, stream: u64, operations: &[StreamOp]) {
        // SAFETY: the stream is of this test, which keeps the words until it is idle.
        unsafe { self.guest.enqueue(stream, operations) }.unwrap();
    }

    fn capture(&self, stream: u64) -> Option<Capture> {
        // SAFETY: the stream is of this test.
        unsafe { self.guest.capture(stream) }.unwrap()
    }

    fn begin(&self, stream: u64) {
        driver!(self.bed, cuStreamBeginCapture_v2(stream => u64, 0 => u32));
    }

    fn end(&self, stream: u64) -> u64 {
        let mut graph = 0;
        driver!(self.bed, cuStreamEndCapture(stream => u64, &raw mut graph => *mut u64));
        graph
    }

    fn instantiate(&self, graph: u64) -> u64 {
        let mut executable = 0;
        driver!(self.bed, cuGraphInstantiateWithFlags(&raw mut executable => *mut u64, graph => u64, 0 => u64));
        executable
    }

    fn launch(&self, executable: u64, stream: u64) {
        driver!(self.bed, cuGraphLaunch(executable => u64, stream => u64));
    }

    fn count(&self, function: Function) -> u64 {
        self.bed.report().count(function)
    }
}

#[test]
fn a_stream_tells_and_waits_by_one_call() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let stream = worker.stream();
    let before = worker.count(Function::cuStreamBatchMemOp_v2);
    let [bell, done, after] = [0, 1, 2].map(|number| worker.at(number));
    worker.enqueue(
        stream,
        &[
            StreamOp::Write { at: bell, value: 5 },
            StreamOp::WaitAtLeast { at: done, value: 5 },
            StreamOp::Write { at: after, value: 1 },
        ],
    );
    worker.enqueue(stream, &[]);
    assert_eq!(worker.count(Function::cuStreamBatchMemOp_v2), before + 1);
    until(|| worker.words.load(0) == 5);
    worker.words.store(1, 4);
    assert_eq!(worker.words.load(2), 0);
    worker.words.store(1, FREED);
    until(|| worker.words.load(2) == 1);
    // More than are handed over without an allocation.
    let mut many = vec![StreamOp::WaitAny { at: done, bits: 2 }];
    many.extend((1..=8).map(|value| StreamOp::Write { at: after, value: 10 + value }));
    worker.words.store(1, 5);
    worker.enqueue(stream, &many);
    assert_eq!(worker.words.load(2), 1, "5 has no such bit");
    worker.words.store(1, 7);
    until(|| worker.words.load(2) == 18);
}

#[test]
fn a_captured_copy_is_replayed() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let stream = worker.stream();
    assert_eq!(worker.capture(stream), None);
    worker.begin(stream);
    let capture = worker.capture(stream).unwrap();
    let [bell, done] = [0, 1].map(|number| worker.at(number));
    worker.enqueue(
        stream,
        &[
            StreamOp::WaitAny { at: done, bits: 1 },
            StreamOp::Write { at: bell, value: 3 },
            StreamOp::WaitAny { at: done, bits: 2 },
            StreamOp::Write { at: bell, value: 0 },
        ],
    );
    // None of it ends the capture.
    let other = Words::new();
    drop(worker.guest.share_words(&other.mapping, other.range()).unwrap());
    let memory = worker.guest.allocate(100).unwrap();
    // SAFETY: nothing was asked of the memory.
    unsafe { memory.give_back_unused() }.unwrap();
    assert_eq!(worker.capture(stream), Some(capture));
    let graph = worker.end(stream);
    assert_eq!((worker.capture(stream), worker.words.load(0)), (None, 0));
    let executable = worker.instantiate(graph);
    for _ in 0..3 {
        worker.launch(executable, stream);
        assert_eq!(worker.words.load(0), 0);
        worker.words.store(1, 1);
        until(|| worker.words.load(0) == 3);
        worker.words.store(1, 0);
        worker.words.store(1, 2);
        until(|| worker.words.load(0) == 0);
        worker.words.store(1, 0);
    }
    worker.begin(stream);
    assert_ne!(worker.capture(stream).unwrap().id(), capture.id());
    // SAFETY: the stream is of this test.
    unsafe { worker.guest.synchronize(stream) }.unwrap_err();
    // SAFETY: as above.
    let error = unsafe { worker.guest.capture(stream) }.unwrap_err();
    assert_eq!(error.code(), 901, "{error}");
}

#[test]
fn the_end_of_a_graph_is_told_once_when_nothing_of_it_is_left() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let stream = worker.stream();
    worker.begin(stream);
    let (sender, told) = channel::<()>();
    let capture = worker.capture(stream).unwrap();
    let call = Box::new(move || sender.send(()).unwrap());
    // SAFETY: the capture goes on.
    unsafe { worker.guest.on_graph_end(&capture, call) }.unwrap();
    worker.enqueue(stream, &[StreamOp::WaitAtLeast { at: worker.at(0), value: 1 }]);
    let graph = worker.end(stream);
    let executables = [worker.instantiate(graph), worker.instantiate(graph)];
    worker.launch(executables[1], stream);
    driver!(bed, cuGraphDestroy(graph => u64));
    executables.into_iter().for_each(|each| driver!(bed, cuGraphExecDestroy(each => u64)));
    assert!(told.try_recv().is_err(), "it still runs");
    worker.words.store(0, 1);
    told.recv_timeout(PATIENCE).unwrap();
    told.recv_timeout(PATIENCE).unwrap_err();
}

#[test]
fn a_graph_that_cannot_tell_of_its_end_drops_the_call() {
    for function in [Function::cuUserObjectCreate, Function::cuGraphRetainUserObject] {
        let bed = Bed::open();
        let worker = Worker::new(&bed);
        let stream = worker.stream();
        worker.begin(stream);
        let (sender, told) = channel::<()>();
        let capture = worker.capture(stream).unwrap();
        let call = Box::new(move || sender.send(()).unwrap());
        bed.stub.arm(function, Fault::next(Act::Answer(CUresult::NOT_SUPPORTED)));
        // SAFETY: the capture goes on.
        let error = unsafe { worker.guest.on_graph_end(&capture, call) }.unwrap_err();
        assert_eq!(error.code(), 801, "{error}");
        told.recv_timeout(PATIENCE).unwrap_err();
        worker.end(stream);
    }
}

#[test]
fn words_are_given_back_once_no_stream_waits() {
    let bed = Bed::open();
    let registered = || bed.report().live(Object::Registration);
    let worker = Worker::new(&bed);
    assert_eq!(registered(), 1);
    let stream = worker.stream();
    worker.enqueue(stream, &[StreamOp::WaitAtLeast { at: worker.at(0), value: 1 }]);
    worker.words.store(0, FREED);
    let Worker { words, shared, guest, .. } = worker;
    let mut mapping = Arc::downgrade(&words.mapping);
    drop((shared, words));
    assert_eq!((registered(), mapping.strong_count()), (0, 0));
    // Where the driver does not take them back, the device may still write them.
    let words = Words::new();
    let shared = guest.share_words(&words.mapping, words.range()).unwrap();
    mapping = Arc::downgrade(&words.mapping);
    bed.stub.arm(Function::cuMemHostUnregister, Fault::next(Act::Answer(CUresult::UNKNOWN)));
    drop((shared, words));
    assert_eq!((registered(), mapping.strong_count()), (1, 1));
}

#[test]
fn a_stream_comes_after_another_without_a_wait_of_the_host() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let streams = [worker.stream(), worker.stream(), worker.stream()];
    worker.enqueue(streams[0], &[StreamOp::WaitAtLeast { at: worker.at(0), value: 1 }]);
    // SAFETY: the streams are of this test, and not captured.
    unsafe { order_after(&worker, streams[1], streams[0]) };
    worker.enqueue(streams[1], &[StreamOp::Write { at: worker.at(1), value: 1 }]);
    // SAFETY: as above.
    let mark = unsafe { worker.guest.mark(streams[0]) }.unwrap();
    // The stream may go; what was marked stays marked.
    driver!(bed, cuStreamDestroy_v2(streams[0] => u64));
    worker.begin(streams[2]);
    assert!(!worker.guest.is_reached(&mark).unwrap());
    assert_eq!(worker.words.load(1), 0);
    worker.words.store(0, 1);
    until(|| worker.guest.is_reached(&mark).unwrap());
    until(|| worker.words.load(1) == 1);
    assert!(worker.capture(streams[2]).is_some(), "another stream's capture goes on");
    worker.end(streams[2]);
    // SAFETY: the streams are of this test.
    let ids = [1, 2].map(|stream| unsafe { worker.guest.look(streams[stream]) }.unwrap().id);
    assert_ne!(ids[0], ids[1]);
    drop(mark);
    // Events are used again, and go with the guest.
    for _ in 0..10 {
        // SAFETY: the streams are of this test, and not captured.
        unsafe { order_after(&worker, streams[1], streams[2]) };
    }
    assert_eq!(bed.report().live(Object::Event), 1);
    drop(worker);
    assert_eq!(bed.report().live(Object::Event), 0);
}

#[test]
fn a_thread_keeps_its_context_whatever_a_guest_does_with_streams() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let stream = worker.stream();
    let before = bed.report();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            worker.enqueue(stream, &[StreamOp::Write { at: worker.at(0), value: 1 }]);
            assert_eq!(worker.capture(stream), None);
            let words = Words::new();
            drop(worker.guest.share_words(&words.mapping, words.range()).unwrap());
            // SAFETY: the streams are of this test.
            unsafe { order_after(&worker, stream, stream) };
            assert_eq!(guest::current(&bed), 0, "as before");
        });
    });
    let after = bed.report();
    let more = |function| after.count(function) - before.count(function);
    assert_eq!(more(Function::cuCtxPushCurrent_v2), more(Function::cuCtxPopCurrent_v2));
    assert_eq!(more(Function::cuCtxSetCurrent), 0);
}

#[test]
fn a_stream_of_another_device_is_refused_and_nothing_is_put_on_it() {
    let other = StubDevice { uuid: [9; 16], name: "other".to_owned(), ..StubDevice::default() };
    let bed = Bed::over(Stub::create_with(&[StubDevice::default(), other]).unwrap());
    let worker = Worker::new(&bed);
    let own = worker.stream();
    let elsewhere = bed.exporter.worker(CudaSelector::Ordinal(1), &bed.stub.library()).unwrap();
    let foreign = elsewhere.stream().unwrap();
    let operations = [
        StreamOp::Write { at: worker.at(0), value: 1 },
        StreamOp::WaitAtLeast { at: worker.at(1), value: 1 },
    ];
    // SAFETY: the stream is of this test, which keeps the words.
    let refused = unsafe { worker.guest.enqueue(foreign.handle(), &operations) }.unwrap_err();
    assert!(!refused.is_sticky(), "{refused}");
    // SAFETY: as above.
    let refused = unsafe { worker.guest.capture(foreign.handle()) }.unwrap_err();
    assert!(!refused.is_sticky(), "{refused}");
    assert!(foreign.is_idle().unwrap());
    assert_eq!(worker.words.load(0), 0);
    // One of the device's own is none the worse for it.
    worker.enqueue(own, &operations[..1]);
    until(|| worker.words.load(0) == 1);
}

#[test]
fn a_look_at_a_captured_stream_ends_no_capture() {
    let bed = Bed::open();
    let worker = Worker::new(&bed);
    let (stream, other) = (worker.stream(), worker.stream());
    let look = |stream| {
        // SAFETY: the streams are of this test.
        unsafe { worker.guest.look(stream) }.unwrap()
    };
    assert_eq!(look(stream).capture, None);
    assert_ne!(look(stream).id, look(other).id);
    worker.begin(stream);
    let captured = look(stream);
    assert_eq!(captured.capture, worker.capture(stream));
    assert!(captured.capture.is_some());
    assert_eq!(look(stream), captured);
    worker.end(stream);
}
