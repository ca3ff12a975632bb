//! Registered memory, and places in it.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::device_memory::DeviceMemory;
use crate::memory::Memory;

/// What a region is for. It decides which pages the client populates, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Use {
    /// State caches: the pages that payloads touch are populated when layers are registered; gaps stay holes.
    Cache,
    /// Packed buffers, indices and flags: populated whole when the region is registered.
    Packed,
}

/// A registered region. It stays valid over restarts of the daemon: the client registers it again.
///
/// Clones name the same region; [`Client::release_region`](crate::Client::release_region) gives it back.
#[derive(Clone)]
pub struct Region {
    pub(crate) record: Arc<RegionRecord>,
}

/// All that is needed to register a region again.
#[derive(Debug)]
pub(crate) struct RegionRecord {
    pub(crate) key: RegionKey,
    pub(crate) bytes: u64,
    pub(crate) source: Source,
}

/// Names a region within its client, over all lives of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RegionKey(pub(crate) u64);

/// The memory behind a region.
#[derive(Debug)]
pub(crate) enum Source {
    Memory(Memory),
    Descriptor(OwnedFd),
    /// Of a device: shared anew each time it is registered, so that no handle is kept.
    Device(DeviceMemory),
}

impl RegionRecord {
    /// Whether the memory is known not to be there any more.
    pub(crate) fn is_gone(&self) -> bool {
        match &self.source {
            Source::Memory(_) | Source::Descriptor(_) => false,
            Source::Device(memory) => !memory.is_unchanged(memory.start(), memory.bytes()),
        }
    }
}

impl Source {
    /// The memory file, where it is one.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Memory(memory) => Some(memory.as_fd()),
            Self::Descriptor(descriptor) => Some(descriptor.as_fd()),
            Self::Device(_) => None,
        }
    }
}

impl Region {
    /// How many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.record.bytes
    }

    /// A place in it, `offset` bytes from its start.
    #[must_use]
    pub fn at(&self, offset: u64) -> Slice {
        Slice { region: self.clone(), offset }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("key", &self.record.key.0)
            .field("bytes", &self.record.bytes)
            .finish()
    }
}

/// A place in a region: where a packed buffer, indices or flags begin. Copies need a multiple of 16.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The region.
    pub region: Region,
    /// Where it begins, in bytes from the region's start.
    pub offset: u64,
}
