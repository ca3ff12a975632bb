//! Virtual memory: pieces side by side in a reserved range of addresses.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::context::Context;
use super::driver::DriverError;
use super::memory_calls::{AddressRange, Shareable};
use super::sys::{AllocationHandle, FabricHandle};

/// A handle of the driver's for memory without an address. The memory lives on where it is mapped.
#[derive(Debug)]
pub(super) struct MemoryHandle<'a> {
    context: &'a Context,
    handle: AllocationHandle,
}

impl<'a> MemoryHandle<'a> {
    /// Memory of another process, by a descriptor that is needed no more afterwards.
    pub(super) fn from_descriptor(
        context: &'a Context,
        descriptor: BorrowedFd<'_>,
    ) -> Result<Self, DriverError> {
        let handle = context.enter()?.import_descriptor(descriptor)?;
        Ok(Self { context, handle })
    }

    /// Memory of another process, perhaps on another machine of the fabric.
    pub(super) fn from_fabric(
        context: &'a Context,
        shared: FabricHandle,
    ) -> Result<Self, DriverError> {
        let handle = context.enter()?.import_fabric(shared)?;
        Ok(Self { context, handle })
    }

    /// New memory of this device.
    pub(super) fn create(
        context: &'a Context,
        bytes: u64,
        how: Option<Shareable>,
    ) -> Result<Self, DriverError> {
        let handle = context.enter()?.create(bytes, how)?;
        Ok(Self { context, handle })
    }

    /// Whether it is memory of this device.
    pub(super) fn is_of_this_device(&self) -> Result<bool, DriverError> {
        self.context.enter()?.is_of_this_device(self.handle)
    }
}

impl Drop for MemoryHandle<'_> {
    fn drop(&mut self) {
        self.context.give_back(|current| current.release(self.handle));
    }
}

/// Reserved addresses, filled with pieces from the start on.
#[derive(Debug)]
pub(super) struct PieceMapping {
    context: Arc<Context>,
    reserved: AddressRange,
    mapped: Vec<AddressRange>,
}

impl PieceMapping {
    /// What sizes of pieces are multiples of.
    pub(super) fn granularity(context: &Context) -> Result<u64, DriverError> {
        context.enter()?.granularity()
    }

    /// Reserves addresses for that many bytes, a multiple of the granularity.
    pub(super) fn reserve(context: &Arc<Context>, bytes: u64) -> Result<Self, DriverError> {
        let alignment = Self::granularity(context)?;
        let start = context.enter()?.reserve(bytes, alignment)?;
        let reserved = AddressRange { start, bytes };
        Ok(Self { context: Arc::clone(context), reserved, mapped: Vec::new() })
    }

    /// The whole range.
    pub(super) fn range(&self) -> AddressRange {
        self.reserved
    }

    /// How many pieces are mapped.
    pub(super) fn pieces(&self) -> usize {
        self.mapped.len()
    }

    /// Bytes that have no piece yet.
    pub(super) fn left(&self) -> u64 {
        self.reserved.end() - self.next_address()
    }

    fn next_address(&self) -> u64 {
        self.mapped.last().map_or(self.reserved.start, |last| last.end())
    }

    /// Maps the first `bytes` bytes of memory behind the pieces before it.
    pub(super) fn map(&mut self, bytes: u64, memory: &MemoryHandle<'_>) -> Result<(), DriverError> {
        let range = AddressRange { start: self.next_address(), bytes };
        self.context.enter()?.map(range, memory.handle)?;
        self.mapped.push(range);
        Ok(())
    }

    /// Lets the device read and write all of it, once it is full.
    pub(super) fn open_access(&self) -> Result<(), DriverError> {
        self.context.enter()?.allow_access(self.reserved)
    }
}

impl Drop for PieceMapping {
    fn drop(&mut self) {
        for range in self.mapped.iter().rev() {
            self.context.give_back(|current| current.unmap(*range));
        }
        self.context.give_back(|current| current.unreserve(self.reserved));
    }
}
