//! Captures: streams that record their work in a graph, and the calls that end them.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::{CUresult, CaptureMode, Opaque, capture_status};
use crate::functions::Function;
use crate::graphs::Graph;
use crate::process::{Answer, Process};
use crate::streams::{Stream, Work};
use crate::trace::Object;

thread_local! {
    /// What this thread's calls are to captures of others.
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

/// A capture.
#[derive(Debug)]
pub(crate) struct Capture {
    /// Never given twice.
    pub(crate) id: u64,
    /// The handle of its graph.
    pub(crate) graph: Opaque,
    mode: CaptureMode,
    /// The thread that began it, by its kernel id.
    thread: i32,
    origin: Arc<Stream>,
    /// What was recorded; `None` once it is invalid.
    recorded: Mutex<Option<Arc<Graph>>>,
}

impl Capture {
    /// `CU_STREAM_CAPTURE_STATUS_*`
    pub(crate) fn status(&self) -> u32 {
        match *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(_) => capture_status::ACTIVE,
            None => capture_status::INVALIDATED,
        }
    }

    fn graph(&self) -> Answer<Arc<Graph>> {
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.clone().ok_or(CUresult::STREAM_CAPTURE_INVALIDATED)
    }

    pub(crate) fn record(&self, work: Work) -> Answer {
        self.graph()?.add(work);
        Ok(())
    }

    /// Nothing comes of it any more; it is to be ended all the same.
    fn invalidate(&self) {
        let _graph = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether the legacy default stream waits for its streams.
    pub(crate) fn is_blocking(&self) -> bool {
        !self.origin.is_non_blocking()
    }

    /// Whether it forbids what is unsafe to a thread.
    fn forbids(&self, mode: CaptureMode, thread: i32) -> bool {
        let own = self.thread == thread && self.mode != CaptureMode::Relaxed;
        match mode {
            CaptureMode::Global => own || self.mode == CaptureMode::Global,
            CaptureMode::ThreadLocal => own,
            CaptureMode::Relaxed => false,
        }
    }
}

fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Takes the thread's mode, and gives the one before.
pub(crate) fn exchange_mode(mode: CaptureMode) -> CaptureMode {
    MODE.replace(mode)
}

/// Refuses a call that a capture forbids, and ends the capture.
pub(crate) fn check(process: &Process, function: Function) -> Answer {
    if !function.disturbs_captures() {
        return Ok(());
    }
    let thread = this_thread();
    process.end_captures(CUresult::STREAM_CAPTURE_UNSUPPORTED, |capture| {
        capture.forbids(MODE.get(), thread)
    })
}

impl Process {
    /// Invalidates captures, and fails where there was one.
    pub(crate) fn end_captures(&self, error: CUresult, which: impl Fn(&Capture) -> bool) -> Answer {
        let captures = self.objects().captures.clone();
        let active = |capture: &&Arc<Capture>| capture.status() == capture_status::ACTIVE;
        let hit: Vec<_> = captures.iter().filter(active).filter(|capture| which(capture)).collect();
        hit.iter().for_each(|capture| capture.invalidate());
        if hit.is_empty() { Ok(()) } else { Err(error) }
    }

    /// Refuses to wait for, or to ask after, a stream that is captured, and ends the capture.
    pub(crate) fn check_not_captured(&self, stream: &Stream) -> Answer {
        let Some(capture) = stream.capture() else { return Ok(()) };
        capture.invalidate();
        Err(CUresult::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Whether the legacy default stream would wait for a stream that is captured.
    pub(crate) fn is_captured_implicitly(&self) -> bool {
        let objects = self.objects();
        objects
            .captures
            .iter()
            .any(|capture| capture.is_blocking() && capture.status() == capture_status::ACTIVE)
    }

    pub(crate) fn begin_capture(self: &Arc<Self>, handle: Opaque, mode: CaptureMode) -> Answer {
        let origin = self.stream(handle)?;
        if origin.is_default() {
            return Err(CUresult::STREAM_CAPTURE_UNSUPPORTED);
        }
        if origin.capture().is_some() {
            return Err(CUresult::ILLEGAL_STATE);
        }
        let recorded = Arc::new(Graph::default());
        let mut objects = self.objects();
        let graph = objects.graphs.add(self.control.number() << 4, Arc::clone(&recorded));
        let capture = Arc::new(Capture {
            id: self.control.number(),
            graph,
            mode,
            thread: this_thread(),
            origin: Arc::clone(&origin),
            recorded: Mutex::new(Some(recorded)),
        });
        objects.captures.push(Arc::clone(&capture));
        origin.set_capture(Some(capture));
        self.trace.add(Object::Graph);
        Ok(())
    }

    /// Gives the graph's handle.
    pub(crate) fn end_capture(self: &Arc<Self>, handle: Opaque) -> Answer<Opaque> {
        let origin = self.stream(handle)?;
        let capture = origin.capture().ok_or(CUresult::ILLEGAL_STATE)?;
        if !Arc::ptr_eq(&capture.origin, &origin) {
            return Err(CUresult::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != this_thread() {
            return Err(CUresult::STREAM_CAPTURE_WRONG_THREAD);
        }
        let mut objects = self.objects();
        objects.captures.retain(|other| !Arc::ptr_eq(other, &capture));
        for stream in objects.streams.values() {
            if stream.capture().is_some_and(|joined| Arc::ptr_eq(&joined, &capture)) {
                stream.set_capture(None);
            }
        }
        if capture.graph().is_ok() {
            return Ok(capture.graph);
        }
        let gone = objects.graphs.destroy(capture.graph);
        drop(objects);
        self.trace.remove(Object::Graph);
        drop(gone);
        Err(CUresult::STREAM_CAPTURE_INVALIDATED)
    }
}
