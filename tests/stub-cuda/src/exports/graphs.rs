//! Captures, graphs, events.

use std::ffi::c_void;
use std::sync::Arc;

use statecopy_kernels::cuda::arguments::Arguments;

use super::launches::kernel_work;
use super::{In, Out, Word, exported};
use crate::abi::{
    CUresult, CaptureMode, KernelNodeParams, Opaque, USER_OBJECT_MOVE,
    USER_OBJECT_NO_DESTRUCTOR_SYNC, capture_status,
};
use crate::captures;
use crate::graphs::{Graph, HostFunction};
use crate::process::{Answer, Process};
use crate::streams::Work;
use crate::trace::Object;

/// A kernel of a graph, as a caller describes it.
type KernelNode = KernelNodeParams<In<In<Arguments>>>;

/// Its function, and what it does.
fn node_work(process: &Process, node: In<KernelNode>) -> Answer<(Opaque, Work)> {
    let KernelNode { function, grid, block, parameters, extra, .. } = node.get()?;
    if extra != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    Ok((function, kernel_work(process, function, (grid, block), parameters)?))
}

impl Word for Option<HostFunction> {
    fn word(&self) -> u64 {
        self.map_or(0, |function| function as usize as u64)
    }
}

exported! {
    cuStreamBeginCapture_v2(stream: Opaque, mode: u32) |process| {
        process.begin_capture(stream, CaptureMode::of(mode)?)
    };
    cuStreamEndCapture(stream: Opaque, graph: Out<Opaque>) |process| {
        graph.put(process.end_capture(stream).inspect_err(|_| {
            let _written = graph.put(0);
        })?)
    };
    cuStreamIsCapturing(stream: Opaque, status: Out<u32>) |process| {
        let stream = process.stream(stream)?;
        if stream.is_default() && process.is_captured_implicitly() {
            return Err(CUresult::STREAM_CAPTURE_IMPLICIT);
        }
        status.put(stream.capture().map_or(capture_status::NONE, |capture| capture.status()))
    };
    cuStreamGetCaptureInfo_v2(
        stream: Opaque,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<Opaque>,
        dependencies: Out<c_void>,
        count: Out<u64>,
    ) |process| {
        let stream = process.stream(stream)?;
        if stream.is_default() && process.is_captured_implicitly() {
            return Err(CUresult::STREAM_CAPTURE_IMPLICIT);
        }
        // The stub's graphs have no nodes to name.
        if dependencies.word() != 0 || count.word() != 0 {
            return Err(CUresult::NOT_SUPPORTED);
        }
        let Some(capture) = stream.capture() else { return status.put(capture_status::NONE) };
        status.put(capture.status())?;
        if capture.status() == capture_status::ACTIVE {
            // The driver takes a null pointer for "not wanted".
            id.put(capture.id).or(Ok(()))?;
            graph.put(capture.graph).or(Ok(()))?;
        }
        Ok(())
    };
    cuThreadExchangeStreamCaptureMode(mode: Out<u32>) |_| {
        let before = captures::exchange_mode(CaptureMode::of(mode.get()?)?);
        mode.put(before.number())
    };
    cuEventCreate(event: Out<Opaque>, _flags: u32) |process| event.put(process.create_event());
    cuEventRecord(event: Opaque, stream: Opaque) |process| process.record_event(event, stream);
    cuEventQuery(event: Opaque) |process| process.query_event(event);
    cuEventDestroy_v2(event: Opaque) |process| process.destroy_event(event);
    cuStreamWaitEvent(stream: Opaque, event: Opaque, _flags: u32) |process| {
        process.wait_for_event(stream, event)
    };
    cuUserObjectCreate(
        object: Out<Opaque>,
        data: u64,
        destroy: Option<HostFunction>,
        references: u32,
        flags: u32,
    ) |process| {
        let destroy = destroy.ok_or(CUresult::INVALID_VALUE)?;
        if flags != USER_OBJECT_NO_DESTRUCTOR_SYNC || references == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let handle = process.control.number() << 4;
        object.put(process.objects().graphs.create_object(handle, destroy, data, references))
    };
    cuUserObjectRelease(object: Opaque, references: u32) |process| {
        let gone = process.objects().graphs.release_object(object, references);
        gone.map(drop)
    };
    cuGraphRetainUserObject(graph: Opaque, object: Opaque, references: u32, flags: u32) |process| {
        let moved = flags == USER_OBJECT_MOVE;
        process.objects().graphs.retain_object(graph, object, references, moved)
    };
    cuGraphCreate(graph: Out<Opaque>, flags: u32) |process| {
        if flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let handle = process.control.number() << 4;
        process.trace.add(Object::Graph);
        graph.put(process.objects().graphs.add(handle, Arc::new(Graph::default())))
    };
    cuGraphAddKernelNode_v2(
        node: Out<Opaque>,
        graph: Opaque,
        _dependencies: In<Opaque>,
        count: u64,
        kernel: In<KernelNode>,
    ) |process| {
        // The stub's graphs have one order.
        if count != 0 {
            return Err(CUresult::NOT_SUPPORTED);
        }
        let (function, work) = node_work(process, kernel)?;
        let handle = process.control.number() << 4;
        process.objects().graphs.graph(graph)?.add_kernel(handle, function, work);
        node.put(handle)
    };
    cuGraphExecKernelNodeSetParams_v2(executable: Opaque, node: Opaque, kernel: In<KernelNode>) |process| {
        let (function, work) = node_work(process, kernel)?;
        process.objects().graphs.executable(executable)?.set_kernel(node, function, work)
    };
    cuGraphUpload(executable: Opaque, stream: Opaque) |process| {
        let _stream = process.stream(stream)?;
        process.objects().graphs.executable(executable).map(drop)
    };
    cuGraphInstantiateWithFlags(executable: Out<Opaque>, graph: Opaque, _flags: u64) |process| {
        let handle = process.control.number() << 4;
        let made = process.objects().graphs.instantiate(handle, graph)?;
        process.trace.add(Object::Executable);
        executable.put(made)
    };
    cuGraphLaunch(executable: Opaque, stream: Opaque) |process| {
        let executable = process.objects().graphs.executable(executable)?;
        // A device would run whatever lies where the code was.
        executable.functions().into_iter().try_for_each(|each| process.kernel(each).map(drop))?;
        let work = executable.work();
        process.stream(stream)?.push(Work::Graph(executable, work))
    };
    cuGraphDestroy(graph: Opaque) |process| {
        let gone = process.objects().graphs.destroy(graph)?;
        process.trace.remove(Object::Graph);
        drop(gone);
        Ok(())
    };
    cuGraphExecDestroy(executable: Opaque) |process| {
        let gone = process.objects().graphs.destroy_executable(executable)?;
        process.trace.remove(Object::Executable);
        drop(gone);
        Ok(())
    };
}
