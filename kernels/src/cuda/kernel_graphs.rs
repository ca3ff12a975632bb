//! Kernels in executable graphs, which the device is given by a shorter call.
//!
//! `cuLaunchKernel` takes the host 3.9 us on an H200, and a copy waits for it. The same kernel as the one node of an executable
//! graph takes 1.3, and 0.3 more for its parameter (`tests/device/kernel_probe.py`). So each kernel has a few such graphs, made
//! and uploaded when its module is loaded. A graph never runs twice at once, which would make one order of launches wait for
//! another: whoever launches one holds it until its launch is done, and where all are held, or the driver makes none, a launch goes
//! the usual way.

use std::sync::Arc;

use super::arguments::Arguments;
use super::code::Code;
use super::context::Current;
use super::driver::DriverError;
use super::sys::{Function, Graph, GraphExec, GraphNode, Stream};
use crate::sync::{AtomicBool, Ordering};

type Result<T> = std::result::Result<T, DriverError>;

/// Graphs of each kernel. One takes 30 KiB of the host and 120 KiB of the device, by 1,000 of them (H200); so those of the two
/// classes that a model's layers need, 4 MiB.
const GRAPHS: usize = 4;

/// The graphs of one kernel.
#[derive(Debug, Default)]
pub(super) struct KernelGraphs(Vec<Arc<KernelGraph>>);

/// A kernel in an executable graph of its own.
#[derive(Debug)]
struct KernelGraph {
    function: Function,
    graph: Graph,
    node: GraphNode,
    executable: GraphExec,
    held: AtomicBool,
    /// What has the function.
    code: Arc<Code>,
}

/// A graph that nobody else launches meanwhile. Dropped when its launch is done, or forgotten where nobody will know.
#[derive(Debug)]
pub(super) struct HeldGraph(Arc<KernelGraph>);

impl KernelGraphs {
    /// Makes the graphs of a kernel, and uploads them: a launch takes no more memory.
    ///
    /// # Safety
    /// The function is of that code, and takes [`Arguments`].
    ///
    /// # Errors
    /// What the driver says. Launches do without.
    pub(super) unsafe fn make(code: &Arc<Code>, function: Function) -> Result<Self> {
        let current = code.context().enter()?;
        let stream = current.create_stream()?;
        let mut graphs = Vec::with_capacity(GRAPHS);
        let made = (0..GRAPHS).try_for_each(|_| {
            // SAFETY: the caller's own promise; the stream lives.
            graphs.push(Arc::new(unsafe { KernelGraph::make(code, function, stream) }?));
            Ok(())
        });
        // Before any of them goes.
        // SAFETY: the stream is ours.
        let uploaded = unsafe { current.synchronize(stream) };
        // SAFETY: as above, and this is its end.
        let ended = unsafe { current.destroy_stream(stream) };
        made.and(uploaded).and(ended)?;
        Ok(Self(graphs))
    }

    /// One that nobody holds. Waits for nothing.
    pub(super) fn hold(&self) -> Option<HeldGraph> {
        // SYNC: with the release of who held it before: its launch is done, and its kernel is ours to change.
        let free = |graph: &&Arc<KernelGraph>| !graph.held.swap(true, Ordering::Acquire);
        self.0.iter().find(free).map(|graph| HeldGraph(Arc::clone(graph)))
    }
}

impl KernelGraph {
    /// # Safety
    /// As [`KernelGraphs::make`]; the stream lives.
    unsafe fn make(code: &Arc<Code>, function: Function, stream: Stream) -> Result<Self> {
        let current = code.context().enter()?;
        let mut made = Self {
            function,
            graph: current.create_graph()?,
            node: GraphNode(0),
            executable: GraphExec(0),
            held: AtomicBool::new(false),
            code: Arc::clone(code),
        };
        // SAFETY: the graph lives, and the rest is the caller's own promise. It is not launched with this parameter.
        made.node = unsafe { current.add_kernel(made.graph, function, &Arguments::zeroed()) }?;
        // SAFETY: the graph lives.
        made.executable = unsafe { current.instantiate(made.graph) }?;
        // SAFETY: it lives, and so does the stream.
        unsafe { current.upload(made.executable, stream) }?;
        Ok(made)
    }
}

impl Drop for KernelGraph {
    fn drop(&mut self) {
        self.code.context().give_back(|current| {
            // SAFETY: both are ours. Nobody holds them, so they do not run: who cannot know that forgets what it holds.
            let ended = unsafe { current.destroy_executable(self.executable) };
            // SAFETY: as above.
            ended.and(unsafe { current.destroy_graph(self.graph) })
        });
    }
}

impl HeldGraph {
    /// Gives the kernel this grid and parameter.
    ///
    /// # Safety
    /// This was not launched before.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) unsafe fn set(
        &mut self,
        current: Current<'_>,
        grid: [u32; 2],
        arguments: &Arguments,
    ) -> Result<()> {
        let KernelGraph { function, node, executable, .. } = *self.0;
        // SAFETY: the node is the graph's and of this function, whose code the graph keeps. Nobody else has it meanwhile.
        unsafe { current.set_kernel(executable, node, (function, grid), arguments) }
    }

    /// Starts the kernel, with what it was given last. Where this fails nothing was started.
    ///
    /// # Safety
    /// As [`Current::launch`]. This was not launched before, and is not dropped before the kernel is done.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) unsafe fn launch(&mut self, current: Current<'_>, stream: Stream) -> Result<()> {
        // SAFETY: it does not run, by the caller's own promise and that of who held it before; the rest is the caller's.
        unsafe { current.launch_graph(self.0.executable, stream) }
    }

    /// Whether it is of this kernel.
    pub(super) fn is_of(&self, function: Function) -> bool {
        self.0.function == function
    }
}

impl Drop for HeldGraph {
    fn drop(&mut self) {
        // SYNC: with the next hold.
        self.0.held.store(false, Ordering::Release);
    }
}
