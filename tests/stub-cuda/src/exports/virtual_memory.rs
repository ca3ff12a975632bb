//! Physical memory, reserved addresses, mappings, and ways to share them.

use std::ffi::c_void;

use super::{In, Out, Word as _, exported};
use crate::abi::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult,
    HANDLE_FABRIC, HANDLE_POSIX,
};

exported! {
    cuMemGetAllocationGranularity(
        bytes: Out<u64>,
        properties: In<CUmemAllocationProp>,
        _option: u32,
    ) |process| bytes.put(process.granularity(&properties.get()?)?);
    cuMemAddressReserve(
        address: Out<CUdeviceptr>,
        bytes: u64,
        alignment: u64,
        _hint: CUdeviceptr,
        flags: u64,
    ) |process| address.put(process.reserve(bytes, alignment, flags)?);
    cuMemAddressFree(address: CUdeviceptr, bytes: u64) |process| process.unreserve(address, bytes);
    cuMemCreate(
        handle: Out<CUmemGenericAllocationHandle>,
        bytes: u64,
        properties: In<CUmemAllocationProp>,
        flags: u64,
    ) |process| handle.put(process.create(bytes, &properties.get()?, flags)?);
    cuMemRelease(handle: CUmemGenericAllocationHandle) |process| process.release(handle);
    cuMemMap(
        address: CUdeviceptr,
        bytes: u64,
        offset: u64,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) |process| process.map(address, bytes, offset, handle, flags);
    cuMemUnmap(address: CUdeviceptr, bytes: u64) |process| process.unmap(address, bytes);
    cuMemSetAccess(
        address: CUdeviceptr,
        bytes: u64,
        access: In<CUmemAccessDesc>,
        count: usize,
    ) |process| process.set_access(address, bytes, &access.all(count)?);
    cuMemExportToShareableHandle(
        shareable: Out<c_void>,
        handle: CUmemGenericAllocationHandle,
        kind: u32,
        flags: u64,
    ) |process| match (kind, flags) {
        (HANDLE_POSIX, 0) => shareable.cast().put(process.export_descriptor(handle)?),
        (HANDLE_FABRIC, 0) => shareable.cast().put(process.export_fabric(handle)?),
        _ => Err(CUresult::INVALID_VALUE),
    };
    cuMemImportFromShareableHandle(
        handle: Out<CUmemGenericAllocationHandle>,
        shareable: In<u8>,
        kind: u32,
    ) |process| match kind {
        // The descriptor is the pointer's value.
        HANDLE_POSIX => {
            let descriptor = i32::try_from(shareable.word().cast_signed());
            let descriptor = descriptor.map_err(|_| CUresult::INVALID_VALUE)?;
            handle.put(process.import_descriptor(descriptor)?)
        }
        HANDLE_FABRIC => handle.put(process.import_fabric(&shareable.cast().get()?)?),
        _ => Err(CUresult::INVALID_VALUE),
    };
    cuMemRetainAllocationHandle(
        handle: Out<CUmemGenericAllocationHandle>,
        address: CUdeviceptr,
    ) |process| handle.put(process.retain(address)?);
    cuMemGetAllocationPropertiesFromHandle(
        properties: Out<CUmemAllocationProp>,
        handle: CUmemGenericAllocationHandle,
    ) |process| properties.put(process.properties(handle)?);
}
