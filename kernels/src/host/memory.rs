//! Host memory: sealed memory files of workers, and scratch of the same kind.

use std::error::Error as _;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::{Mapping, MemoryError, SealedMemory};
use statecopy_proto::{HandleKind, Refusal, RefusalCode};

use crate::device::{AllocationId, Announced, Import, Piece, PieceHandle, Region};
use crate::sync::Ordering;

/// A sealed memory file, mapped whole. It stays mapped until the last holder lets go.
#[derive(Debug)]
pub struct HostRegion {
    mapping: Mapping,
    allocation: AllocationId,
}

impl HostRegion {
    /// Maps what a worker offers. The descriptor is closed either way: the mapping lives without it.
    fn import(descriptor: OwnedFd, bytes: u64) -> Result<Self, Refusal> {
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

/// The one memory file of a region, until it came.
#[derive(Debug)]
pub struct HostImport {
    bytes: u64,
    region: Option<HostRegion>,
}

impl HostImport {
    pub(super) fn begin(announced: Announced) -> Result<Self, Refusal> {
        let Announced { kind, bytes, pieces } = announced;
        if kind != HandleKind::Memfd {
            let sentence =
                format!("The host device takes memory by memfd, not by {}", kind.label());
            return Err(Refusal::new(RefusalCode::HandleUnsupported, sentence).about("kind"));
        }
        if pieces != 1 {
            return Err(invalid(format!("A memfd is one descriptor, not {pieces}")));
        }
        Ok(Self { bytes, region: None })
    }
}

impl Import for HostImport {
    type Region = HostRegion;

    fn add(&mut self, piece: Piece) -> Result<(), Refusal> {
        let PieceHandle::Descriptor(descriptor) = piece.handle else {
            return Err(invalid("A memfd travels by descriptor, not by value".to_owned()));
        };
        if self.region.is_some() || piece.bytes != self.bytes {
            return Err(invalid("A memfd is one piece, as large as its region".to_owned()));
        }
        self.region = Some(HostRegion::import(descriptor, piece.bytes)?);
        Ok(())
    }

    fn finish(self) -> Result<HostRegion, Refusal> {
        self.region.ok_or_else(|| invalid("The region's descriptor did not come".to_owned()))
    }
}

fn invalid(sentence: String) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, sentence).about("descriptors")
}

impl Region for HostRegion {
    fn bytes(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn allocation(&self) -> AllocationId {
        self.allocation
    }
}

/// Words of shared memory.
#[derive(Debug)]
pub struct HostWords {
    mapping: Arc<Mapping>,
    range: Range<u64>,
}

impl HostWords {
    pub(super) fn new(mapping: Arc<Mapping>, range: Range<u64>) -> Self {
        Self { mapping, range }
    }

    /// Writes a word, after everything that this thread and its helpers wrote.
    pub(super) fn write(&self, offset: u64, value: u64) {
        let inside = self.range.start <= offset && offset < self.range.end;
        let word = self.mapping.atomic_u64(offset).ok().filter(|_| inside);
        // SYNC: with whoever waits for the word, in whatever process.
        word.expect("a signal is a word that is shared").store(value, Ordering::Release);
    }
}

/// The error with its source, as one sentence.
fn sentence(error: &MemoryError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
