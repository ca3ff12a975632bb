//! A native worker's own work on a device, for tests: streams, a kernel that takes its time, copies, graphs.
//!
//! What a worker's library does with the driver and the product never does. What the product does in a worker's streams is
//! [`CudaGuest`]'s, here as there.

use std::mem::{self, ManuallyDrop};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::Library;

use super::CudaDevice;
use super::allocation::CudaMemory;
use super::context::{Context, Current};
use super::driver::{DriverError, OpenError, select};
use super::export::CudaExporter;
use super::guest::CudaGuest;
use super::launcher::CudaLauncher;
use super::library;
use super::order::{Capture, GuestWords, StreamOp};
use super::selector::CudaSelector;
use super::sys::{DevicePointer, Function, Graph, GraphExec, Status, Stream};
use crate::device::{DeviceFault, Launch, Moved};

type Result<T> = std::result::Result<T, DriverError>;

/// Waits until so many nanoseconds are over, then fills words. The driver translates it for the device.
const KERNEL: &[u8] = b".version 7.0
.target sm_80
.address_size 64
.visible .entry produce(.param .align 8 .b8 production[32])
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<11>;
    ld.param.u64 %rd1, [production];
    ld.param.u64 %rd2, [production+8];
    ld.param.u64 %rd3, [production+16];
    ld.param.u64 %rd4, [production+24];
    mov.u64 %rd5, %globaltimer;
$L_wait:
    mov.u64 %rd6, %globaltimer;
    sub.u64 %rd7, %rd6, %rd5;
    setp.lt.u64 %p1, %rd7, %rd4;
    @%p1 bra $L_wait;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    cvt.u64.u32 %rd8, %r1;
    cvt.u64.u32 %rd9, %r2;
$L_fill:
    setp.ge.u64 %p2, %rd8, %rd2;
    @%p2 bra $L_done;
    shl.b64 %rd10, %rd8, 3;
    add.u64 %rd10, %rd1, %rd10;
    st.global.u64 [%rd10], %rd3;
    add.u64 %rd8, %rd8, %rd9;
    bra $L_fill;
$L_done:
    ret;
}
\0";

/// Threads of its one block.
const THREADS: u32 = 256;

/// What the kernel is told.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Production {
    /// The first word's address.
    pub at: u64,
    /// How many words of 8 bytes.
    pub words: u64,
    /// What is written into each.
    pub value: u64,
    /// What passes before any is written.
    pub nanoseconds: u64,
}

const _: () = assert!(size_of::<Production>() == 32);

/// What of the driver only a worker uses.
struct Functions {
    memcpy_dtod_async: unsafe extern "C" fn(DevicePointer, DevicePointer, usize, Stream) -> Status,
    stream_begin_capture: unsafe extern "C" fn(Stream, i32) -> Status,
    stream_end_capture: unsafe extern "C" fn(Stream, *mut Graph) -> Status,
    /// What keeps them where they are. Never unloaded.
    _library: ManuallyDrop<Library>,
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`: what is unsafe to a capture is so in every thread.
const CAPTURE_MODE_GLOBAL: i32 = 0;

macro_rules! resolve {
    ($library:ident, $path:ident, $symbol:literal) => {{
        // SAFETY: `cuda.h` gives the symbol the type of the field. It is used only while the library is loaded.
        let found = unsafe { $library.get($symbol.as_bytes()) };
        let missing = |_| {
            let path = $path.display();
            OpenError::Driver(format!("The CUDA driver {path} has no function {}", $symbol))
        };
        *found.map_err(missing)?
    }};
}

impl Functions {
    fn load(path: &Path) -> std::result::Result<Self, OpenError> {
        // SAFETY: the library is the driver that the operator has installed, or names.
        let library = unsafe { library::open(path) }.map_err(OpenError::Driver)?;
        Ok(Self {
            memcpy_dtod_async: resolve!(library, path, "cuMemcpyDtoDAsync_v2"),
            stream_begin_capture: resolve!(library, path, "cuStreamBeginCapture_v2"),
            stream_end_capture: resolve!(library, path, "cuStreamEndCapture"),
            _library: ManuallyDrop::new(library),
        })
    }
}

/// A device, as a worker with streams uses it.
#[derive(Debug)]
pub struct CudaWorker {
    guest: CudaGuest,
    own: Arc<Own>,
}

struct Own {
    functions: Functions,
    /// Loaded as long as the context lives.
    produce: Function,
    context: Arc<Context>,
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Own").finish_non_exhaustive()
    }
}

impl CudaExporter {
    /// The device, for a worker with streams of its own. The driver is the one that the exporter was opened with.
    ///
    /// # Errors
    /// When there is no such device, or it refuses.
    pub fn worker(
        &self,
        selector: CudaSelector,
        driver_library: &Path,
    ) -> std::result::Result<CudaWorker, OpenError> {
        let device = select(&self.driver, selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let (functions, guest) = (Functions::load(driver_library)?, self.guest(selector)?);
        let context = Arc::clone(&guest.context);
        let current = context.enter().map_err(failed)?;
        // SAFETY: the image is text that ends with a zero.
        let module = unsafe { current.load_module(KERNEL) }.map_err(failed)?;
        // SAFETY: the module is loaded.
        let produce = unsafe { current.function(module, c"produce") }.map_err(failed)?;
        Ok(CudaWorker { guest, own: Arc::new(Own { functions, produce, context }) })
    }
}

impl CudaWorker {
    /// The product's side of the worker's streams.
    #[must_use]
    pub fn guest(&self) -> &CudaGuest {
        &self.guest
    }

    /// A new stream. Disturbs no capture, as asking a stream and ending it do not.
    ///
    /// # Errors
    /// What the driver says.
    pub fn stream(&self) -> Result<WorkerStream> {
        let stream = self.own.context.enter()?.relaxed(Current::create_stream)?;
        let (guest, own) = (self.guest.clone(), Arc::clone(&self.own));
        Ok(WorkerStream { guest, own, stream, uses: Vec::new() })
    }
}

/// What a stream or a graph has asked the device to touch.
#[derive(Debug, Clone)]
enum Used {
    Memory(Arc<CudaMemory>),
    Words(Arc<GuestWords>),
    Graph(Arc<WorkerGraph>),
}

impl Used {
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Memory(one), Self::Memory(other)) => Arc::ptr_eq(one, other),
            (Self::Words(one), Self::Words(other)) => Arc::ptr_eq(one, other),
            (Self::Graph(one), Self::Graph(other)) => Arc::ptr_eq(one, other),
            (Self::Memory(_) | Self::Words(_) | Self::Graph(_), _) => false,
        }
    }
}

/// A part of a worker's memory: where it begins.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The memory.
    pub memory: &'a Arc<CudaMemory>,
    /// Bytes from its start.
    pub offset: u64,
}

impl Place<'_> {
    fn address(self, bytes: u64) -> DevicePointer {
        let end = self.offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.memory.bytes()), "The part lies in the memory");
        self.memory.address() + self.offset
    }
}

/// What a stream does with a word of shared memory: [`StreamOp`] by the word's offset in the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordOp {
    /// Writes it.
    Write {
        /// The word.
        offset: u64,
        /// What to write.
        value: u64,
    },
    /// Waits until it is at least so large.
    WaitAtLeast {
        /// The word.
        offset: u64,
        /// The least.
        value: u64,
    },
    /// Waits until it has one of the bits.
    WaitAny {
        /// The word.
        offset: u64,
        /// The bits.
        bits: u64,
    },
}

impl WordOp {
    fn of(self, words: &GuestWords) -> StreamOp {
        match self {
            Self::Write { offset, value } => StreamOp::Write { at: words.address(offset), value },
            Self::WaitAtLeast { offset, value } => {
                StreamOp::WaitAtLeast { at: words.address(offset), value }
            }
            Self::WaitAny { offset, bits } => StreamOp::WaitAny { at: words.address(offset), bits },
        }
    }
}

/// A stream of a worker. What it was asked to touch stays until it is done.
///
/// Dropped while it is not done, it and what it uses stay until the process ends.
#[derive(Debug)]
pub struct WorkerStream {
    guest: CudaGuest,
    own: Arc<Own>,
    stream: Stream,
    uses: Vec<Used>,
}

impl WorkerStream {
    /// Fills so many words of 8 bytes by a kernel, once that time is over.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the words are not of the memory.
    pub fn produce(
        &mut self,
        to: Place<'_>,
        words: u64,
        value: u64,
        takes: Duration,
    ) -> Result<()> {
        let nanoseconds = u64::try_from(takes.as_nanos()).unwrap_or(u64::MAX);
        let production = Production { at: to.address(8 * words), words, value, nanoseconds };
        self.keep(Used::Memory(Arc::clone(to.memory)));
        let current = self.own.context.enter()?;
        // SAFETY: the module stays loaded, the stream lives, and what the kernel writes is kept by the stream.
        unsafe { current.launch(self.own.produce, [1, 1], THREADS, self.stream, &production) }
    }

    /// Copies bytes of the device.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When they are not of the memory.
    pub fn copy(&mut self, from: Place<'_>, to: Place<'_>, bytes: u64) -> Result<()> {
        self.keep(Used::Memory(Arc::clone(from.memory)));
        self.keep(Used::Memory(Arc::clone(to.memory)));
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (from, to) = (from.address(bytes), to.address(bytes));
        let current = self.own.context.enter()?;
        // SAFETY: both ranges are of memory that the stream keeps, and the stream lives.
        let status = unsafe { (self.own.functions.memcpy_dtod_async)(to, from, size, self.stream) };
        current.check("cuMemcpyDtoDAsync", status)
    }

    /// Starts a copy of rows by the product's kernel, as a worker without a daemon does. The caller keeps what it names.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Panics
    /// As [`CudaLauncher::enqueue`].
    pub fn copy_rows(
        &mut self,
        launcher: &mut CudaLauncher,
        launch: &Launch<'_, CudaDevice>,
    ) -> std::result::Result<Moved, DeviceFault> {
        launcher.enqueue_on(launch, self.stream)
    }

    /// Writes words and waits for words, by one call.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When a word is not one of these.
    pub fn enqueue(&mut self, words: &Arc<GuestWords>, operations: &[WordOp]) -> Result<()> {
        self.keep(Used::Words(Arc::clone(words)));
        let operations: Vec<StreamOp> =
            operations.iter().map(|operation| operation.of(words)).collect();
        // SAFETY: the stream lives, and keeps the words.
        unsafe { self.guest.enqueue(self.handle(), &operations) }
    }

    /// Begins to record what the stream is asked, in place of doing it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn begin_capture(&mut self) -> Result<()> {
        let current = self.own.context.enter()?;
        let begin = self.own.functions.stream_begin_capture;
        // SAFETY: the stream lives.
        let status = unsafe { begin(self.stream, CAPTURE_MODE_GLOBAL) };
        current.check("cuStreamBeginCapture", status)
    }

    /// The capture that goes on, if one does.
    ///
    /// # Errors
    /// When it has failed.
    pub fn capture(&self) -> Result<Option<Capture>> {
        // SAFETY: the stream lives.
        unsafe { self.guest.capture(self.handle()) }
    }

    /// Calls once the graph of the capture and everything made of it is gone.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the stream is not captured.
    pub fn on_graph_end(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        let capture = self.capture()?.expect("the stream is captured");
        // SAFETY: the capture ends only by this stream.
        unsafe { self.guest.on_graph_end(&capture, call) }
    }

    /// Ends the capture, and makes what was recorded ready to be launched.
    ///
    /// # Errors
    /// What the driver says: that the capture was disturbed, for example.
    pub fn end_capture(&mut self) -> Result<WorkerGraph> {
        let current = self.own.context.enter()?;
        let mut graph = Graph(0);
        // SAFETY: the stream lives; the driver writes one handle.
        let status =
            unsafe { (self.own.functions.stream_end_capture)(self.stream, &raw mut graph) };
        current.check("cuStreamEndCapture", status)?;
        // SAFETY: the graph was made above.
        let executable = unsafe { current.instantiate(graph) };
        // SAFETY: as above, and it is used no more.
        let destroyed = unsafe { current.destroy_graph(graph) };
        let executable = executable?;
        destroyed?;
        let (own, uses) = (Arc::clone(&self.own), self.uses.clone());
        Ok(WorkerGraph { own, executable, _uses: uses })
    }

    /// Lets the stream do what a graph recorded.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&mut self, graph: &Arc<WorkerGraph>) -> Result<()> {
        self.keep(Used::Graph(Arc::clone(graph)));
        let current = self.own.context.enter()?;
        // SAFETY: stream and graph live, and the stream keeps the graph, which keeps what it touches.
        unsafe { current.launch_graph(graph.executable, self.stream) }
    }

    /// Whether everything is done that it was asked.
    ///
    /// # Errors
    /// What became of the device.
    pub fn is_idle(&self) -> Result<bool> {
        is_idle(self.own.context.enter()?, self.stream)
    }

    /// Waits until everything is done that it was asked.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives.
        unsafe { self.guest.synchronize(self.handle()) }
    }

    /// The stream, as the driver names it.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.stream.0 as u64
    }

    fn keep(&mut self, used: Used) {
        if !self.uses.iter().any(|kept| kept.is(&used)) {
            self.uses.push(used);
        }
    }
}

fn is_idle(current: Current<'_>, stream: Stream) -> Result<bool> {
    // SAFETY: a worker's stream lives as long as its owner, who asks.
    current.relaxed(|current| unsafe { current.is_idle(stream) })
}

impl Drop for WorkerStream {
    fn drop(&mut self) {
        let mut is_over = false;
        self.own.context.give_back(|current| {
            if is_idle(current, self.stream)? {
                // SAFETY: it was created for this owner, and is used no more.
                current.relaxed(|current| unsafe { current.destroy_stream(self.stream) })?;
                is_over = true;
            }
            Ok(())
        });
        if !is_over {
            // The device may still touch it, and giving the context back could take for ever.
            mem::forget((mem::take(&mut self.uses), Arc::clone(&self.own)));
        }
    }
}

/// What a capture recorded, ready to be launched. It keeps what it touches.
#[derive(Debug)]
pub struct WorkerGraph {
    own: Arc<Own>,
    executable: GraphExec,
    _uses: Vec<Used>,
}

impl Drop for WorkerGraph {
    fn drop(&mut self) {
        self.own.context.give_back(|current| {
            // SAFETY: it was made once, and every stream that was asked for it is done.
            unsafe { current.destroy_executable(self.executable) }
        });
    }
}
