//! Kernels in executable graphs: given to the device by a call that takes the host a third of a launch's time.
//!
//! `cuLaunchKernel` takes 4 to 5 us on an H200, and a copy waits for it. The same kernel as the one node of an executable graph
//! takes 1.4, and 0.6 more for its parameter (docs/benchmarks). So each kernel has a few such graphs, made when its
//! module is loaded. A graph never runs twice at once, which would make one order of launches wait for another: whoever
//! launches one holds it until its launch is done, and where all are held, or the driver makes none, a launch goes the usual way.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::arguments::{Arguments, THREADS};
use super::context::{Context, Current};
use super::driver::DriverError;
use super::sys::{Function, Graph, GraphExec, GraphNode, KernelNodeParams, Stream, status};
use crate::sync::{AtomicBool, Ordering};

type Result<T> = std::result::Result<T, DriverError>;

/// Graphs of each kernel. One takes 30 KiB of the host and 120 KiB of the device, by 1,000 of them (H200).
const GRAPHS: usize = 4;

/// The graphs of one kernel.
#[derive(Debug, Default)]
pub(super) struct KernelGraphs(Vec<Arc<KernelGraph>>);

/// A kernel in an executable graph of its own.
#[derive(Debug)]
struct KernelGraph {
    context: Arc<Context>,
    function: Function,
    graph: Graph,
    node: GraphNode,
    executable: GraphExec,
    held: AtomicBool,
}

/// A graph that nobody else launches meanwhile.
#[derive(Debug)]
pub(super) struct HeldGraph(Arc<KernelGraph>);

impl KernelGraphs {
    /// Makes the graphs of a kernel, and uploads them. None where the driver cannot: launches do without.
    ///
    /// # Safety
    /// The function is of a loaded module, takes [`Arguments`], and stays loaded until the graphs are dropped.
    pub(super) unsafe fn make(context: &Arc<Context>, function: Function) -> Self {
        let made = context.enter().and_then(|current| {
            let stream = current.create_stream()?;
            // SAFETY: the caller's own promise; the stream lives.
            let make = |_| unsafe { KernelGraph::make(context, function, stream) }.map(Arc::new);
            let graphs: Result<Vec<_>> = (0..GRAPHS).map(make).collect();
            // SAFETY: the stream is ours, and this is its end.
            let uploaded = unsafe { current.synchronize(stream) };
            // SAFETY: as above.
            unsafe { current.destroy_stream(stream) }?;
            uploaded.and(graphs)
        });
        Self(made.unwrap_or_default())
    }

    /// One that nobody holds. Waits for nothing.
    pub(super) fn hold(&self) -> Option<HeldGraph> {
        let free = |graph: &&Arc<KernelGraph>| !graph.held.swap(true, Ordering::Acquire);
        self.0.iter().find(free).map(|graph| HeldGraph(Arc::clone(graph)))
    }
}

impl KernelGraph {
    /// # Safety
    /// As [`KernelGraphs::make`]; the stream lives.
    unsafe fn make(context: &Arc<Context>, function: Function, stream: Stream) -> Result<Self> {
        let current = context.enter()?;
        let mut made = Self {
            context: Arc::clone(context),
            function,
            graph: current.create_graph()?,
            node: GraphNode(0),
            executable: GraphExec(0),
            held: AtomicBool::new(false),
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
        self.context.give_back(|current| {
            // SAFETY: both are ours, and nobody holds them: they do not run.
            unsafe { current.destroy_graph(self.graph, self.executable) }
        });
    }
}

impl HeldGraph {
    /// Starts the kernel with this grid and parameter.
    ///
    /// # Safety
    /// As [`Current::launch`]; and this is kept until the kernel is done.
    pub(super) unsafe fn launch(
        &self,
        current: Current<'_>,
        grid: [u32; 2],
        stream: Stream,
        arguments: &Arguments,
    ) -> Result<()> {
        let KernelGraph { function, node, executable, .. } = *self.0;
        // SAFETY: the node is the graph's and of this function. The graph is held, so nobody else changes it.
        unsafe { current.set_kernel(executable, node, (function, grid), arguments) }?;
        // SAFETY: the graph does not run, as it is held; the rest is the caller's own promise.
        unsafe { current.launch_graph(executable, stream) }
    }
}

impl Drop for HeldGraph {
    fn drop(&mut self) {
        self.0.held.store(false, Ordering::Release);
    }
}

/// Graphs of one kernel.
impl Current<'_> {
    fn create_graph(self) -> Result<Graph> {
        let mut graph = Graph(0);
        // SAFETY: the driver writes one handle.
        let status = unsafe { (self.functions().graph_create)(&raw mut graph, 0) };
        self.check("cuGraphCreate", status)?;
        Ok(graph)
    }

    /// # Safety
    /// The graph lives, the function is loaded and takes [`Arguments`].
    unsafe fn add_kernel(
        self,
        graph: Graph,
        function: Function,
        arguments: &Arguments,
    ) -> Result<GraphNode> {
        const CALL: &str = "cuGraphAddKernelNode";
        let add = self.functions().graph_add_kernel_node;
        let add = add.ok_or_else(|| self.driver().error(CALL, status::NOT_FOUND))?;
        let mut node = GraphNode(0);
        let mut parameters = [parameter(arguments)];
        let kernel = KernelNodeParams::new(function, ([1, 1], THREADS), &mut parameters);
        // SAFETY: the caller's own promise. The driver writes one handle, and has copied what it reads when it returns.
        let status = unsafe { add(&raw mut node, graph, ptr::null(), 0, &raw const kernel) };
        self.check(CALL, status)?;
        Ok(node)
    }

    /// # Safety
    /// The graph lives.
    unsafe fn instantiate(self, graph: Graph) -> Result<GraphExec> {
        let mut executable = GraphExec(0);
        // SAFETY: the caller's own promise; the driver writes one handle.
        let status = unsafe { (self.functions().graph_instantiate)(&raw mut executable, graph, 0) };
        self.check("cuGraphInstantiate", status)?;
        Ok(executable)
    }

    /// # Safety
    /// Both live.
    unsafe fn upload(self, executable: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_upload)(executable, stream) };
        self.check("cuGraphUpload", status)
    }

    /// Gives the kernel of a graph another grid and parameter, for later launches.
    ///
    /// # Safety
    /// The node is of the graph that this was made of, and of this function, whose module is loaded.
    unsafe fn set_kernel(
        self,
        executable: GraphExec,
        node: GraphNode,
        (function, grid): (Function, [u32; 2]),
        arguments: &Arguments,
    ) -> Result<()> {
        const CALL: &str = "cuGraphExecKernelNodeSetParams";
        let set = self.functions().graph_exec_kernel_node_set_params;
        let set = set.ok_or_else(|| self.driver().error(CALL, status::NOT_FOUND))?;
        let mut parameters = [parameter(arguments)];
        let kernel = KernelNodeParams::new(function, (grid, THREADS), &mut parameters);
        // SAFETY: the caller's own promise. The driver has copied what it reads when it returns.
        let status = unsafe { set(executable, node, &raw const kernel) };
        self.check(CALL, status)
    }

    /// # Safety
    /// Both live, and what its kernel reads and writes stays mapped until it is done.
    unsafe fn launch_graph(self, executable: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_launch)(executable, stream) };
        self.check("cuGraphLaunch", status)
    }

    /// Either may be none.
    ///
    /// # Safety
    /// They do not run, and are used no more.
    unsafe fn destroy_graph(self, graph: Graph, executable: GraphExec) -> Result<()> {
        if executable != GraphExec(0) {
            // SAFETY: the caller's own promise.
            let status = unsafe { (self.functions().graph_exec_destroy)(executable) };
            self.check("cuGraphExecDestroy", status)?;
        }
        // SAFETY: as above.
        let status = unsafe { (self.functions().graph_destroy)(graph) };
        self.check("cuGraphDestroy", status)
    }
}

/// As the driver reads it, which does not write it.
fn parameter(arguments: &Arguments) -> *mut c_void {
    ptr::from_ref(arguments).cast_mut().cast()
}
