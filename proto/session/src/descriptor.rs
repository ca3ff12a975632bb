//! One copy: as 128 bytes of shared memory, and parsed.

use std::mem::offset_of;
use std::ops::Range;

use statecopy_proto::{BindingId, Direction, IndexWidth, Lane, RegionId, SessionId, SignatureHash};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use crate::clock::MonotonicNs;
use crate::fault::{Fault, Subject};
use crate::layout::{DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, INLINE_ALIGNMENT};
use crate::ring::Sequence;

const GATHER: u8 = 1;
const SCATTER: u8 = 2;
const SOURCE_NONE: u8 = 0;
const SOURCE_INLINE: u8 = 1;
const SOURCE_SHARED: u8 = 2;
/// The answer says that the bytes are there.
const HOST_COMPLETED: u8 = 1;
/// A word that a stream writes says it: in a lane, and in a slot of a graph.
const STREAM_ORDERED: u8 = 2;

/// A descriptor as it lies in the ring. Every bit pattern is one; [`CopyDescriptor::parse`] tells the sensible ones.
///
/// It fills two cache lines of x86, which are fetched as a pair: what the executor reads of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CopyDescriptor {
    /// The request's sequence: what the ring checks.
    pub sequence: u64,
    /// A binding or a binding set.
    pub binding: u64,
    /// The hash of the layout signature that the worker believes in.
    pub signature: u64,
    /// How many rows.
    pub selected: u64,
    /// Region of the packed buffer.
    pub packed_region: u64,
    /// Its offset there, in bytes.
    pub packed_offset: u64,
    /// Its size in bytes.
    pub packed_bytes: u64,
    /// Number of the packed buffer's dtype ([`statecopy_proto::DataType`]).
    pub packed_dtype: u32,
    /// 1 gather, 2 scatter.
    pub direction: u8,
    /// 1 inline, 2 shared.
    pub index_source: u8,
    /// Bytes of one index: 4 or 8.
    pub index_width: u8,
    /// 0 none, 1 inline, 2 shared.
    pub flag_source: u8,
    /// When the copy must have started. On the supervisor's ring a point of CLOCK_MONOTONIC in nanoseconds; on a worker's ring
    /// nanoseconds from the moment the executor takes it.
    pub deadline_ns: u64,
    /// Region of shared indices; 0 when they are inline.
    pub index_region: u64,
    /// Their offset there, in bytes; 0 when they are inline.
    pub index_offset: u64,
    /// Region of shared flags; 0 when they are inline or absent.
    pub flag_region: u64,
    /// Their offset there, in bytes; 0 when they are inline or absent.
    pub flag_offset: u64,
    /// On whose behalf. Honoured on the supervisor's own ring only; any other ring belongs to one session.
    pub session: u64,
    /// When it was submitted, by the submitter's CLOCK_MONOTONIC, in nanoseconds. For measurements only.
    pub submitted_at_ns: u64,
    /// The lane.
    pub lane: u32,
    /// 1: the answer says that the bytes are there. 2: a word that a stream writes; then `deadline_ns` counts from the bell.
    pub completion: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

const _: () = assert!(size_of::<CopyDescriptor>() == DESCRIPTOR_BYTES as usize);
const _: () = assert!(offset_of!(CopyDescriptor, sequence) == 0);
const _: () = assert!(offset_of!(CopyDescriptor, packed_region) == 32);
const _: () = assert!(offset_of!(CopyDescriptor, packed_dtype) == 56);
const _: () = assert!(offset_of!(CopyDescriptor, deadline_ns) == 64);
const _: () = assert!(offset_of!(CopyDescriptor, session) == 104);
const _: () = assert!(offset_of!(CopyDescriptor, lane) == 120);
const _: () = assert!(offset_of!(CopyDescriptor, completion) == 124);
const _: () = assert!(offset_of!(CopyDescriptor, reserved) == 125);

/// A range of a registered region, for the packed buffer, and what the caller believes lies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// The region.
    pub region: RegionId,
    /// First byte in it.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Number of the dtype, as it came: 0 or a number that this version does not know are the executor's to refuse.
    pub dtype: u32,
}

/// Where the indices are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexSource {
    /// At the start of the slot's inline space.
    Inline,
    /// In a registered region.
    Shared {
        /// The region.
        region: RegionId,
        /// First byte in it.
        offset: u64,
    },
}

/// The indices: `selected` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indices {
    /// How wide each is.
    pub width: IndexWidth,
    /// Where they are.
    pub source: IndexSource,
}

/// Where the initial-state flags are: `selected` of them, one byte each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagSource {
    /// There are none: every valid row.
    None,
    /// In the slot's inline space, behind the indices if those are inline, at the next multiple of 16.
    Inline,
    /// In a registered region.
    Shared {
        /// The region.
        region: RegionId,
        /// First byte in it.
        offset: u64,
    },
}

/// One copy, parsed. Its parts have the right form; whether they exist, fit and may be used is still to be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRequest {
    /// On whose behalf. Honoured on the supervisor's own ring only.
    pub session: SessionId,
    /// A binding or a binding set.
    pub binding: BindingId,
    /// The hash of the layout signature that the worker believes in.
    pub signature: SignatureHash,
    /// Which way.
    pub direction: Direction,
    /// How many rows.
    pub selected: u64,
    /// The packed buffer.
    pub packed: Packed,
    /// The indices.
    pub indices: Indices,
    /// The flags.
    pub flags: FlagSource,
    /// The lane.
    pub lane: Lane,
    /// When the copy must have started (the supervisor's ring). On a worker's ring the number is a duration from the moment
    /// the executor takes it, because a worker need not share the clock.
    pub deadline: MonotonicNs,
    /// When it was submitted. For measurements only.
    pub submitted_at: MonotonicNs,
}

/// Where a request's indices and flags lie in its slot's inline space, in bytes from its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InlineRanges {
    /// The indices, if they are inline.
    pub indices: Option<Range<u64>>,
    /// The flags, if they are inline.
    pub flags: Option<Range<u64>>,
}

impl CopyDescriptor {
    /// A request as it lies in a lane, or in a slot of a graph. `patience_ns` is how long it may wait for its start after the bell.
    #[must_use]
    pub fn encode_ordered(sequence: Sequence, request: &CopyRequest, patience_ns: u64) -> Self {
        let host_completed = Self::encode(sequence, request);
        Self { completion: STREAM_ORDERED, deadline_ns: patience_ns, ..host_completed }
    }

    /// A request as it lies in the ring.
    #[must_use]
    pub fn encode(sequence: Sequence, request: &CopyRequest) -> Self {
        let (index_source, index_region, index_offset) = match request.indices.source {
            IndexSource::Inline => (SOURCE_INLINE, 0, 0),
            IndexSource::Shared { region, offset } => (SOURCE_SHARED, region.0, offset),
        };
        let (flag_source, flag_region, flag_offset) = match request.flags {
            FlagSource::None => (SOURCE_NONE, 0, 0),
            FlagSource::Inline => (SOURCE_INLINE, 0, 0),
            FlagSource::Shared { region, offset } => (SOURCE_SHARED, region.0, offset),
        };
        Self {
            sequence: sequence.get(),
            session: request.session.0,
            binding: request.binding.0,
            signature: request.signature.0,
            selected: request.selected,
            packed_region: request.packed.region.0,
            packed_offset: request.packed.offset,
            packed_bytes: request.packed.bytes,
            index_region,
            index_offset,
            flag_region,
            flag_offset,
            deadline_ns: request.deadline.0,
            submitted_at_ns: request.submitted_at.0,
            packed_dtype: request.packed.dtype,
            direction: match request.direction {
                Direction::Gather => GATHER,
                Direction::Scatter => SCATTER,
            },
            lane: request.lane.0,
            index_source,
            index_width: match request.indices.width {
                IndexWidth::Int32 => 4,
                IndexWidth::Int64 => 8,
            },
            flag_source,
            completion: HOST_COMPLETED,
            reserved: [0; 3],
        }
    }

    /// The request, if every field has a form that this version knows. Regions and offsets of inline and absent parts are
    /// not looked at.
    ///
    /// # Errors
    /// A [`Fault`] about the first field that has not.
    pub fn parse(&self) -> Result<CopyRequest, Fault> {
        self.parse_as(HOST_COMPLETED)
    }

    /// The same of a stream-ordered request, which never has a deadline here: it counts from the bell, by [`Self::deadline_ns`].
    ///
    /// # Errors
    /// As [`CopyDescriptor::parse`]; also for inline indices or flags, since a lane has no room for any.
    pub fn parse_ordered(&self) -> Result<CopyRequest, Fault> {
        if self.index_source == SOURCE_INLINE || self.flag_source == SOURCE_INLINE {
            return Err(Subject::Inline.fault(0, 0));
        }
        let request = self.parse_as(STREAM_ORDERED)?;
        Ok(CopyRequest { deadline: MonotonicNs::NEVER, ..request })
    }

    fn parse_as(&self, completion: u8) -> Result<CopyRequest, Fault> {
        self.check_reserved(completion)?;
        let direction = match self.direction {
            GATHER => Direction::Gather,
            SCATTER => Direction::Scatter,
            number => return Err(Subject::Direction.fault(number.into(), 0)),
        };
        let width = match self.index_width {
            4 => IndexWidth::Int32,
            8 => IndexWidth::Int64,
            bytes => return Err(Subject::IndexWidth.fault(bytes.into(), 0)),
        };
        let source = match self.index_source {
            SOURCE_INLINE => IndexSource::Inline,
            SOURCE_SHARED => IndexSource::Shared {
                region: RegionId(self.index_region),
                offset: self.index_offset,
            },
            number => return Err(Subject::IndexSource.fault(number.into(), 0)),
        };
        let flags = match self.flag_source {
            SOURCE_NONE => FlagSource::None,
            SOURCE_INLINE => FlagSource::Inline,
            SOURCE_SHARED => {
                FlagSource::Shared { region: RegionId(self.flag_region), offset: self.flag_offset }
            }
            number => return Err(Subject::FlagSource.fault(number.into(), 0)),
        };
        Ok(CopyRequest {
            session: SessionId(self.session),
            binding: BindingId(self.binding),
            signature: SignatureHash(self.signature),
            direction,
            selected: self.selected,
            packed: Packed {
                region: RegionId(self.packed_region),
                offset: self.packed_offset,
                bytes: self.packed_bytes,
                dtype: self.packed_dtype,
            },
            indices: Indices { width, source },
            flags,
            lane: Lane(self.lane),
            deadline: MonotonicNs(self.deadline_ns),
            submitted_at: MonotonicNs(self.submitted_at_ns),
        })
    }

    fn check_reserved(&self, completion: u8) -> Result<(), Fault> {
        if self.completion != completion {
            let at = offset_of!(Self, completion) as u64;
            return Err(Subject::Descriptor.fault(at, self.completion.into()));
        }
        let first = offset_of!(Self, reserved) as u64;
        for (at, byte) in (first..).zip(self.reserved) {
            if byte != 0 {
                return Err(Subject::Descriptor.fault(at, byte.into()));
            }
        }
        Ok(())
    }

    /// The descriptor as the ring moves it.
    #[must_use]
    pub fn to_words(self) -> [u64; DESCRIPTOR_WORDS] {
        transmute!(self)
    }

    /// The descriptor that the ring moved.
    #[must_use]
    pub fn from_words(words: [u64; DESCRIPTOR_WORDS]) -> Self {
        transmute!(words)
    }
}

impl CopyRequest {
    /// Where inline indices and flags lie, if they fit in a slot's `inline_bytes`. Both sides ask this one function.
    ///
    /// # Errors
    /// A [`Fault`] about the range that does not fit, whatever `selected` is.
    pub fn inline_ranges(&self, inline_bytes: u32) -> Result<InlineRanges, Fault> {
        let limit = u64::from(inline_bytes);
        let fit = |subject: Subject, start: u64, bytes: Option<u64>| {
            let end = bytes.and_then(|bytes| start.checked_add(bytes)).unwrap_or(u64::MAX);
            if end > limit { Err(subject.fault(end, limit)) } else { Ok(start..end) }
        };
        let indices = match self.indices.source {
            IndexSource::Inline => {
                let bytes = self.selected.checked_mul(self.indices.width.bytes());
                Some(fit(Subject::IndexRange, 0, bytes)?)
            }
            IndexSource::Shared { .. } => None,
        };
        let flags = match self.flags {
            FlagSource::Inline => {
                // The end of the indices is at most `inline_bytes`, so that rounding it up stays in a u64.
                let start = indices
                    .as_ref()
                    .map_or(0, |indices| indices.end.next_multiple_of(INLINE_ALIGNMENT));
                Some(fit(Subject::FlagRange, start, Some(self.selected))?)
            }
            FlagSource::None | FlagSource::Shared { .. } => None,
        };
        Ok(InlineRanges { indices, flags })
    }
}

#[cfg(test)]
mod tests;
