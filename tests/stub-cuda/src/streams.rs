//! Streams: each a thread with a queue, first in, first out. A captured one records what it is asked.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use statecopy_kernels::cuda::Production;

use crate::abi::{CUdevice, CUresult, Opaque, flag};
use crate::captures::Capture;
use crate::connections::Connection;
use crate::graphs::Executable;
use crate::kernels::{self, Launch};
use crate::mapping::{self, Address};
use crate::process::{Answer, Process, STEP};
use crate::sync::{AtomicU64, Ordering};

/// One thing that a stream does.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// Runs a kernel of the product.
    Kernel(Box<Launch>),
    /// Runs the kernel of a native worker.
    Produce(Production),
    /// Writes a word, after everything before it is visible.
    Write { at: Address, value: u64 },
    /// Copies, from memory of the host, pinned or not, too: to read it late is the harder case for who reuses it early.
    Copy { to: Address, from: Address, bytes: u64 },
    /// Waits until a word is as wanted.
    Wait { at: Address, value: u64, flags: u32 },
    /// Waits until another stream has done so much.
    After(Place),
    /// Runs a graph: what it was when it was launched.
    Graph(Arc<Executable>, Vec<Work>),
    /// Frees memory of a pool.
    Free(Address),
}

impl Work {
    /// Whether it may wait for others.
    fn may_wait(&self) -> bool {
        match self {
            Self::Wait { .. } | Self::After(_) => true,
            Self::Graph(_, works) => works.iter().any(Self::may_wait),
            Self::Kernel(_)
            | Self::Produce(_)
            | Self::Write { .. }
            | Self::Copy { .. }
            | Self::Free(_) => false,
        }
    }
}

/// How much a stream was asked.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    stream: Arc<Stream>,
    asked: u64,
}

impl Place {
    /// Whether it is done.
    pub(crate) fn is_reached(&self) -> bool {
        self.stream.queue().done >= self.asked
    }
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Never given twice.
    id: u64,
    device: CUdevice,
    non_blocking: bool,
    default: bool,
    process: Weak<Process>,
    connection: Arc<Connection>,
    capture: Mutex<Option<Arc<Capture>>>,
    queue: Mutex<Queue>,
    /// Notified when there is work, or the end.
    filled: Condvar,
    /// Notified when nothing is left to do.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Each with its number on the connection.
    work: VecDeque<(u64, Work)>,
    /// The first thing is being done; it has left the queue.
    busy: bool,
    ended: bool,
    /// Whether there is a thread: from the first work on.
    runs: bool,
    asked: u64,
    done: u64,
}

impl Stream {
    /// A stream without work. `default` is the context's own stream, which nobody creates.
    pub(crate) fn new(
        process: &Arc<Process>,
        device: CUdevice,
        non_blocking: bool,
        default: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: process.control.number(),
            device,
            non_blocking,
            default,
            process: Arc::downgrade(process),
            connection: process.connections.next(),
            capture: Mutex::default(),
            queue: Mutex::default(),
            filled: Condvar::new(),
            idle: Condvar::new(),
        })
    }

    /// Its number.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The capture that it is in, where it goes on or was not ended yet.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        self.in_capture().clone()
    }

    /// From now on work is captured, or no more.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        *self.in_capture() = capture;
    }

    fn in_capture(&self) -> MutexGuard<'_, Option<Arc<Capture>>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it was asked until now.
    pub(crate) fn place(self: &Arc<Self>) -> Place {
        Place { stream: Arc::clone(self), asked: self.queue().asked }
    }

    pub(crate) fn device(&self) -> CUdevice {
        self.device
    }

    /// Whether calls without a stream do not wait for it.
    pub(crate) fn is_non_blocking(&self) -> bool {
        self.non_blocking
    }

    pub(crate) fn is_default(&self) -> bool {
        self.default
    }

    /// Does it after everything before it; a captured stream's becomes part of the graph.
    pub(crate) fn push(self: &Arc<Self>, work: Work) -> Answer {
        if let Some(capture) = self.capture() {
            return capture.record(work);
        }
        let mut queue = self.queue();
        if !queue.runs {
            let (own, process) = (Arc::clone(self), Weak::clone(&self.process));
            let thread = thread::Builder::new().name("stub-stream".into());
            let started = thread.spawn(move || own.run(&process));
            started.map_err(|_| CUresult::OPERATING_SYSTEM)?;
            queue.runs = true;
        }
        queue.asked += 1;
        queue.work.push_back((self.connection.ask(), work));
        self.filled.notify_one();
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue().is_idle()
    }

    pub(crate) fn wait_idle(&self) {
        let queue = self.queue();
        drop(self.idle.wait_while(queue, |queue| !queue.is_idle()));
    }

    /// The thread ends once everything in the queue is done.
    pub(crate) fn end(&self) {
        self.queue().ended = true;
        self.filled.notify_one();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, process: &Weak<Process>) {
        while let Some((number, work)) = self.next() {
            if let Some(process) = process.upgrade() {
                self.perform(&process, number, &work);
            }
            // What it holds goes first: a graph's end may be waited for.
            drop(work);
            let mut queue = self.queue();
            queue.busy = false;
            queue.done += 1;
            if queue.is_idle() {
                self.idle.notify_all();
            }
        }
    }

    fn perform(&self, process: &Arc<Process>, number: u64, work: &Work) {
        self.connection.wait(number, process);
        if !work.may_wait() {
            self.connection.pass(number);
        }
        // After a sticky error nothing is done any more, and no word says that it was.
        if process.sticky().is_ok()
            && let Err(error) = perform(process, work)
        {
            process.fault(error);
        }
        self.connection.pass(number);
    }

    /// Waits for the next thing; `None` at the end.
    fn next(&self) -> Option<(u64, Work)> {
        let queue = self.queue();
        let nothing = |queue: &mut Queue| queue.work.is_empty() && !queue.ended;
        let waited = self.filled.wait_while(queue, nothing);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        let work = queue.work.pop_front();
        queue.busy = work.is_some();
        work
    }
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.work.is_empty() && !self.busy
    }
}

/// Does one thing; an error is the device's, for good.
fn perform(process: &Arc<Process>, work: &Work) -> Answer {
    match work {
        Work::Kernel(launch) => kernels::run(process, launch),
        Work::Produce(production) => kernels::produce(process, production),
        Work::Copy { to, from, bytes } => kernels::copy(&process.memory(), *from, *to, *bytes),
        Work::Write { at, value } => {
            let memory = process.memory();
            word(*at, memory.allows(*at, 8, true))?.store(*value, Ordering::SeqCst);
            Ok(())
        }
        Work::Wait { at, value, flags } => wait(process, || {
            let memory = process.memory();
            let now = word(*at, memory.allows(*at, 8, false))?.load(Ordering::SeqCst);
            Ok(is_as_wanted(now, *value, *flags))
        }),
        Work::After(place) => wait(process, || Ok(place.is_reached())),
        Work::Graph(executable, works) => {
            // One that runs is waited for, on whatever stream.
            let _turn = executable.turn();
            works.iter().try_for_each(|work| perform(process, work))
        }
        Work::Free(at) => process.free_now(*at),
    }
}

/// Looks again and again.
fn wait(process: &Process, is_over: impl Fn() -> Answer<bool>) -> Answer {
    while !is_over()? {
        process.sticky()?;
        thread::sleep(STEP);
    }
    Ok(())
}

/// The word at an address that the device may touch.
fn word<'a>(at: Address, allowed: bool) -> Answer<&'a AtomicU64> {
    if !allowed {
        return Err(CUresult::ILLEGAL_ADDRESS);
    }
    if !at.is_multiple_of(8) {
        return Err(CUresult::MISALIGNED_ADDRESS);
    }
    // SAFETY: the address is aligned and mapped, and stays so while the caller holds the map; words are touched by atomic
    // operations only.
    Ok(unsafe { AtomicU64::from_ptr(mapping::pointer(at)) })
}

/// `CU_STREAM_WAIT_VALUE_*`.
fn is_as_wanted(now: u64, value: u64, flags: u32) -> bool {
    match flags & !flag::WAIT_FLUSH {
        flag::WAIT_GEQ => now.wrapping_sub(value).cast_signed() >= 0,
        flag::WAIT_EQ => now == value,
        flag::WAIT_AND => now & value != 0,
        // CU_STREAM_WAIT_VALUE_NOR
        _ => !(now | value) != 0,
    }
}

impl Process {
    /// A stream by its handle; 0, 1 and 2 are the default stream of the current context.
    pub(crate) fn stream(self: &Arc<Self>, handle: Opaque) -> Answer<Arc<Stream>> {
        let device = self.context()?;
        if handle <= 2 {
            let key = u64::from(device.cast_unsigned()) | 1 << 63;
            let mut objects = self.objects();
            if let Some(stream) = objects.streams.get(&key) {
                return Ok(Arc::clone(stream));
            }
            let stream = Stream::new(self, device, false, true);
            objects.streams.insert(key, Arc::clone(&stream));
            return Ok(stream);
        }
        let found = self.objects().streams.get(&handle).cloned();
        let stream = found.ok_or(CUresult::INVALID_HANDLE)?;
        if stream.device() == device { Ok(stream) } else { Err(CUresult::INVALID_HANDLE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waits_are_those_of_the_header() {
        assert!(is_as_wanted(5, 5, flag::WAIT_GEQ) && is_as_wanted(6, 5, flag::WAIT_GEQ));
        assert!(!is_as_wanted(4, 5, flag::WAIT_GEQ));
        assert!(is_as_wanted(1, u64::MAX, flag::WAIT_GEQ), "the difference counts");
        assert!(is_as_wanted(5, 5, flag::WAIT_EQ) && !is_as_wanted(6, 5, flag::WAIT_EQ));
        assert!(is_as_wanted(6, 2, flag::WAIT_AND) && !is_as_wanted(4, 2, flag::WAIT_AND));
        let nor = 3;
        assert!(is_as_wanted(1, 2, nor) && !is_as_wanted(u64::MAX - 1, 1, nor));
    }
}
