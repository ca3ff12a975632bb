//! Streams, modules, launches.

use std::ffi::{c_char, c_void};

use statecopy_kernels::cuda::arguments::Arguments;

use super::{In, Out, exported};
use crate::abi::{
    CUdeviceptr, CUresult, CUstreamBatchMemOpParams, OPERATION_WAIT_64, OPERATION_WRITE_64, Opaque,
};
use crate::captures::Capture;
use crate::compiler;
use crate::kernels::{Kernel, Launch};
use crate::process::{Answer, Process};
use crate::streams::{Stream, Work};
use crate::trace::Object;

/// The largest grid in x and in y, and the most threads of a block.
const GRID_MAX: [u32; 2] = [i32::MAX.cast_unsigned(), 65_535];
const THREADS_MAX: u32 = 1024;

/// Refuses a grid that a device refuses, and more than the product's kernels know of.
fn check_grid(grid: [u32; 3], block: [u32; 3]) -> Answer {
    let [x, y, z] = grid;
    let grid_fits = (1..=GRID_MAX[0]).contains(&x) && (1..=GRID_MAX[1]).contains(&y) && z == 1;
    let threads = block.iter().try_fold(1_u32, |all, each| all.checked_mul(*each));
    let block_fits = threads.is_some_and(|threads| (1..=THREADS_MAX).contains(&threads));
    if grid_fits && block_fits { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
}

/// The most operations of one batch.
const OPERATIONS_MAX: u32 = 255;

/// Refuses a word that the device may not reach.
fn check_word(process: &Process, address: CUdeviceptr, write: bool) -> Answer {
    let reached = process.memory().allows(address, 8, write) && address.is_multiple_of(8);
    if reached { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
}

/// Refuses to copy between memory that the device may not reach.
fn check_copy(process: &Process, to: CUdeviceptr, from: CUdeviceptr, bytes: u64) -> Answer {
    let memory = process.memory();
    let reached = memory.allows(to, bytes, true) && memory.allows(from, bytes, false);
    if reached { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
}

/// What a stream does for an operation of a batch.
fn work_of(process: &Process, operation: &CUstreamBatchMemOpParams) -> Answer<Work> {
    let CUstreamBatchMemOpParams { operation, address: at, value, flags, .. } = *operation;
    match operation {
        OPERATION_WAIT_64 => {
            check_word(process, at, false)?;
            Ok(Work::Wait { at, value, flags })
        }
        OPERATION_WRITE_64 => {
            check_word(process, at, true)?;
            Ok(Work::Write { at, value })
        }
        _ => Err(CUresult::INVALID_VALUE),
    }
}

/// What a stream does for a launch.
pub(super) fn kernel_work(
    process: &Process,
    function: Opaque,
    (grid, block): ([u32; 3], [u32; 3]),
    parameters: In<In<Arguments>>,
) -> Answer<Work> {
    let kernel = process.kernel(function)?;
    check_grid(grid, block)?;
    let parameter = parameters.get()?;
    Ok(match kernel {
        Kernel::Produce => Work::Produce(parameter.cast().get()?),
        Kernel::Copy(kernel) => {
            let arguments = parameter.get()?;
            let (chunks, rows) = (grid[0].into(), grid[1].into());
            Work::Kernel(Box::new(Launch { kernel, arguments, chunks, rows }))
        }
    })
}

exported! {
    cuStreamCreateWithPriority(stream: Out<Opaque>, flags: u32, _priority: i32) |process| {
        if flags > 1 {
            return Err(CUresult::INVALID_VALUE);
        }
        let handle = process.control.number() << 4;
        let made = Stream::new(process, process.context()?, flags == 1, false);
        process.objects().streams.insert(handle, made);
        process.trace.add(Object::Stream);
        stream.put(handle)
    };
    cuStreamDestroy_v2(stream: Opaque) |process| {
        process.objects().end_stream(stream)?;
        process.trace.remove(Object::Stream);
        Ok(())
    };
    cuStreamQuery(stream: Opaque) |process| {
        let stream = process.stream(stream)?;
        process.check_not_captured(&stream)?;
        let idle = stream.is_idle();
        process.sticky()?;
        if idle { Ok(()) } else { Err(CUresult::NOT_READY) }
    };
    cuStreamSynchronize(stream: Opaque) |process| {
        let stream = process.stream(stream)?;
        if stream.is_default() {
            process.end_captures(CUresult::STREAM_CAPTURE_IMPLICIT, Capture::is_blocking)?;
        }
        process.check_not_captured(&stream)?;
        stream.wait_idle();
        process.sticky()
    };
    cuStreamGetId(stream: Opaque, id: Out<u64>) |process| {
        let stream = process.stream(stream)?;
        // As of driver 580: it is one of the calls that end a capture.
        process.check_not_captured(&stream)?;
        id.put(stream.id())
    };
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: Opaque) |process| {
        let (stream, bytes) = (process.stream(stream)?, bytes as u64);
        check_copy(process, to, from, bytes)?;
        stream.push(Work::Copy { to, from, bytes })
    };
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: Opaque) |process| {
        let (stream, bytes) = (process.stream(stream)?, bytes as u64);
        check_copy(process, to, from, bytes)?;
        stream.push(Work::Copy { to, from, bytes })
    };
    cuStreamWriteValue64_v2(stream: Opaque, address: CUdeviceptr, value: u64, _flags: u32) |process| {
        let stream = process.stream(stream)?;
        check_word(process, address, true)?;
        stream.push(Work::Write { at: address, value })
    };
    cuStreamWaitValue64_v2(stream: Opaque, address: CUdeviceptr, value: u64, flags: u32) |process| {
        let stream = process.stream(stream)?;
        check_word(process, address, false)?;
        stream.push(Work::Wait { at: address, value, flags })
    };
    cuStreamBatchMemOp_v2(
        stream: Opaque,
        count: u32,
        operations: In<CUstreamBatchMemOpParams>,
        flags: u32,
    ) |process| {
        let stream = process.stream(stream)?;
        if flags != 0 || !(1..=OPERATIONS_MAX).contains(&count) {
            return Err(CUresult::INVALID_VALUE);
        }
        let operations = operations.all(count as usize)?;
        let works: Answer<Vec<Work>> =
            operations.iter().map(|operation| work_of(process, operation)).collect();
        works?.into_iter().try_for_each(|work| stream.push(work))
    };
    cuModuleLoadData(module: Out<Opaque>, image: In<u8>) |process| {
        let first = image.get()?;
        let architecture = compiler::architecture_of(|place| image.byte(place).unwrap_or(0));
        module.put(process.load_module(first, architecture)?)
    };
    cuModuleUnload(module: Opaque) |process| process.unload_module(module);
    cuModuleGetFunction(function: Out<Opaque>, module: Opaque, name: In<c_char>) |process| {
        function.put(process.function_named(module, &name.text()?)?)
    };
    cuLaunchKernel(
        function: Opaque,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        _shared_bytes: u32,
        stream: Opaque,
        parameters: In<In<Arguments>>,
        extra: In<c_void>,
    ) |process| {
        if extra.0.is_some() {
            return Err(CUresult::INVALID_VALUE);
        }
        let shape = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let work = kernel_work(process, function, shape, parameters)?;
        process.stream(stream)?.push(work)
    };
}
