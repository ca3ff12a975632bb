//! Captures and graphs, events, and operations in batches.

use std::ffi::c_void;
use std::ptr;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use statecopy_stub_cuda::{CUresult, Stub};

use crate::calls::{Driver, out};
use crate::until;

const PATIENCE: Duration = Duration::from_secs(10);
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// A wait of 64 bits, with its flags: 0 at least, 2 any of the bits.
fn wait(at: u64, value: u64, flags: u64) -> [u64; 6] {
    [4, at, value, flags, 0, 0]
}

fn write(at: u64, value: u64) -> [u64; 6] {
    [5, at, value, 0, 0, 0]
}

/// A driver, two streams and a page of words.
struct Rig {
    driver: Driver,
    streams: [u64; 2],
    words: u64,
}

impl Rig {
    fn new(stub: &Stub) -> Self {
        let driver = Driver::open(stub);
        let streams = [0, 1].map(|_| driver.stream().unwrap());
        let words = out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
        driver.cuMemsetD8_v2(words, 0, 4096).unwrap();
        Self { driver, streams, words }
    }

    fn word(&self, number: u64) -> u64 {
        self.words + number * 8
    }

    fn host_word(&self, number: u64) -> *mut u64 {
        ptr::with_exposed_provenance_mut(usize::try_from(self.word(number)).unwrap())
    }

    fn load(&self, number: u64) -> u64 {
        // SAFETY: the word lies in host memory, and is only read and written whole.
        unsafe { self.host_word(number).read_volatile() }
    }

    fn store(&self, number: u64, value: u64) {
        // SAFETY: as above.
        unsafe { self.host_word(number).write_volatile(value) };
    }

    fn operate(&self, stream: u64, operations: &mut [[u64; 6]]) -> Result<(), CUresult> {
        let count = u32::try_from(operations.len()).unwrap();
        self.driver.cuStreamBatchMemOp_v2(stream, count, operations.as_mut_ptr(), 0)
    }

    /// Status, number and graph.
    fn capture(&self, stream: u64) -> Result<(u32, u64, u64), CUresult> {
        let (mut status, mut id, mut graph) = (9, 0, 0);
        let none = ptr::null_mut();
        self.driver.cuStreamGetCaptureInfo_v2(
            stream,
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            none,
            none.cast(),
        )?;
        Ok((status, id, graph))
    }

    fn end(&self, stream: u64) -> Result<u64, CUresult> {
        out(|at| self.driver.cuStreamEndCapture(stream, at))
    }

    fn instantiate(&self, graph: u64) -> u64 {
        out(|at| self.driver.cuGraphInstantiateWithFlags(at, graph, 0)).unwrap()
    }

    fn synchronise(&self) {
        self.streams.iter().for_each(|each| self.driver.cuStreamSynchronize(*each).unwrap());
    }
}

#[test]
fn a_batch_is_done_in_its_order_or_refused_whole() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let stream = rig.streams[0];
    let [bell, done, after] = [0, 1, 2].map(|number| rig.word(number));
    rig.operate(stream, &mut [write(bell, 7), wait(done, 6, 2), write(after, 1)]).unwrap();
    until("the word", || rig.load(0) == 7);
    assert_eq!((rig.load(2), rig.driver.cuStreamQuery(stream)), (0, Err(CUresult::NOT_READY)));
    rig.store(1, 8);
    assert_eq!(rig.load(2), 0, "none of the bits");
    rig.store(1, 2);
    until("the word", || rig.load(2) == 1);
    rig.store(0, 0);
    let refused = rig.operate(stream, &mut [write(bell, 9), write(bell + 4, 9)]);
    assert_eq!(refused, Err(CUresult::INVALID_VALUE));
    assert_eq!(rig.operate(stream, &mut vec![write(bell, 9); 256]), Err(CUresult::INVALID_VALUE));
    rig.synchronise();
    assert_eq!(rig.load(0), 0);
}

#[test]
fn a_captured_stream_does_nothing_until_its_graph_is_launched() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let [stream, other] = rig.streams;
    assert_eq!(rig.capture(stream).unwrap().0, 0);
    rig.driver.cuStreamBeginCapture_v2(stream, GLOBAL).unwrap();
    let (status, id, captured) = rig.capture(stream).unwrap();
    assert_eq!((status, rig.capture(other).unwrap().0), (1, 0));
    let status = out(|at| rig.driver.cuStreamIsCapturing(stream, at));
    assert_eq!(status, Ok(1));
    let status = out(|at| rig.driver.cuStreamIsCapturing(0, at));
    assert_eq!(status, Ok(0), "the default stream does not wait for this one");
    // Another stream joins by an event of the first.
    let event = out(|at| rig.driver.cuEventCreate(at, 2)).unwrap();
    rig.driver.cuEventRecord(event, stream).unwrap();
    rig.driver.cuStreamWaitEvent(other, event, 0).unwrap();
    assert_eq!(rig.capture(other).unwrap(), (1, id, captured));
    rig.operate(other, &mut [write(rig.word(0), 5), wait(rig.word(1), 1, 0)]).unwrap();
    rig.driver.cuEventRecord(event, other).unwrap();
    rig.driver.cuStreamWaitEvent(stream, event, 0).unwrap();
    rig.driver.cuStreamWriteValue64_v2(stream, rig.word(2), 6, 0).unwrap();
    assert_eq!(rig.end(other), Err(CUresult::STREAM_CAPTURE_UNMATCHED));
    let graph = rig.end(stream).unwrap();
    assert_eq!(graph, captured);
    assert_eq!((rig.capture(stream).unwrap().0, rig.capture(other).unwrap().0), (0, 0));
    rig.synchronise();
    assert_eq!(rig.load(0), 0);

    let executable = rig.instantiate(graph);
    rig.driver.cuGraphDestroy(graph).unwrap();
    rig.store(1, 1);
    for _ in 0..3 {
        rig.driver.cuGraphLaunch(executable, stream).unwrap();
        rig.synchronise();
        assert_eq!((rig.load(0), rig.load(2)), (5, 6));
        rig.store(0, 0);
        rig.store(2, 0);
    }
    // It never runs twice at once, on whatever stream.
    rig.store(1, 0);
    rig.driver.cuGraphLaunch(executable, stream).unwrap();
    until("the word", || rig.load(0) == 5);
    rig.store(0, 0);
    rig.driver.cuGraphLaunch(executable, other).unwrap();
    rig.driver.cuStreamWriteValue64_v2(rig.streams[1], rig.word(3), 1, 0).unwrap();
    assert_eq!((rig.load(0), rig.load(3)), (0, 0));
    rig.driver.cuGraphExecDestroy(executable).unwrap();
    rig.store(1, 1);
    rig.synchronise();
    assert_eq!((rig.load(0), rig.load(2), rig.load(3)), (5, 6, 1));
}

#[test]
fn whoever_waits_for_a_captured_stream_ends_the_capture() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let stream = rig.streams[0];
    let waits: [&dyn Fn() -> Result<(), CUresult>; 3] =
        [&|| rig.driver.cuStreamSynchronize(stream), &|| rig.driver.cuStreamQuery(stream), &|| {
            rig.driver.cuCtxSynchronize()
        }];
    for wait in waits {
        rig.driver.cuStreamBeginCapture_v2(stream, RELAXED).unwrap();
        assert_eq!(wait(), Err(CUresult::STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(rig.capture(stream).unwrap().0, 2);
        let write = rig.driver.cuStreamWriteValue64_v2(stream, rig.word(0), 1, 0);
        assert_eq!(write, Err(CUresult::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(rig.end(stream), Err(CUresult::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(wait(), Ok(()));
    }
}

#[test]
fn a_capture_forbids_allocations_but_to_a_relaxed_thread() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let stream = rig.streams[0];
    rig.driver.cuStreamBeginCapture_v2(stream, GLOBAL).unwrap();
    let mut mode = RELAXED;
    rig.driver.cuThreadExchangeStreamCaptureMode(&raw mut mode).unwrap();
    assert_eq!(mode, GLOBAL);
    let memory = rig.driver.allocate(16).unwrap();
    rig.driver.cuThreadExchangeStreamCaptureMode(&raw mut mode).unwrap();
    assert_eq!((mode, rig.capture(stream).unwrap().0), (RELAXED, 1));
    assert_eq!(rig.driver.allocate(16), Err(CUresult::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(rig.capture(stream).unwrap().0, 2);
    assert_eq!(rig.end(stream), Err(CUresult::STREAM_CAPTURE_INVALIDATED));
    rig.driver.cuMemFree_v2(memory).unwrap();
}

#[test]
fn a_stream_waits_for_what_another_was_asked_before_the_event() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let [first, second] = rig.streams;
    let event = out(|at| rig.driver.cuEventCreate(at, 2)).unwrap();
    assert_eq!(rig.driver.cuEventQuery(event), Ok(()), "never recorded");
    rig.driver.cuStreamWaitValue64_v2(first, rig.word(0), 1, 0).unwrap();
    rig.driver.cuEventRecord(event, first).unwrap();
    rig.driver.cuStreamWaitValue64_v2(first, rig.word(1), 1, 0).unwrap();
    rig.driver.cuStreamWaitEvent(second, event, 0).unwrap();
    rig.driver.cuStreamWriteValue64_v2(second, rig.word(2), 1, 0).unwrap();
    assert_eq!(rig.driver.cuEventQuery(event), Err(CUresult::NOT_READY));
    assert_eq!(rig.load(2), 0);
    rig.store(0, 1);
    until("the word", || rig.load(2) == 1);
    assert_eq!(rig.driver.cuEventQuery(event), Ok(()));
    rig.driver.cuEventDestroy_v2(event).unwrap();
    rig.store(1, 1);
    rig.synchronise();
    let ids = rig.streams.map(|each| out(|at| rig.driver.cuStreamGetId(each, at)).unwrap());
    assert_ne!(ids[0], ids[1]);
}

/// Tells that it was called.
unsafe extern "C" fn destroyed(data: *mut c_void) {
    // SAFETY: the data is a box of this type, and comes once.
    let told = unsafe { Box::from_raw(data.cast::<Sender<()>>()) };
    told.send(()).unwrap();
}

#[test]
fn an_object_is_destroyed_with_the_last_graph_that_keeps_it() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let stream = rig.streams[0];
    let (sender, told) = channel::<()>();
    rig.driver.cuStreamBeginCapture_v2(stream, GLOBAL).unwrap();
    let graph = rig.capture(stream).unwrap().2;
    let data: *mut c_void = Box::into_raw(Box::new(sender)).cast();
    let object = out(|at| rig.driver.cuUserObjectCreate(at, data, destroyed, 1, 1)).unwrap();
    rig.driver.cuGraphRetainUserObject(graph, object, 1, 1).unwrap();
    let again = rig.driver.cuUserObjectRelease(object, 1);
    assert_eq!(again, Err(CUresult::INVALID_VALUE), "the reference is the graph's");
    rig.driver.cuStreamWaitValue64_v2(stream, rig.word(0), 1, 0).unwrap();
    rig.end(stream).unwrap();
    let executable = rig.instantiate(graph);
    rig.driver.cuGraphLaunch(executable, stream).unwrap();
    rig.driver.cuGraphDestroy(graph).unwrap();
    rig.driver.cuGraphExecDestroy(executable).unwrap();
    assert!(told.try_recv().is_err(), "it still runs");
    rig.store(0, 1);
    told.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn registered_memory_stays_while_a_stream_waits_for_a_word() {
    let stub = Stub::create().unwrap();
    let rig = Rig::new(&stub);
    let mut page = Box::new([0_u64; 1024]);
    let at = (&raw mut *page).expose_provenance() as u64;
    rig.driver.cuMemHostRegister_v2(at, 4096, 3).unwrap();
    rig.driver.cuStreamWaitValue64_v2(rig.streams[0], rig.word(0), 1, 0).unwrap();
    std::thread::scope(|scope| {
        let (sender, told) = channel();
        let driver = &rig.driver;
        scope.spawn(move || {
            driver.start().unwrap();
            sender.send(driver.cuMemHostUnregister(at)).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "the stream still waits");
        rig.store(0, 1);
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(())));
    });
}
