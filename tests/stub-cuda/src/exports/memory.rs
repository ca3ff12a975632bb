//! Memory of a device and of the host, legacy handles, and copies that are done when they return.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::{In, Out, exported};
use crate::abi::{CUdeviceptr, CUipcMemHandle, CUresult, Opaque};
use crate::attributes::Value;
use crate::mapping;
use crate::process::{Answer, Process, failed};
use crate::streams::Work;

/// Waits for what comes before a call that has no stream, and gives the map if the device may touch the range.
fn touch(
    process: &Arc<Process>,
    at: CUdeviceptr,
    bytes: usize,
    write: bool,
    then: impl FnOnce(),
) -> Answer {
    process.synchronise_blocking()?;
    let memory = process.memory();
    if !memory.allows(at, bytes as u64, write) {
        return Err(CUresult::INVALID_VALUE);
    }
    then();
    Ok(())
}

fn free_bytes(process: &Process) -> Answer<(u64, u64)> {
    let device = process.device(process.context()?)?;
    let used = process.ledger.used(device.uuid).map_err(failed)?;
    Ok((device.memory.saturating_sub(used), device.memory))
}

exported! {
    cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) |process| {
        let (left, all) = free_bytes(process)?;
        free.put(left)?;
        total.put(all)
    };
    cuMemAlloc_v2(memory: Out<CUdeviceptr>, bytes: u64) |process| {
        memory.put(process.allocate(bytes)?)
    };
    cuMemFree_v2(memory: CUdeviceptr) |process| {
        if memory == 0 { Ok(()) } else { process.free(memory) }
    };
    cuMemAllocAsync(memory: Out<CUdeviceptr>, bytes: u64, stream: Opaque) |process| {
        process.stream(stream)?;
        memory.put(process.allocate_from_pool(bytes)?)
    };
    cuMemFreeAsync(memory: CUdeviceptr, stream: Opaque) |process| {
        process.stream(stream)?.push(Work::Free(memory))
    };
    cuMemHostAlloc(memory: Out<u64>, bytes: u64, _flags: u32) |process| {
        memory.put(process.allocate_host(bytes)?)
    };
    cuMemFreeHost(memory: u64) |process| process.free_host(memory);
    cuMemHostGetDevicePointer_v2(device: Out<CUdeviceptr>, host: u64, _flags: u32) |process| {
        if !process.memory().allows(host, 1, false) {
            return Err(CUresult::INVALID_VALUE);
        }
        device.put(host)
    };
    cuMemHostRegister_v2(memory: u64, bytes: u64, _flags: u32) |process| {
        process.register(memory, bytes)
    };
    cuMemHostUnregister(memory: u64) |process| process.unregister(memory);
    cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<u64>, address: CUdeviceptr) |process| {
        let (start, size) = process.address_range(address)?;
        // The driver takes a null pointer for "not wanted".
        base.put(start).or(Ok(()))?;
        bytes.put(size).or(Ok(()))
    };
    cuPointerGetAttribute(value: Out<c_void>, attribute: u32, address: CUdeviceptr) |process| {
        match process.attribute(attribute, address)? {
            Value::Int(int) => value.cast().put(int),
            Value::Long(long) => value.cast().put(long),
            Value::Bool(truth) => value.cast().put(truth),
        }
    };
    cuMemsetD8_v2(memory: CUdeviceptr, value: u8, bytes: usize) |process| {
        touch(process, memory, bytes, true, || {
            // SAFETY: the range is mapped to be written while the map is held.
            unsafe { ptr::write_bytes(mapping::pointer::<u8>(memory), value, bytes) }
        })
    };
    cuMemcpyHtoD_v2(to: CUdeviceptr, from: In<u8>, bytes: usize) |process| {
        let from = from.0.ok_or(CUresult::INVALID_VALUE)?;
        touch(process, to, bytes, true, || {
            // SAFETY: the range is mapped to be written while the map is held; the caller in C gave as many bytes to read.
            unsafe { ptr::copy(from.as_ptr(), mapping::pointer::<u8>(to), bytes) }
        })
    };
    cuMemcpyDtoH_v2(to: Out<u8>, from: CUdeviceptr, bytes: usize) |process| {
        let to = to.0.ok_or(CUresult::INVALID_VALUE)?;
        touch(process, from, bytes, false, || {
            // SAFETY: the range is mapped to be read while the map is held; the caller in C gave as much room to write.
            unsafe { ptr::copy(mapping::pointer::<u8>(from), to.as_ptr(), bytes) }
        })
    };
    cuIpcGetMemHandle(handle: Out<CUipcMemHandle>, memory: CUdeviceptr) |process| {
        handle.put(process.export_legacy(memory)?)
    };
    cuIpcOpenMemHandle_v2(memory: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) |process| {
        memory.put(process.open_legacy(&handle, flags)?)
    };
    cuIpcCloseMemHandle(memory: CUdeviceptr) |process| process.close_legacy(memory);
}
