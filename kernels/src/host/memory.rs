//! Host memory: sealed memory files of workers, and scratch of the same kind.

use std::error::Error as _;
use std::os::fd::OwnedFd;

use statecopy_descriptors::{Mapping, MemoryError, SealedMemory};
use statecopy_proto::{Refusal, RefusalCode};

use crate::device::{AllocationId, Region};

/// A sealed memory file, mapped whole. It stays mapped until the last holder lets go.
#[derive(Debug)]
pub struct HostRegion {
    mapping: Mapping,
    allocation: AllocationId,
}

impl HostRegion {
    /// Maps what a worker offers. The descriptor is closed either way: the mapping lives without it.
    pub(super) fn import(descriptor: OwnedFd, bytes: u64) -> Result<Self, Refusal> {
        let refused = |error: MemoryError| {
            let code = match error {
                MemoryError::HugePages { .. } => RefusalCode::HandleUnsupported,
                _ => RefusalCode::HandleInvalid,
            };
            Refusal::new(code, sentence(&error))
        };
        let memory = SealedMemory::adopt(descriptor, bytes).map_err(refused)?;
        Self::of(&memory).map_err(refused)
    }

    /// Scratch of that many bytes, all zero.
    pub(super) fn scratch(bytes: u64) -> Result<Self, Refusal> {
        SealedMemory::create("statecopy-scratch", bytes)
            .and_then(|memory| Self::of(&memory))
            .map_err(|error| Refusal::new(RefusalCode::PrepareFailed, sentence(&error)))
    }

    fn of(memory: &SealedMemory) -> Result<Self, MemoryError> {
        let id = memory.allocation();
        Ok(Self { mapping: memory.map()?, allocation: AllocationId(id.dev, id.ino) })
    }

    /// The memory as this process sees it, to fill and inspect it.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Region for HostRegion {
    fn bytes(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn allocation(&self) -> AllocationId {
        self.allocation
    }
}

/// The error with its source, as one sentence.
fn sentence(error: &MemoryError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
