//! Device memory of a native worker, allocated so that it can be shared.

use std::sync::Arc;

use super::context::Context;
use super::driver::DriverError;
use super::memory::DeviceMemory;
use super::memory_calls::{AddressRange, Shareable};
use super::pieces::{MemoryHandle, PieceMapping};

/// How a worker's memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocator {
    /// As `cudaMalloc` does: one allocation, shared by a legacy handle.
    Default,
    /// Virtual memory in pieces of that many bytes (0: as small as they can be), as PyTorch's expandable segments.
    Virtual {
        /// Bytes of a piece, rounded up to what the device has.
        piece_bytes: u64,
        /// Whether pieces can be shared, by descriptor.
        shared: bool,
    },
    /// As `cudaMallocAsync` does: of the device's stream-ordered pool, which cannot be shared.
    Pool,
}

/// Device memory of this process. Its start is a multiple of 256.
#[derive(Debug)]
pub struct CudaMemory {
    context: Arc<Context>,
    bytes: u64,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    Default(DeviceMemory),
    Virtual(PieceMapping),
    Pool(PoolMemory),
}

/// Memory of the stream-ordered pool.
#[derive(Debug)]
struct PoolMemory {
    context: Arc<Context>,
    start: u64,
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        self.context.give_back(|current| current.free_to_pool(self.start));
    }
}

impl CudaMemory {
    pub(super) fn allocate(
        context: Arc<Context>,
        bytes: u64,
        allocator: Allocator,
    ) -> Result<Self, DriverError> {
        let backing = match allocator {
            Allocator::Default => Backing::Default(DeviceMemory::uninitialised(&context, bytes)?),
            Allocator::Virtual { piece_bytes, shared } => {
                let how = shared.then_some(Shareable::Descriptor);
                Backing::Virtual(fill(&context, bytes, piece_bytes, how)?)
            }
            Allocator::Pool => {
                let start = context.enter()?.allocate_from_pool(bytes)?;
                Backing::Pool(PoolMemory { context: Arc::clone(&context), start })
            }
        };
        Ok(Self { context, bytes, backing })
    }

    /// Where it begins, for the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.range().start
    }

    /// How many bytes were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn range(&self) -> AddressRange {
        let start = match &self.backing {
            Backing::Default(memory) => memory.range().start,
            Backing::Virtual(pieces) => pieces.range().start,
            Backing::Pool(memory) => memory.start,
        };
        AddressRange { start, bytes: self.bytes }
    }

    /// Makes all of it zero.
    ///
    /// # Errors
    /// What the driver says.
    pub fn clear(&self) -> Result<(), DriverError> {
        // SAFETY: the range is mapped as long as `self` lives.
        unsafe { self.context.enter()?.clear(self.range()) }
    }

    /// Fills a part of it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the part is not of this memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let to = self.range().part(offset, bytes.len());
        // SAFETY: the part is mapped as long as `self` lives.
        unsafe { self.context.enter()?.write(to, bytes) }
    }

    /// Reads a part of it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the part is not of this memory.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DriverError> {
        let from = self.range().part(offset, into.len());
        // SAFETY: the part is mapped as long as `self` lives.
        unsafe { self.context.enter()?.read(from, into) }
    }
}

/// Virtual memory that holds so many bytes.
fn fill(
    context: &Arc<Context>,
    bytes: u64,
    piece_bytes: u64,
    how: Option<Shareable>,
) -> Result<PieceMapping, DriverError> {
    let granularity = PieceMapping::granularity(context)?;
    let piece_bytes = piece_bytes.max(1).next_multiple_of(granularity);
    let mut mapping = PieceMapping::reserve(context, bytes.max(1).next_multiple_of(granularity))?;
    while mapping.left() > 0 {
        let piece = piece_bytes.min(mapping.left());
        mapping.map(piece, &MemoryHandle::create(context, piece, how)?)?;
    }
    mapping.open_access()?;
    Ok(mapping)
}
