//! The driver's calls for graphs, as methods of [`Current`].

use std::ffi::c_void;
use std::ptr;

use super::arguments::{Arguments, THREADS};
use super::context::Current;
use super::driver::DriverError;
use super::sys::{Function, Graph, GraphExec, GraphNode, KernelNodeParams, Stream, status};

type Result<T> = std::result::Result<T, DriverError>;

impl Current<'_> {
    pub(super) fn create_graph(self) -> Result<Graph> {
        let mut graph = Graph(0);
        // SAFETY: the driver writes one handle.
        let status = unsafe { (self.functions().graph_create)(&raw mut graph, 0) };
        self.check("cuGraphCreate", status)?;
        Ok(graph)
    }

    /// # Safety
    /// The graph lives, the function is loaded and takes [`Arguments`].
    pub(super) unsafe fn add_kernel(
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
    pub(super) unsafe fn instantiate(self, graph: Graph) -> Result<GraphExec> {
        let mut executable = GraphExec(0);
        // SAFETY: the caller's own promise; the driver writes one handle.
        let status = unsafe { (self.functions().graph_instantiate)(&raw mut executable, graph, 0) };
        self.check("cuGraphInstantiate", status)?;
        Ok(executable)
    }

    /// # Safety
    /// Both live.
    pub(super) unsafe fn upload(self, executable: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_upload)(executable, stream) };
        self.check("cuGraphUpload", status)
    }

    /// Gives the kernel of a graph another grid and parameter, for later launches.
    ///
    /// # Safety
    /// The node is of the graph that this was made of, and of this function, whose module is loaded.
    pub(super) unsafe fn set_kernel(
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
    pub(super) unsafe fn launch_graph(self, executable: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_launch)(executable, stream) };
        self.check("cuGraphLaunch", status)
    }

    /// Takes none, too.
    ///
    /// # Safety
    /// It does not run, and is used no more.
    pub(super) unsafe fn destroy_executable(self, executable: GraphExec) -> Result<()> {
        if executable == GraphExec(0) {
            return Ok(());
        }
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_exec_destroy)(executable) };
        self.check("cuGraphExecDestroy", status)
    }

    /// What was made of it stays.
    ///
    /// # Safety
    /// It is used no more.
    pub(super) unsafe fn destroy_graph(self, graph: Graph) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().graph_destroy)(graph) };
        self.check("cuGraphDestroy", status)
    }
}

/// As the driver reads it, which does not write it.
fn parameter(arguments: &Arguments) -> *mut c_void {
    ptr::from_ref(arguments).cast_mut().cast()
}
