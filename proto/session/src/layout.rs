//! Where everything lies in the session memory. `docs/session-memory.md` tells the same to people.
//!
//! ```text
//! 0        header                       4,096 B   written once by the daemon
//! 4,096    the submitter's words        4,096 B   one 128-byte line each
//! 8,192    the executor's words         4,096 B   one 128-byte line each
//! 12,288   timeline words              16,384 B   64 lanes x {bell, done}, one 128-byte line each (reserved)
//! 28,672   completion slots     slots x 128 B     written by the executor
//!          descriptor slots     slots x 128 B     written by the submitter
//!          inline space         slots x inline_bytes, written by the submitter
//!          pairs                512 x 4 lines of 128 B, from here on only where there are lanes
//!          lane states          64 lanes x lane_slots x 64 B, written by the executor
//!          lane descriptors     64 lanes x lane_slots x 128 B, written by the submitter
//! ```
//!
//! Every area starts at a multiple of 4,096. Words that are written by different sides, or apart from each other, never share
//! a line of 128 bytes: that is two cache lines of x86, which fetches them in pairs, and one of the larger ARM server cores.
//! All numbers are in the byte order of the machine: both sides run on one.

use std::num::NonZeroU16;
use std::ops::Range;

use statecopy_proto::{Incarnation, SessionId};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::clock::MonotonicNs;
use crate::ring::Sequence;

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"scsessio";
/// Version of everything in this module and in [`crate::CopyDescriptor`]. Another version is another layout.
pub const ABI_VERSION: u32 = 3;
/// The version of a memory without lanes, which is all that earlier peers know.
pub const ABI_VERSION_WITHOUT_LANES: u32 = 2;

/// Bytes of the header.
pub const HEADER_BYTES: u32 = 128;
/// Alignment of an area.
pub const AREA_BYTES: u64 = 4096;
/// Bytes between two words that are written apart from each other.
pub const LINE_BYTES: u32 = 128;
/// Bytes of a descriptor slot.
pub const DESCRIPTOR_BYTES: u32 = 128;
/// Bytes of a completion slot.
pub const COMPLETION_BYTES: u32 = 128;
/// Lanes of stream-ordered requests.
pub const LANES: u32 = 64;
/// Pairs of a bell word and a done word: the first [`LANES`] are the lanes', the others are for captured graphs.
pub const PAIRS: u32 = 512;
/// Bytes of a pair: a line each for `bell`, `done`, `submitted` and `failure`.
pub const PAIR_BYTES: u32 = 4 * LINE_BYTES;
/// Bytes of a lane's slot in the executor's area: state and answer in one cache line of 64 bytes.
pub const LANE_STATE_BYTES: u32 = 64;
/// Most slots of a lane.
pub const LANE_SLOTS_MAX: u32 = 4096;
/// Bytes of the second header, which a memory with lanes has at [`HEADER_BYTES`].
pub const LANE_HEADER_BYTES: u32 = 64;
/// Most slots of a ring.
pub const SLOTS_MAX: u32 = 1024;
/// Most bytes of inline space for each slot: 64 MiB.
pub const INLINE_BYTES_MAX: u32 = 64 << 20;

/// `submitted`, u64: how many requests were ever published.
pub const SUBMITTED: u64 = AREA_BYTES;
/// `submitter_sleeping`, u32: how many threads of the submitter want to be woken at every answer.
pub const SUBMITTER_SLEEPING: u64 = SUBMITTED + LINE_BYTES as u64;
/// `lanes_fresh`, u64: a bit for each lane with a request that the executor has not taken. Set by the submitter, taken by the
/// executor.
pub const LANES_FRESH: u64 = SUBMITTER_SLEEPING + LINE_BYTES as u64;
/// `executor_sleeping`, u32: not zero while the executor wants its doorbell rung.
pub const EXECUTOR_SLEEPING: u64 = 2 * AREA_BYTES;
/// `wake`, u32: the futex on which a worker's threads sleep. It is raised, then woken, at an answer while somebody sleeps. On
/// the supervisor's own ring, whose submitter sleeps on a doorbell, it stays zero.
pub const WAKE: u64 = EXECUTOR_SLEEPING + LINE_BYTES as u64;
/// `pairs_failed`, u64: how many lanes and pairs were failed so far. One load tells whether anything went wrong.
pub const PAIRS_FAILED: u64 = WAKE + LINE_BYTES as u64;
/// The timeline words, for each lane a line with `bell` (u64, the submitter's) and a line with `done` (u64, the executor's).
/// Reserved: zero.
pub const TIMELINE: u64 = 3 * AREA_BYTES;
/// The completion slots.
pub const COMPLETIONS: u64 = TIMELINE + LANES as u64 * 2 * LINE_BYTES as u64;

/// `state`, u64, in a completion slot: `sequence << 2 | phase`, where phase is 1 accepted, 2 answered, 3 accepted again by an
/// executor that took over from a dead one; 0 before the first. State and answer lie in one cache line of 64 bytes.
pub const COMPLETION_STATE: u64 = 0;
/// The answer in a completion slot, [`ANSWER_WORDS`] words of u64.
pub const COMPLETION_ANSWER: u64 = 8;
/// Words of an answer: outcome, two numbers, the executor's nanoseconds.
pub const ANSWER_WORDS: usize = 4;
/// Words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 16;

const _: () = assert!(COMPLETIONS == 28_672 && COMPLETIONS.is_multiple_of(AREA_BYTES));
const _: () = assert!(LANES_FRESH + LINE_BYTES as u64 <= EXECUTOR_SLEEPING);
const _: () = assert!(PAIRS_FAILED + LINE_BYTES as u64 <= TIMELINE);
const _: () = assert!(8 + 8 * ANSWER_WORDS <= LANE_STATE_BYTES as usize);
const _: () = assert!(COMPLETION_ANSWER + 8 * ANSWER_WORDS as u64 <= 64);
const _: () = assert!(DESCRIPTOR_WORDS * 8 == DESCRIPTOR_BYTES as usize);

/// Whose memory it is. The daemon writes it; a worker that finds another one has been sent the wrong memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The daemon's life.
    pub incarnation: Incarnation,
    /// The session; 0 for the supervisor's own ring.
    pub session: SessionId,
}

/// Sizes that are not a session memory's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Slots.
    #[error("A ring has a power of two of slots, at most {SLOTS_MAX}, not {0}")]
    Slots(u32),
    /// Inline space.
    #[error(
        "The inline space of a slot is a multiple of {AREA_BYTES} bytes, at most {INLINE_BYTES_MAX}, not {0}"
    )]
    InlineBytes(u32),
    /// Lane slots.
    #[error(
        "A lane has a power of two of slots, at most {LANE_SLOTS_MAX}, or there are none, not {0}"
    )]
    LaneSlots(u32),
}

/// A lane of a session: the place of its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneNumber(u32);

impl LaneNumber {
    /// The lane of that number, if there is one.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (number < LANES).then_some(Self(number))
    }

    /// Every lane.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..LANES).map(Self)
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }

    /// Its pair of words.
    #[must_use]
    pub fn pair(self) -> PairNumber {
        PairNumber(self.0)
    }
}

/// A pair of a session: a lane's, or one for a captured graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PairNumber(u32);

impl PairNumber {
    /// The graph pair of that number, if it is one.
    #[must_use]
    pub fn of_graph(number: u32) -> Option<Self> {
        (LANES..PAIRS).contains(&number).then_some(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A slot of a graph pair: one copy that the graph replays. What it rings with, so never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(NonZeroU16);

impl SlotNumber {
    /// The last one.
    pub const MAX: Self = Self(NonZeroU16::MAX);

    /// The slot of that number, if there is one: 1 to 65,535.
    #[must_use]
    pub fn new(number: u64) -> Option<Self> {
        u16::try_from(number).ok().and_then(NonZeroU16::new).map(Self)
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get().into()
    }

    /// The sequence in the descriptor of its copy: the same number.
    #[must_use]
    pub fn sequence(self) -> Sequence {
        Sequence::of(self.get())
    }
}

/// The sizes that a session memory is made with. Valid by construction; all offsets follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    slots: u32,
    inline_bytes: u32,
    lane_slots: u32,
}

impl Parameters {
    /// `slots` requests at once, a power of two up to [`SLOTS_MAX`]; for each `inline_bytes` bytes of indices and flags, a
    /// multiple of 4,096 that may be 0.
    ///
    /// # Errors
    /// [`LayoutError`], naming the size.
    pub fn new(slots: u32, inline_bytes: u32) -> Result<Self, LayoutError> {
        if !slots.is_power_of_two() || slots > SLOTS_MAX {
            return Err(LayoutError::Slots(slots));
        }
        let whole = u64::from(inline_bytes).is_multiple_of(AREA_BYTES);
        if !whole || inline_bytes > INLINE_BYTES_MAX {
            return Err(LayoutError::InlineBytes(inline_bytes));
        }
        Ok(Self { slots, inline_bytes, lane_slots: 0 })
    }

    /// Parameters whose inline space holds `rows_max` INT64 indices and their flags, if that is not more than
    /// [`INLINE_BYTES_MAX`].
    ///
    /// # Errors
    /// [`LayoutError`], naming the size.
    pub fn for_rows(slots: u32, rows_max: u32) -> Result<Self, LayoutError> {
        let bytes = (u64::from(rows_max) * 9 + INLINE_ALIGNMENT).next_multiple_of(AREA_BYTES);
        Self::new(slots, u32::try_from(bytes).unwrap_or(u32::MAX))
    }

    /// The same with lanes, of so many slots each: a power of two up to [`LANE_SLOTS_MAX`]; 0 for none.
    ///
    /// # Errors
    /// [`LayoutError::LaneSlots`].
    pub fn with_lanes(self, lane_slots: u32) -> Result<Self, LayoutError> {
        if lane_slots > LANE_SLOTS_MAX || lane_slots != 0 && !lane_slots.is_power_of_two() {
            return Err(LayoutError::LaneSlots(lane_slots));
        }
        Ok(Self { lane_slots, ..self })
    }

    /// Requests of a lane that may be accepted and not done; 0 where there are no lanes.
    #[must_use]
    pub fn lane_slots(self) -> u32 {
        self.lane_slots
    }

    /// The version of the layout.
    #[must_use]
    pub fn abi_version(self) -> u32 {
        if self.lane_slots == 0 { ABI_VERSION_WITHOUT_LANES } else { ABI_VERSION }
    }

    /// How many slots.
    #[must_use]
    pub fn slots(self) -> u32 {
        self.slots
    }

    /// Bytes of inline space for each slot.
    #[must_use]
    pub fn inline_bytes(self) -> u32 {
        self.inline_bytes
    }

    /// Where the descriptor slots start.
    #[must_use]
    pub fn descriptors(self) -> u64 {
        let completions = u64::from(self.slots) * u64::from(COMPLETION_BYTES);
        (COMPLETIONS + completions).next_multiple_of(AREA_BYTES)
    }

    /// Where the inline space starts.
    #[must_use]
    pub fn inline(self) -> u64 {
        let descriptors = u64::from(self.slots) * u64::from(DESCRIPTOR_BYTES);
        (self.descriptors() + descriptors).next_multiple_of(AREA_BYTES)
    }

    /// Size of the whole memory. At most 64 GiB and a little, so no sum here can overflow.
    #[must_use]
    pub fn total_bytes(self) -> u64 {
        if self.lane_slots == 0 {
            return self.pairs();
        }
        self.lane_descriptors() + self.lane_area(DESCRIPTOR_BYTES)
    }

    /// Where the pairs start: the end of the memory where there are no lanes.
    #[must_use]
    pub fn pairs(self) -> u64 {
        self.inline() + u64::from(self.slots) * u64::from(self.inline_bytes)
    }

    /// The words of all pairs: what streams wait for and write. Empty where there are no lanes.
    #[must_use]
    pub fn pair_words(self) -> Range<u64> {
        let pairs = if self.lane_slots == 0 { 0 } else { u64::from(PAIRS) * u64::from(PAIR_BYTES) };
        self.pairs()..self.pairs() + pairs
    }

    /// Where the lane states start.
    #[must_use]
    pub fn lane_states(self) -> u64 {
        self.pairs() + u64::from(PAIRS) * u64::from(PAIR_BYTES)
    }

    /// Where the lane descriptors start.
    #[must_use]
    pub fn lane_descriptors(self) -> u64 {
        (self.lane_states() + self.lane_area(LANE_STATE_BYTES)).next_multiple_of(AREA_BYTES)
    }

    /// Bytes of an area with so many bytes for each slot of each lane.
    fn lane_area(self, bytes: u32) -> u64 {
        u64::from(LANES) * u64::from(self.lane_slots) * u64::from(bytes)
    }

    /// Where a pair's `bell` lies: a u64, as its `done`, its `submitted` and its `failure` (an answer), one line behind the other.
    #[must_use]
    pub fn bell_at(self, pair: PairNumber) -> u64 {
        self.pairs() + u64::from(pair.0) * u64::from(PAIR_BYTES)
    }

    /// Where a pair's `done` lies.
    #[must_use]
    pub fn done_at(self, pair: PairNumber) -> u64 {
        self.bell_at(pair) + u64::from(LINE_BYTES)
    }

    pub(crate) fn lane_submitted_at(self, lane: LaneNumber) -> u64 {
        self.bell_at(lane.pair()) + 2 * u64::from(LINE_BYTES)
    }

    pub(crate) fn failure_at(self, pair: PairNumber) -> u64 {
        self.bell_at(pair) + 3 * u64::from(LINE_BYTES)
    }

    pub(crate) fn lane_state_at(self, lane: LaneNumber, slot: u64) -> u64 {
        self.lane_states() + self.lane_slot(lane, slot) * u64::from(LANE_STATE_BYTES)
    }

    pub(crate) fn lane_descriptor_at(self, lane: LaneNumber, slot: u64) -> u64 {
        self.lane_descriptors() + self.lane_slot(lane, slot) * u64::from(DESCRIPTOR_BYTES)
    }

    fn lane_slot(self, lane: LaneNumber, slot: u64) -> u64 {
        u64::from(lane.0) * u64::from(self.lane_slots) + slot
    }

    /// Where the completion slot starts.
    pub(crate) fn completion_at(self, slot: u64) -> u64 {
        COMPLETIONS + slot * u64::from(COMPLETION_BYTES)
    }

    /// Where the descriptor slot starts.
    pub(crate) fn descriptor_at(self, slot: u64) -> u64 {
        self.descriptors() + slot * u64::from(DESCRIPTOR_BYTES)
    }

    /// Where the slot's inline space starts.
    pub(crate) fn inline_at(self, slot: u64) -> u64 {
        self.inline() + slot * u64::from(self.inline_bytes)
    }
}

/// Indices start at 0 of a slot's inline space, flags at the next multiple of this.
pub const INLINE_ALIGNMENT: u64 = 16;

/// The header, at offset 0. The daemon writes it once and never reads it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`ABI_VERSION`].
    pub abi_version: u32,
    /// Bytes of this header.
    pub header_bytes: u32,
    /// Bytes of the whole memory.
    pub total_bytes: u64,
    /// How many slots.
    pub slots: u32,
    /// Bytes of inline space for each slot.
    pub inline_bytes: u32,
    /// [`DESCRIPTOR_BYTES`].
    pub descriptor_bytes: u32,
    /// [`COMPLETION_BYTES`].
    pub completion_bytes: u32,
    /// Where the submitter's words start.
    pub submitter_offset: u64,
    /// Where the executor's words start.
    pub executor_offset: u64,
    /// Where the timeline words start.
    pub timeline_offset: u64,
    /// Where the completion slots start.
    pub completions_offset: u64,
    /// Where the descriptor slots start.
    pub descriptors_offset: u64,
    /// Where the inline space starts.
    pub inline_offset: u64,
    /// [`LANES`].
    pub lanes: u32,
    /// [`LINE_BYTES`].
    pub line_bytes: u32,
    /// The session; 0 for the supervisor's own ring.
    pub session: u64,
    /// The daemon's life.
    pub incarnation: [u8; 16],
    /// The daemon's CLOCK_MONOTONIC when it made the memory, in nanoseconds.
    pub made_at_ns: u64,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES as usize);
const _: () = assert!(std::mem::offset_of!(Header, abi_version) == 8);
const _: () = assert!(std::mem::offset_of!(Header, total_bytes) == 16);
const _: () = assert!(std::mem::offset_of!(Header, slots) == 24);
const _: () = assert!(std::mem::offset_of!(Header, submitter_offset) == 40);
const _: () = assert!(std::mem::offset_of!(Header, inline_offset) == 80);
const _: () = assert!(std::mem::offset_of!(Header, session) == 96);
const _: () = assert!(std::mem::offset_of!(Header, incarnation) == 104);
const _: () = assert!(std::mem::offset_of!(Header, made_at_ns) == 120);

impl Header {
    /// The header of a memory with these parameters that was made then.
    #[must_use]
    pub fn new(parameters: Parameters, identity: Identity, made_at: MonotonicNs) -> Self {
        Self {
            magic: MAGIC,
            abi_version: parameters.abi_version(),
            header_bytes: HEADER_BYTES,
            total_bytes: parameters.total_bytes(),
            slots: parameters.slots,
            inline_bytes: parameters.inline_bytes,
            descriptor_bytes: DESCRIPTOR_BYTES,
            completion_bytes: COMPLETION_BYTES,
            submitter_offset: SUBMITTED,
            executor_offset: EXECUTOR_SLEEPING,
            timeline_offset: TIMELINE,
            completions_offset: COMPLETIONS,
            descriptors_offset: parameters.descriptors(),
            inline_offset: parameters.inline(),
            lanes: LANES,
            line_bytes: LINE_BYTES,
            session: identity.session.0,
            incarnation: *identity.incarnation.as_bytes(),
            made_at_ns: made_at.0,
        }
    }
}

/// The second header, at offset [`HEADER_BYTES`], of a memory with lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LaneHeader {
    /// Slots of a lane.
    pub lane_slots: u32,
    /// [`PAIRS`].
    pub pairs: u32,
    /// [`PAIR_BYTES`].
    pub pair_bytes: u32,
    /// [`LANE_STATE_BYTES`].
    pub lane_state_bytes: u32,
    /// Where the pairs start.
    pub pairs_offset: u64,
    /// Where the lane states start.
    pub lane_states_offset: u64,
    /// Where the lane descriptors start.
    pub lane_descriptors_offset: u64,
    /// Zero.
    pub lane_reserved: [u64; 3],
}

const _: () = assert!(size_of::<LaneHeader>() == LANE_HEADER_BYTES as usize);
const _: () = assert!((HEADER_BYTES + LANE_HEADER_BYTES) as u64 <= AREA_BYTES);

impl LaneHeader {
    /// The second header of a memory with these parameters.
    #[must_use]
    pub fn new(parameters: Parameters) -> Self {
        Self {
            lane_slots: parameters.lane_slots,
            pairs: PAIRS,
            pair_bytes: PAIR_BYTES,
            lane_state_bytes: LANE_STATE_BYTES,
            pairs_offset: parameters.pairs(),
            lane_states_offset: parameters.lane_states(),
            lane_descriptors_offset: parameters.lane_descriptors(),
            lane_reserved: [0; 3],
        }
    }
}

#[cfg(test)]
mod tests;
