//! Shared host memory that the device reaches: the words by which streams tell and are told.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use rustix::param::page_size;
use statecopy_descriptors::Mapping;

use super::context::{Context, Current};
use super::driver::DriverError;
use super::sys::{self, DevicePointer};

/// A range of a mapping, registered with the driver: whole pages. Its owner gives it back.
#[derive(Debug)]
pub(super) struct Registered {
    mapping: Arc<Mapping>,
    range: Range<u64>,
    /// The first byte of its pages, for the host.
    pages: *mut u8,
    /// The first byte of the mapping, as the device would find it.
    origin: DevicePointer,
}

// SAFETY: the pointer is only a name for the driver, which binds no registration to a thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers the pages of a range that lies in the mapping. None of them may be registered already.
    pub(super) fn register(
        current: Current<'_>,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
    ) -> Result<Self, DriverError> {
        assert!(
            range.start < range.end && range.end <= mapping.len() as u64,
            "Words lie in their mapping"
        );
        let page = page_size() as u64;
        let start = range.start / page * page;
        // A mapping ends with a page, whatever its length.
        let bytes = range.end.next_multiple_of(page) - start;
        let [offset, bytes] = [start, bytes]
            .map(|bytes| usize::try_from(bytes).expect("a mapping has addresses of this machine"));
        let pages = mapping.base().wrapping_add(offset);
        // SAFETY: the pages are mapped as long as the mapping is held, which is until they are unregistered, or for ever.
        unsafe { current.register(pages, bytes) }?;
        let address = current.device_address(pages).inspect_err(|_| {
            // The first error tells more.
            let _unregistered = current.unregister(pages);
        })?;
        let origin = address.wrapping_sub(start);
        Ok(Self { mapping: Arc::clone(mapping), range, pages, origin })
    }

    /// Where the device finds a word: bytes from the start of the mapping.
    pub(super) fn address(&self, offset: u64) -> DevicePointer {
        let inside = self.range.start <= offset && offset + 8 <= self.range.end;
        assert!(inside && offset.is_multiple_of(8), "A word lies in the range that is registered");
        self.origin.wrapping_add(offset)
    }

    /// Gives the pages back. The driver waits for what the context's streams have to do first, waits for words among it.
    pub(super) fn unregister(&self, current: Current<'_>) -> Result<(), DriverError> {
        current.unregister(self.pages)
    }

    /// Leaves the pages where they are until the process ends: the device may still write them.
    pub(super) fn abandon(&self) {
        mem::forget(Arc::clone(&self.mapping));
    }
}

/// Words that launches write.
#[derive(Debug)]
pub struct CudaWords {
    registered: Registered,
    context: Arc<Context>,
}

impl CudaWords {
    pub(super) fn share(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
    ) -> Result<Self, DriverError> {
        let registered = Registered::register(context.enter()?, mapping, range)?;
        Ok(Self { registered, context: Arc::clone(context) })
    }

    pub(super) fn address(&self, offset: u64) -> DevicePointer {
        self.registered.address(offset)
    }
}

impl Drop for CudaWords {
    fn drop(&mut self) {
        let mut given_back = false;
        self.context.give_back(|current| {
            self.registered.unregister(current)?;
            given_back = true;
            Ok(())
        });
        if !given_back {
            self.registered.abandon();
        }
    }
}

/// Host memory that the device reaches.
impl Current<'_> {
    /// Lets the device reach pages of the host.
    ///
    /// # Safety
    /// They are mapped, and stay so until they are unregistered or the process ends.
    pub(super) unsafe fn register(self, pages: *mut u8, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the caller's own promise.
        let status = unsafe {
            (self.functions().mem_host_register)(pages.cast(), bytes, sys::MEMHOSTREGISTER_MAPPED)
        };
        self.check("cuMemHostRegister", status)
    }

    pub(super) fn unregister(self, pages: *mut u8) -> Result<(), DriverError> {
        // SAFETY: what is not registered is an error of the driver's.
        let status = unsafe { (self.functions().mem_host_unregister)(pages.cast()) };
        self.check("cuMemHostUnregister", status)
    }

    /// Where the device finds the first byte of registered pages.
    pub(super) fn device_address(self, pages: *mut u8) -> Result<DevicePointer, DriverError> {
        let mut start: DevicePointer = 0;
        // SAFETY: the driver writes one address; memory that is not registered is an error of its.
        let status = unsafe {
            (self.functions().mem_host_get_device_pointer)(&raw mut start, pages.cast(), 0)
        };
        self.check("cuMemHostGetDevicePointer", status)?;
        Ok(start)
    }
}
