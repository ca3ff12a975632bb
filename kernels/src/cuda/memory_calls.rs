//! The driver's calls for memory, as methods of [`Current`].
//!
//! Safe are those that cannot touch memory that Rust knows of: device memory is never behind a reference, and the driver
//! answers a wrong address or handle with an error. The others say what they ask for.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::ptr::{self, NonNull};

use super::context::Current;
use super::driver::DriverError;
use super::sys::{
    self, AllocationHandle, DevicePointer, FabricHandle, IpcMemHandle, MemAccessDesc,
    MemAllocationProp, MemLocation, Stream, pointer_attribute,
};

type Result<T> = std::result::Result<T, DriverError>;

/// Bytes of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLeft {
    /// What is free.
    pub free: u64,
    /// What there is.
    pub total: u64,
}

/// A range of device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AddressRange {
    pub(super) start: DevicePointer,
    pub(super) bytes: u64,
}

impl AddressRange {
    /// One past the last.
    pub(super) fn end(self) -> DevicePointer {
        self.start + self.bytes
    }

    /// The address of a part.
    pub(super) fn part(self, offset: u64, bytes: usize) -> DevicePointer {
        let end = offset.checked_add(bytes as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "The part lies in the memory");
        self.start + offset
    }
}

/// What stands at an address, as far as sharing it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PointerFacts {
    /// `CUmemorytype`.
    pub(super) memory_type: u64,
    pub(super) managed: bool,
    pub(super) legacy_ipc: bool,
    /// Whether the memory is of a stream-ordered pool.
    pub(super) pool: bool,
}

/// How a piece of VMM memory can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shareable {
    Descriptor,
    Fabric,
}

impl Shareable {
    /// `CUmemAllocationHandleType`.
    pub(super) fn number(self) -> c_int {
        match self {
            Self::Descriptor => sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Self::Fabric => sys::MEM_HANDLE_TYPE_FABRIC,
        }
    }
}

/// A size as the driver takes it.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("addresses have 64 bits wherever the driver is")
}

/// Memory of the device.
impl Current<'_> {
    pub(super) fn memory_left(self) -> Result<MemoryLeft> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: the driver writes two sizes.
        let status = unsafe { (self.functions().mem_get_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", status)?;
        Ok(MemoryLeft { free: free as u64, total: total as u64 })
    }

    pub(super) fn allocate(self, bytes: u64) -> Result<DevicePointer> {
        let mut memory = 0;
        // SAFETY: the driver writes one address.
        let status = unsafe { (self.functions().mem_alloc)(&raw mut memory, size(bytes)) };
        self.check("cuMemAlloc", status)?;
        Ok(memory)
    }

    pub(super) fn free(self, memory: DevicePointer) -> Result<()> {
        // SAFETY: what is no allocation is an error of the driver's.
        let status = unsafe { (self.functions().mem_free)(memory) };
        self.check("cuMemFree", status)
    }

    /// Memory of the device's stream-ordered pool, which can be used when this returns.
    pub(super) fn allocate_from_pool(self, bytes: u64) -> Result<DevicePointer> {
        let mut memory = 0;
        // SAFETY: the driver writes one address. Every context has the default stream.
        let status =
            unsafe { (self.functions().mem_alloc_async)(&raw mut memory, size(bytes), Stream(0)) };
        self.check("cuMemAllocAsync", status)?;
        self.settle()?;
        Ok(memory)
    }

    pub(super) fn free_to_pool(self, memory: DevicePointer) -> Result<()> {
        // SAFETY: what is no allocation is an error of the driver's. Every context has the default stream.
        let status = unsafe { (self.functions().mem_free_async)(memory, Stream(0)) };
        self.check("cuMemFreeAsync", status)
    }

    /// Pinned host memory, which has the same address for the device.
    pub(super) fn allocate_host(self, bytes: usize) -> Result<NonNull<u8>> {
        let mut memory: *mut c_void = ptr::null_mut();
        // SAFETY: the driver writes one address.
        let status = unsafe {
            (self.functions().mem_host_alloc)(&raw mut memory, bytes, sys::MEMHOSTALLOC_MAPPED)
        };
        self.check("cuMemHostAlloc", status)?;
        Ok(NonNull::new(memory.cast()).expect("an allocation has an address"))
    }

    /// # Safety
    /// The memory is from [`Current::allocate_host`] and nobody uses it any more, the device included.
    pub(super) unsafe fn free_host(self, memory: NonNull<u8>) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().mem_free_host)(memory.as_ptr().cast()) };
        self.check("cuMemFreeHost", status)
    }

    /// The allocation that an address lies in.
    pub(super) fn allocation_at(self, address: DevicePointer) -> Result<AddressRange> {
        let (mut start, mut bytes) = (0, 0_usize);
        // SAFETY: the driver writes an address and a size.
        let status = unsafe {
            (self.functions().mem_get_address_range)(&raw mut start, &raw mut bytes, address)
        };
        self.check("cuMemGetAddressRange", status)?;
        Ok(AddressRange { start, bytes: bytes as u64 })
    }

    /// # Safety
    /// The range lies in device memory that is mapped in this context; host memory also has device addresses.
    pub(super) unsafe fn clear(self, range: AddressRange) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().memset_d8)(range.start, 0, size(range.bytes)) };
        self.check("cuMemsetD8", status)?;
        self.settle()
    }

    /// # Safety
    /// As [`Current::clear`], of as many bytes as are written.
    pub(super) unsafe fn write(self, to: DevicePointer, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's own promise, and a slice is readable.
        let status =
            unsafe { (self.functions().memcpy_htod)(to, bytes.as_ptr().cast(), bytes.len()) };
        self.check("cuMemcpyHtoD", status)?;
        self.settle()
    }

    /// # Safety
    /// As [`Current::clear`], of as many bytes as are read.
    pub(super) unsafe fn read(self, from: DevicePointer, into: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's own promise, and a slice is writable.
        let status =
            unsafe { (self.functions().memcpy_dtoh)(into.as_mut_ptr().cast(), from, into.len()) };
        self.check("cuMemcpyDtoH", status)
    }

    /// Waits for the default stream: a write from host memory may return before it has arrived, and our own streams have no
    /// order with it.
    fn settle(self) -> Result<()> {
        // SAFETY: every context has the default stream.
        unsafe { self.synchronize(Stream(0)) }
    }
}

/// What stands at an address.
impl Current<'_> {
    pub(super) fn pointer_facts(self, address: DevicePointer) -> Result<PointerFacts> {
        let memory_type =
            self.driver().pointer_attribute(pointer_attribute::MEMORY_TYPE, address)?;
        let is_set = |number| self.driver().known_or_zero(number, address).map(|value| value != 0);
        Ok(PointerFacts {
            memory_type,
            managed: is_set(pointer_attribute::IS_MANAGED)?,
            legacy_ipc: is_set(pointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE)?,
            pool: is_set(pointer_attribute::MEMPOOL_HANDLE)?,
        })
    }

    /// Whether the piece of VMM memory at an address can be shared that way.
    pub(super) fn can_share(self, address: DevicePointer, how: Shareable) -> Result<bool> {
        let attribute = pointer_attribute::ALLOWED_HANDLE_TYPES;
        let allowed = self.driver().pointer_attribute(attribute, address)?;
        Ok(allowed & u64::from(how.number().unsigned_abs()) != 0)
    }

    /// The mapping of VMM memory that an address lies in.
    pub(super) fn mapping_at(self, address: DevicePointer) -> Result<AddressRange> {
        let attribute = |number| self.driver().pointer_attribute(number, address);
        Ok(AddressRange {
            start: attribute(pointer_attribute::MAPPING_BASE_ADDR)?,
            bytes: attribute(pointer_attribute::MAPPING_SIZE)?,
        })
    }
}

/// Legacy handles.
impl Current<'_> {
    pub(super) fn ipc_handle(self, memory: DevicePointer) -> Result<IpcMemHandle> {
        let mut handle = IpcMemHandle([0; 64]);
        // SAFETY: the driver writes one handle.
        let status = unsafe { (self.functions().ipc_get_mem_handle)(&raw mut handle, memory) };
        self.check("cuIpcGetMemHandle", status)?;
        Ok(handle)
    }

    pub(super) fn open_ipc(self, handle: IpcMemHandle) -> Result<DevicePointer> {
        let mut memory = 0;
        // SAFETY: the driver writes one address; bytes that are no handle are an error of its.
        let status = unsafe {
            (self.functions().ipc_open_mem_handle)(
                &raw mut memory,
                handle,
                sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            )
        };
        self.check("cuIpcOpenMemHandle", status)?;
        Ok(memory)
    }

    pub(super) fn close_ipc(self, memory: DevicePointer) -> Result<()> {
        // SAFETY: an address that was not opened is an error of the driver's.
        let status = unsafe { (self.functions().ipc_close_mem_handle)(memory) };
        self.check("cuIpcCloseMemHandle", status)
    }
}

/// VMM memory.
impl Current<'_> {
    fn here(self) -> MemLocation {
        MemLocation { kind: sys::MEM_LOCATION_TYPE_DEVICE, id: self.device() }
    }

    fn properties_here(self, how: Option<Shareable>) -> MemAllocationProp {
        MemAllocationProp {
            kind: sys::MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: how.map_or(sys::MEM_HANDLE_TYPE_NONE, Shareable::number),
            location: self.here(),
            ..MemAllocationProp::default()
        }
    }

    /// What sizes and addresses of pieces are multiples of.
    pub(super) fn granularity(self) -> Result<u64> {
        let (mut bytes, properties) = (0_usize, self.properties_here(None));
        // SAFETY: the driver reads the properties and writes one size.
        let status = unsafe {
            (self.functions().mem_get_allocation_granularity)(
                &raw mut bytes,
                &raw const properties,
                sys::MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        };
        self.check("cuMemGetAllocationGranularity", status)?;
        Ok(bytes as u64)
    }

    /// Addresses without memory.
    pub(super) fn reserve(self, bytes: u64, alignment: u64) -> Result<DevicePointer> {
        let mut address = 0;
        // SAFETY: the driver writes one address.
        let status = unsafe {
            (self.functions().mem_address_reserve)(
                &raw mut address,
                size(bytes),
                size(alignment),
                0,
                0,
            )
        };
        self.check("cuMemAddressReserve", status)?;
        Ok(address)
    }

    pub(super) fn unreserve(self, range: AddressRange) -> Result<()> {
        // SAFETY: a range that was not reserved is an error of the driver's.
        let status = unsafe { (self.functions().mem_address_free)(range.start, size(range.bytes)) };
        self.check("cuMemAddressFree", status)
    }

    /// Memory without addresses.
    pub(super) fn create(self, bytes: u64, how: Option<Shareable>) -> Result<AllocationHandle> {
        let (mut handle, properties) = (0, self.properties_here(how));
        // SAFETY: the driver reads the properties and writes one handle.
        let status = unsafe {
            (self.functions().mem_create)(&raw mut handle, size(bytes), &raw const properties, 0)
        };
        self.check("cuMemCreate", status)?;
        Ok(handle)
    }

    /// Lets go of a handle. The memory stays as long as it is mapped or another process has it.
    pub(super) fn release(self, handle: AllocationHandle) -> Result<()> {
        // SAFETY: what is no handle is an error of the driver's.
        let status = unsafe { (self.functions().mem_release)(handle) };
        self.check("cuMemRelease", status)
    }

    pub(super) fn map(self, range: AddressRange, handle: AllocationHandle) -> Result<()> {
        // SAFETY: the driver checks the range and the handle.
        let status =
            unsafe { (self.functions().mem_map)(range.start, size(range.bytes), 0, handle, 0) };
        self.check("cuMemMap", status)
    }

    pub(super) fn unmap(self, range: AddressRange) -> Result<()> {
        // SAFETY: a range that is not mapped is an error of the driver's.
        let status = unsafe { (self.functions().mem_unmap)(range.start, size(range.bytes)) };
        self.check("cuMemUnmap", status)
    }

    /// Lets this device read and write a mapped range.
    pub(super) fn allow_access(self, range: AddressRange) -> Result<()> {
        let access = MemAccessDesc { location: self.here(), flags: sys::MEM_ACCESS_READ_WRITE };
        // SAFETY: the driver reads one description.
        let status = unsafe {
            (self.functions().mem_set_access)(range.start, size(range.bytes), &raw const access, 1)
        };
        self.check("cuMemSetAccess", status)
    }

    /// Whether a handle stands for memory of this very device.
    pub(super) fn is_of_this_device(self, handle: AllocationHandle) -> Result<bool> {
        let mut properties = MemAllocationProp::default();
        // SAFETY: the driver writes the properties.
        let status = unsafe {
            (self.functions().mem_get_allocation_properties)(&raw mut properties, handle)
        };
        self.check("cuMemGetAllocationPropertiesFromHandle", status)?;
        Ok(properties.location == self.here())
    }

    /// A handle for the memory that is mapped at an address.
    pub(super) fn retain(self, address: DevicePointer) -> Result<AllocationHandle> {
        let mut handle = 0;
        let address = ptr::without_provenance_mut(size(address));
        // SAFETY: the driver looks the address up and writes one handle.
        let status =
            unsafe { (self.functions().mem_retain_allocation_handle)(&raw mut handle, address) };
        self.check("cuMemRetainAllocationHandle", status)?;
        Ok(handle)
    }

    pub(super) fn export_descriptor(self, handle: AllocationHandle) -> Result<OwnedFd> {
        let mut descriptor: RawFd = -1;
        // SAFETY: for this kind the driver writes one int.
        let status = unsafe {
            (self.functions().mem_export_to_shareable_handle)(
                (&raw mut descriptor).cast(),
                handle,
                Shareable::Descriptor.number(),
                0,
            )
        };
        self.check("cuMemExportToShareableHandle", status)?;
        // SAFETY: the driver opened the descriptor for the caller, who owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    pub(super) fn export_fabric(self, handle: AllocationHandle) -> Result<FabricHandle> {
        let mut shared = FabricHandle([0; 64]);
        // SAFETY: for this kind the driver writes 64 bytes.
        let status = unsafe {
            (self.functions().mem_export_to_shareable_handle)(
                (&raw mut shared).cast(),
                handle,
                Shareable::Fabric.number(),
                0,
            )
        };
        self.check("cuMemExportToShareableHandle", status)?;
        Ok(shared)
    }

    pub(super) fn import_descriptor(self, shared: BorrowedFd<'_>) -> Result<AllocationHandle> {
        let number =
            usize::try_from(shared.as_raw_fd()).expect("an open descriptor is not negative");
        self.import(ptr::without_provenance_mut(number), Shareable::Descriptor)
    }

    pub(super) fn import_fabric(self, mut shared: FabricHandle) -> Result<AllocationHandle> {
        self.import((&raw mut shared).cast(), Shareable::Fabric)
    }

    fn import(self, shared: *mut c_void, how: Shareable) -> Result<AllocationHandle> {
        let mut handle = 0;
        // SAFETY: for a descriptor the driver takes its number, for a fabric handle the address of 64 bytes, which it reads;
        // the callers above pass these. It writes one handle.
        let status = unsafe {
            (self.functions().mem_import_from_shareable_handle)(
                &raw mut handle,
                shared,
                how.number(),
            )
        };
        self.check("cuMemImportFromShareableHandle", status)?;
        Ok(handle)
    }
}
