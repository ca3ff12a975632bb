//! Initialisation, devices, contexts.

use std::ffi::c_char;

use super::{Out, exported};
use crate::abi::{CUdevice, CUresult, CUuuid, Opaque};
use crate::control::Knob;
use crate::devices::StubDevice;
use crate::process::{self, Answer, Process, context_of};
use crate::trace::Object;

/// The version that the stub says it is of: CUDA 13.0.
const VERSION: i32 = 13_000;

/// `CU_DEVICE_ATTRIBUTE_*`, by their numbers in `cuda.h`.
fn attribute(process: &Process, device: &StubDevice, attribute: u32) -> Answer<u32> {
    Ok(match attribute {
        // MAX_THREADS_PER_BLOCK; MAX_THREADS_PER_MULTIPROCESSOR
        1 => 1024,
        39 => 2048,
        // WARP_SIZE
        10 => 32,
        // MULTIPROCESSOR_COUNT
        16 => 132,
        // CAN_MAP_HOST_MEMORY, CONCURRENT_KERNELS, UNIFIED_ADDRESSING, STREAM_PRIORITIES_SUPPORTED,
        // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, MEMORY_POOLS_SUPPORTED, CAN_USE_64_BIT_STREAM_MEM_OPS,
        // CAN_USE_STREAM_WAIT_VALUE_NOR
        19 | 31 | 41 | 78 | 91 | 102 | 103 | 115 | 122 | 123 => 1,
        // COMPUTE_MODE
        20 => {
            if process.control.is_set(Knob::Exclusive) {
                3
            } else {
                0
            }
        }
        // COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR
        75 => device.capability.0,
        76 => device.capability.1,
        // HANDLE_TYPE_FABRIC_SUPPORTED
        128 => u32::from(process.control.is_set(Knob::Fabric)),
        // MPS_ENABLED
        133 => u32::from(process.control.is_set(Knob::Mps)),
        _ => return Err(CUresult::INVALID_VALUE),
    })
}

/// Writes as much of a name as there is room for, and a zero.
fn put_name(name: &str, at: Out<c_char>, room: i32) -> Answer {
    let room =
        usize::try_from(room).ok().filter(|room| *room > 0).ok_or(CUresult::INVALID_VALUE)?;
    let text = name.bytes().take(room - 1).chain([0]);
    text.enumerate().try_for_each(|(place, byte)| at.cast::<u8>().offset(place).put(byte))
}

exported! {
    cuInit(flags: u32) |_| if flags == 0 { Ok(()) } else { Err(CUresult::INVALID_VALUE) };
    cuDriverGetVersion(version: Out<i32>) |_| version.put(VERSION);
    cuDeviceGetCount(count: Out<i32>) |process| {
        count.put(i32::try_from(process.devices.len()).map_err(|_| CUresult::UNKNOWN)?)
    };
    cuDeviceGet(device: Out<CUdevice>, ordinal: i32) |process| {
        process.device(ordinal)?;
        device.put(ordinal)
    };
    cuDeviceGetName(name: Out<c_char>, room: i32, device: CUdevice) |process| {
        put_name(&process.device(device)?.name, name, room)
    };
    cuDeviceGetUuid(uuid: Out<CUuuid>, device: CUdevice) |process| {
        let device = process.device(device)?;
        uuid.put(CUuuid(device.parent.unwrap_or(device.uuid)))
    };
    cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) |process| {
        uuid.put(CUuuid(process.device(device)?.uuid))
    };
    cuDeviceTotalMem_v2(bytes: Out<u64>, device: CUdevice) |process| {
        bytes.put(process.device(device)?.memory)
    };
    cuDeviceGetAttribute(value: Out<u32>, number: u32, device: CUdevice) |process| {
        value.put(attribute(process, process.device(device)?, number)?)
    };
    cuDevicePrimaryCtxRetain(context: Out<Opaque>, device: CUdevice) |process| {
        process.device(device)?;
        context.put(context_of(device))?;
        *process.objects().retained.entry(device).or_default() += 1;
        process.trace.add(Object::Context);
        Ok(())
    };
    cuDevicePrimaryCtxRelease_v2(device: CUdevice) |process| process.release_context(device);
    cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, _flags: u32) |process| {
        process.device(device).map(drop)
    };
    cuCtxSetCurrent(context: Opaque) |_| {
        process::pop_context();
        if context != 0 {
            process::push_context(context);
        }
        Ok(())
    };
    cuCtxGetCurrent(context: Out<Opaque>) |_| context.put(process::current_context());
    cuCtxPushCurrent_v2(context: Opaque) |_| {
        process::push_context(context);
        Ok(())
    };
    cuCtxPopCurrent_v2(context: Out<Opaque>) |_| {
        let popped = process::pop_context().ok_or(CUresult::INVALID_CONTEXT)?;
        // The driver takes a null pointer for "not wanted".
        context.put(popped).or(Ok(()))
    };
    cuCtxGetDevice(device: Out<CUdevice>) |process| device.put(process.context()?);
    cuCtxSynchronize() |process| {
        process.end_captures(CUresult::STREAM_CAPTURE_UNSUPPORTED, |_| true)?;
        process.synchronise()
    };
    cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |_| {
        least.put(0)?;
        greatest.put(-5)
    };
}
