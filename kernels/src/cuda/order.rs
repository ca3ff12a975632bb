//! The worker's side of stream order: words that its streams write and wait for, graphs that they are captured into, and
//! order among streams without a wait of the host.

use std::ffi::c_void;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statecopy_descriptors::Mapping;

use super::context::{Context, Current};
use super::driver::DriverError;
use super::guest::{CudaGuest, stream_of};
use super::registered::Registered;
use super::sys::{self, Event, Graph, Stream, StreamMemOp, UserObject, status};

type Result<T> = std::result::Result<T, DriverError>;

/// Operations that are handed over without an allocation: those of one copy.
const OPERATIONS: usize = 4;

/// Words of shared memory that a worker's streams reach.
///
/// The drop gives the memory back. The driver waits for every stream of the process's context first: whoever drops it has
/// freed the waits of its words, and holds it as long as a graph that uses them lives. Not to be dropped in a call of
/// [`CudaGuest::on_graph_end`].
#[derive(Debug)]
pub struct GuestWords {
    registered: Registered,
    context: Arc<Context>,
}

impl GuestWords {
    /// Where the device finds a word.
    ///
    /// # Panics
    /// When `offset`, in bytes from the start of the mapping, is no multiple of 8 or not of the range.
    #[must_use]
    pub fn address(&self, offset: u64) -> u64 {
        self.registered.address(offset)
    }
}

impl Drop for GuestWords {
    fn drop(&mut self) {
        let given_back = self.context.visit(|current| {
            current.check_alive()?;
            current.relaxed(|current| self.registered.unregister(current))
        });
        if given_back.is_err() {
            self.registered.abandon();
        }
    }
}

/// What a stream does with a word, by the address that [`GuestWords::address`] gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamOp {
    /// Writes it, once everything before it on the stream is visible to all.
    Write {
        /// The word.
        at: u64,
        /// What to write.
        value: u64,
    },
    /// Waits until it is at least so large: until `word - value`, as a signed number, is not negative.
    WaitAtLeast {
        /// The word.
        at: u64,
        /// The least.
        value: u64,
    },
    /// Waits until it has one of the bits.
    WaitAny {
        /// The word.
        at: u64,
        /// The bits.
        bits: u64,
    },
}

impl StreamOp {
    fn operation(self) -> StreamMemOp {
        let (operation, address, value, flags) = match self {
            Self::Write { at, value } => {
                (sys::STREAM_MEM_OP_WRITE_VALUE_64, at, value, sys::STREAM_WRITE_VALUE_DEFAULT)
            }
            Self::WaitAtLeast { at, value } => {
                (sys::STREAM_MEM_OP_WAIT_VALUE_64, at, value, sys::STREAM_WAIT_VALUE_GEQ)
            }
            Self::WaitAny { at, bits } => {
                (sys::STREAM_MEM_OP_WAIT_VALUE_64, at, bits, sys::STREAM_WAIT_VALUE_AND)
            }
        };
        StreamMemOp { operation, address, value, flags, ..StreamMemOp::default() }
    }
}

/// A capture that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capture {
    id: u64,
    graph: Graph,
}

impl Capture {
    /// Its number, which no other capture of the process has. Streams that joined it have the same.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }
}

/// A stream, as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamLook {
    /// A number that no later stream of the process has, although its handle may come again. The handle, where the stream is
    /// captured or the driver is older than CUDA 12.0.
    pub id: u64,
    /// The capture that work on it becomes part of.
    pub capture: Option<Capture>,
}

/// A place in a stream's work. Recorded, it keeps nothing of the stream, which may be destroyed.
#[derive(Debug)]
pub struct StreamMark {
    event: Event,
    marks: Arc<Marks>,
}

impl Drop for StreamMark {
    fn drop(&mut self) {
        self.marks.idle().push(self.event);
    }
}

/// Events that no mark uses now.
#[derive(Debug)]
pub(super) struct Marks {
    context: Arc<Context>,
    idle: Mutex<Vec<Event>>,
}

impl Marks {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context, idle: Mutex::default() }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Event>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        let events = mem::take(&mut *self.idle());
        let _kept = self.context.visit(|current| {
            current.check_alive()?;
            // SAFETY: the event was created here, and no mark has it.
            events.into_iter().try_for_each(|event| unsafe { current.destroy_event(event) })
        });
    }
}

impl CudaGuest {
    /// Lets streams reach the words of a range of shared memory. Two ranges of one mapping share no page.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the range does not lie in the mapping.
    pub fn share_words(&self, mapping: &Arc<Mapping>, range: Range<u64>) -> Result<GuestWords> {
        let register = |current: Current<'_>| Registered::register(current, mapping, range);
        let registered = self.context.visit(|current| current.relaxed(register))?;
        Ok(GuestWords { registered, context: Arc::clone(&self.context) })
    }

    /// Lets a stream do these in their order, by one call of the driver: one node of the graph, where the stream is captured.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`]. The words stay shared until the stream, or every graph that has them, is done with them.
    ///
    /// # Errors
    /// What the driver says. It takes 255 operations at most.
    pub unsafe fn enqueue(&self, stream: u64, operations: &[StreamOp]) -> Result<()> {
        let stream = stream_of(stream);
        let mut few = [StreamMemOp::default(); OPERATIONS];
        let mut many = Vec::new();
        let handed = if let Some(room) = few.get_mut(..operations.len()) {
            room
        } else {
            many.resize(operations.len(), StreamMemOp::default());
            &mut many[..]
        };
        for (room, operation) in handed.iter_mut().zip(operations) {
            *room = operation.operation();
        }
        if handed.is_empty() {
            return Ok(());
        }
        self.context.visit(|current| {
            // SAFETY: the caller's own promise.
            unsafe { current.operate(stream, handed) }
        })
    }

    /// The capture that work on a stream becomes part of; `None` while the stream is not captured.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`].
    ///
    /// # Errors
    /// When the capture has failed, or the stream is the legacy default one while another is captured; else what the driver
    /// says.
    pub unsafe fn capture(&self, stream: u64) -> Result<Option<Capture>> {
        let stream = stream_of(stream);
        self.context.visit(|current| {
            // SAFETY: the caller's own promise.
            unsafe { current.capture(stream) }
        })
    }

    /// Calls once the graph of a capture and everything made of it is gone, in a thread of the driver's. The call may not use
    /// the driver, nor drop what does. It is dropped uncalled where this fails.
    ///
    /// # Safety
    /// The capture goes on until this returns.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn on_graph_end(
        &self,
        capture: &Capture,
        call: Box<dyn FnOnce() + Send>,
    ) -> Result<()> {
        let graph = capture.graph;
        self.context.visit(|current| {
            // SAFETY: the caller's own promise: the graph lives.
            unsafe { current.call_at_end(graph, call) }
        })
    }

    /// Marks what a stream was asked until now.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`]. The stream is not captured.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn mark(&self, stream: u64) -> Result<StreamMark> {
        let stream = stream_of(stream);
        self.context.visit(|current| {
            let idle = self.marks.idle().pop();
            let event = idle.map_or_else(|| current.create_event(), Ok)?;
            let mark = StreamMark { event, marks: Arc::clone(&self.marks) };
            // SAFETY: the caller's own promise, and the mark has the event.
            unsafe { current.record(event, stream) }?;
            Ok(mark)
        })
    }

    /// Lets a stream wait for what was marked. The mark may be dropped then.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`]. The stream is not captured.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn order_after_mark(&self, stream: u64, mark: &StreamMark) -> Result<()> {
        let stream = stream_of(stream);
        self.context.visit(|current| {
            // SAFETY: the caller's own promise, and the mark has the event.
            unsafe { current.wait_for(stream, mark.event) }
        })
    }

    /// Whether the device has done what was marked. Disturbs no capture.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_reached(&self, mark: &StreamMark) -> Result<bool> {
        self.context.visit(|current| {
            // SAFETY: the mark has the event.
            current.relaxed(|current| unsafe { current.is_recorded(mark.event) })
        })
    }

    /// What of a stream a copy in its order depends on. Waits for nothing.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`].
    ///
    /// # Errors
    /// As [`CudaGuest::capture`].
    pub unsafe fn look(&self, stream: u64) -> Result<StreamLook> {
        let handle = stream_of(stream);
        self.context.visit(|current| {
            // SAFETY: the caller's own promise.
            let capture = unsafe { current.capture(handle) }?;
            // To ask a captured stream for its number would end the capture. It cannot be destroyed, so its handle tells it
            // from others.
            let has_id = capture.is_none() && current.functions().stream_get_id.is_some();
            if !has_id {
                return Ok(StreamLook { id: stream, capture });
            }
            // SAFETY: the caller's own promise.
            let id = current.relaxed(|current| unsafe { current.stream_id(handle) })?;
            Ok(StreamLook { id, capture })
        })
    }
}

/// What is called at the end of a graph. Nothing is left of it where the graph could not take it.
struct AtEnd(Option<Box<dyn FnOnce() + Send>>);

/// # Safety
/// The data is a box of [`AtEnd`] that nobody else has.
unsafe extern "C" fn at_end(data: *mut c_void) {
    // SAFETY: the caller's own promise.
    let mut data = unsafe { Box::from_raw(data.cast::<AtEnd>()) };
    if let Some(call) = data.0.take() {
        // The driver's thread is not to be unwound; the panic has told what it has to tell.
        let _panicked = catch_unwind(AssertUnwindSafe(call));
    }
}

/// Operations, captures, graphs and events.
impl Current<'_> {
    /// Lets the stream do these in their order, once everything before them is done. The driver may write what it needs into
    /// them, and has copied them when this returns.
    ///
    /// # Safety
    /// The stream lives, and their words are such that the device may read and write them until they are done.
    pub(super) unsafe fn operate(
        self,
        stream: Stream,
        operations: &mut [StreamMemOp],
    ) -> Result<()> {
        let count = u32::try_from(operations.len()).expect("a few operations");
        // SAFETY: the caller's own promise, and a slice of so many.
        let status = unsafe {
            (self.functions().stream_batch_mem_op)(stream, count, operations.as_mut_ptr(), 0)
        };
        self.check("cuStreamBatchMemOp", status)
    }

    /// Calls with captures of other threads in mind that such a call would otherwise end: what it does has no order with
    /// streams.
    pub(super) fn relaxed<T, E: From<DriverError>>(
        self,
        call: impl FnOnce(Self) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let mut mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        self.exchange_capture_mode(&mut mode)?;
        let result = call(self);
        self.exchange_capture_mode(&mut mode)?;
        result
    }

    fn exchange_capture_mode(self, mode: &mut i32) -> Result<()> {
        // SAFETY: the driver reads and writes one int.
        let status = unsafe { (self.functions().thread_exchange_stream_capture_mode)(mode) };
        self.check("cuThreadExchangeStreamCaptureMode", status)
    }

    /// # Safety
    /// The stream lives, or is 0.
    unsafe fn capture(self, stream: Stream) -> Result<Option<Capture>> {
        const CALL: &str = "cuStreamGetCaptureInfo";
        let (mut state, mut id, mut graph) = (sys::STREAM_CAPTURE_STATUS_NONE, 0, Graph(0));
        // SAFETY: the caller's own promise. The driver writes a number, an id and a handle, and nothing where it gets null.
        let status = unsafe {
            (self.functions().stream_get_capture_info)(
                stream,
                &raw mut state,
                &raw mut id,
                &raw mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        self.check(CALL, status)?;
        match state {
            sys::STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(Capture { id, graph })),
            _ => Err(self.driver().error(CALL, status::STREAM_CAPTURE_INVALIDATED)),
        }
    }

    /// # Safety
    /// The graph lives.
    unsafe fn call_at_end(self, graph: Graph, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        let data = Box::into_raw(Box::new(AtEnd(Some(call))));
        let mut object = UserObject(0);
        // SAFETY: the driver writes one handle, and gives the data to the function once.
        let status = unsafe {
            (self.functions().user_object_create)(
                &raw mut object,
                data.cast(),
                at_end,
                1,
                sys::USER_OBJECT_NO_DESTRUCTOR_SYNC,
            )
        };
        if let Err(error) = self.check("cuUserObjectCreate", status) {
            // SAFETY: the driver did not take the data.
            drop(unsafe { Box::from_raw(data) });
            return Err(error);
        }
        // SAFETY: the caller's own promise; the object was created above, with the one reference that goes to the graph.
        let status = unsafe {
            (self.functions().graph_retain_user_object)(
                graph,
                object,
                1,
                sys::GRAPH_USER_OBJECT_MOVE,
            )
        };
        self.check("cuGraphRetainUserObject", status).inspect_err(|_| {
            // SAFETY: the reference is still ours, so the function was not called.
            let uncalled = unsafe { (*data).0.take() };
            drop(uncalled);
            // SAFETY: the object was created above, and this is its one reference. It takes the data along.
            let _status = unsafe { (self.functions().user_object_release)(object, 1) };
        })
    }

    fn create_event(self) -> Result<Event> {
        let mut event = Event(0);
        // SAFETY: the driver writes one handle.
        let status =
            unsafe { (self.functions().event_create)(&raw mut event, sys::EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", status)?;
        Ok(event)
    }

    /// # Safety
    /// The event is from [`Current::create_event`], and is used no more.
    unsafe fn destroy_event(self, event: Event) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().event_destroy)(event) };
        self.check("cuEventDestroy", status)
    }

    /// # Safety
    /// Event and stream live.
    unsafe fn record(self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().event_record)(event, stream) };
        self.check("cuEventRecord", status)
    }

    /// # Safety
    /// Event and stream live.
    unsafe fn wait_for(self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().stream_wait_event)(stream, event, 0) };
        self.check("cuStreamWaitEvent", status)
    }

    /// # Safety
    /// The event lives.
    unsafe fn is_recorded(self, event: Event) -> Result<bool> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().event_query)(event) };
        if status == status::NOT_READY {
            return Ok(false);
        }
        self.check("cuEventQuery", status).map(|()| true)
    }

    /// # Safety
    /// The stream lives, or is 0.
    unsafe fn stream_id(self, stream: Stream) -> Result<u64> {
        const CALL: &str = "cuStreamGetId";
        let function = self.functions().stream_get_id;
        let function = function.ok_or_else(|| self.driver().error(CALL, status::NOT_FOUND))?;
        let mut id = 0;
        // SAFETY: the caller's own promise; the driver writes one number.
        let status = unsafe { function(stream, &raw mut id) };
        self.check(CALL, status)?;
        Ok(id)
    }
}
