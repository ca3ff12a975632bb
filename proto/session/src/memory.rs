//! The session memory itself: made by the daemon, opened by its peer, mapped by both.

use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::{Doorbell, Mapping, MemoryError, SealedMemory, file_bytes};
use statecopy_proto::{Incarnation, SessionId};
use zerocopy::{FromBytes, IntoBytes};

use crate::answer::{Answer, AnswerError};
use crate::clock::MonotonicNs;
use crate::executor::{Executor, Waker};
use crate::lane::LaneWords;
use crate::layout::{
    ABI_VERSION, ABI_VERSION_WITHOUT_LANES, ANSWER_WORDS, COMPLETION_ANSWER, COMPLETION_STATE,
    EXECUTOR_SLEEPING, HEADER_BYTES, Header, Identity, LANES_FRESH, LaneHeader, LaneNumber,
    LayoutError, MAGIC, PAIRS_FAILED, PairNumber, Parameters, SUBMITTED, SUBMITTER_SLEEPING, WAKE,
};
use crate::pair::PairWords;
use crate::ring::{self, SubmitterRing, TakerRing, Words};
use crate::submitter::Submitter;
use crate::sync::{Word32, Word64};

/// Why there is no session memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionMemoryError {
    /// The memory file is not as it must be.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Its size cannot be read.
    #[error("The size of the session memory cannot be read")]
    Size(#[source] std::io::Error),
    /// Smaller than a header.
    #[error("A session memory has more than {bytes} bytes")]
    TooSmall {
        /// Its size.
        bytes: u64,
    },
    /// It does not start with the magic: some other memory.
    #[error("The memory is no session memory")]
    Magic,
    /// Another layout.
    #[error("The session memory has layout version {found}, this side knows {ABI_VERSION}")]
    AbiVersion {
        /// Its version.
        found: u32,
    },
    /// Sizes that no session memory has.
    #[error("The session memory's header is wrong")]
    Parameters(#[from] LayoutError),
    /// A field of the header that does not follow from its sizes, or the file's size is another one.
    #[error("The session memory's header contradicts itself or the file's {bytes} bytes")]
    Header {
        /// Size of the file.
        bytes: u64,
    },
}

/// A session memory, mapped. Cheap to clone: all clones share the mapping.
#[derive(Debug, Clone)]
pub struct SessionMemory {
    mapping: Arc<Mapping>,
    parameters: Parameters,
    identity: Identity,
}

impl SessionMemory {
    /// The daemon makes a fresh one. The sealed memory goes to the peer, and is kept for the next device process.
    ///
    /// # Errors
    /// [`SessionMemoryError::Memory`].
    pub fn create(
        parameters: Parameters,
        identity: Identity,
    ) -> Result<(SealedMemory, Self), SessionMemoryError> {
        let sealed = SealedMemory::create("statecopy-session", parameters.total_bytes())?;
        let mapping = sealed.map()?;
        let header = Header::new(parameters, identity, MonotonicNs::now());
        let written = mapping.write(0, header.as_bytes());
        assert_eq!(written, Ok(()), "a session memory holds its header");
        if parameters.lane_slots() > 0 {
            let lanes = LaneHeader::new(parameters);
            let written = mapping.write(HEADER_BYTES.into(), lanes.as_bytes());
            assert_eq!(written, Ok(()), "a session memory holds its second header");
        }
        Ok((sealed, Self { mapping: Arc::new(mapping), parameters, identity }))
    }

    /// The daemon maps one of its own again, for example in a new device process. It believes its own record of the
    /// parameters, never the header, which the peer may have written over.
    ///
    /// # Errors
    /// [`SessionMemoryError::Memory`], also when the size is not the one that follows from `parameters`.
    pub fn attach(
        fd: OwnedFd,
        parameters: Parameters,
        identity: Identity,
    ) -> Result<Self, SessionMemoryError> {
        let mapping = SealedMemory::adopt(fd, parameters.total_bytes())?.map()?;
        Ok(Self { mapping: Arc::new(mapping), parameters, identity })
    }

    /// The peer opens what the daemon sent, and checks every field of the header.
    ///
    /// # Errors
    /// [`SessionMemoryError`], by what is wrong.
    pub fn open(fd: OwnedFd) -> Result<Self, SessionMemoryError> {
        let bytes = file_bytes(&fd).map_err(SessionMemoryError::Size)?;
        let mapping = SealedMemory::adopt(fd, bytes)?.map()?;
        let mut header = [0; size_of::<Header>()];
        mapping.read(0, &mut header).map_err(|_| SessionMemoryError::TooSmall { bytes })?;
        let header =
            Header::read_from_bytes(&header).map_err(|_| SessionMemoryError::TooSmall { bytes })?;
        if header.magic != MAGIC {
            return Err(SessionMemoryError::Magic);
        }
        let lanes = match header.abi_version {
            ABI_VERSION_WITHOUT_LANES => None,
            ABI_VERSION => Some(lane_header(&mapping, bytes)?),
            found => return Err(SessionMemoryError::AbiVersion { found }),
        };
        let lane_slots = lanes.map_or(0, |lanes| lanes.lane_slots);
        let parameters =
            Parameters::new(header.slots, header.inline_bytes)?.with_lanes(lane_slots)?;
        let identity = Identity {
            incarnation: Incarnation::new(header.incarnation),
            session: SessionId(header.session),
        };
        let made_at = MonotonicNs(header.made_at_ns);
        let is_whole = header == Header::new(parameters, identity, made_at)
            && lanes.is_none_or(|lanes| lanes == LaneHeader::new(parameters));
        if !is_whole || header.total_bytes != bytes {
            return Err(SessionMemoryError::Header { bytes });
        }
        Ok(Self { mapping: Arc::new(mapping), parameters, identity })
    }

    /// The sizes it was made with.
    #[must_use]
    pub fn parameters(&self) -> Parameters {
        self.parameters
    }

    /// Whose it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// The daemon's clock when it made the memory, as the header says now: for the peer, whom it tells how far its own clock is
    /// from the daemon's.
    #[must_use]
    pub fn made_at(&self) -> MonotonicNs {
        let at = offset_of!(Header, made_at_ns) as u64;
        MonotonicNs(Word64::new(inside(self.mapping.atomic_u64(at))).load_relaxed())
    }

    /// The mapped bytes.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The submitter's end of a fresh memory; one at most. It rings `executor_bell` when the executor sleeps.
    #[must_use]
    pub fn submitter(&self, executor_bell: Doorbell) -> Submitter {
        Submitter::new(SubmitterRing::new(self.words()), executor_bell)
    }

    /// The executor's end of a fresh memory; one at most. It wakes the submitter by `waker` when that sleeps.
    #[must_use]
    pub fn executor(&self, waker: Waker) -> Executor {
        Executor::new(TakerRing::new(self.words()), waker)
    }

    /// The executor's end after an earlier executor died (its process is known dead): every request that was not answered is
    /// taken again, in order. When the words cannot be a ring's, the first [`Executor::take`] says so: what a peer wrote is
    /// no reason to serve nobody.
    #[must_use]
    pub fn resume_executor(&self, waker: Waker) -> Executor {
        Executor::new(TakerRing::resume(self.words()), waker)
    }

    /// How many requests are submitted and not answered, as the shared words say now. For who only watches: the peer can
    /// write what it likes there, so it is a claim, of at most as many as there are slots. Looks at a word a slot.
    #[must_use]
    pub fn pending(&self) -> u64 {
        ring::pending(&self.words())
    }

    /// The words of one lane, for either end of it ([`crate::LaneSubmitter`], [`crate::LaneTaker`]).
    ///
    /// # Panics
    /// Where there are no lanes.
    #[must_use]
    pub fn lane(&self, lane: LaneNumber) -> MappedLane {
        assert!(self.parameters.lane_slots() > 0, "the memory has lanes");
        MappedLane { words: self.words(), lane }
    }

    /// The words of one pair.
    ///
    /// # Panics
    /// Where there are none.
    #[must_use]
    pub fn pair(&self, pair: PairNumber) -> MappedPair {
        assert!(self.parameters.lane_slots() > 0, "the memory has pairs");
        let (bell_at, done_at) = (self.parameters.bell_at(pair), self.parameters.done_at(pair));
        MappedPair { mapping: Arc::clone(&self.mapping), bell_at, done_at }
    }

    /// The lanes with something to take, a bit each; the executor takes the bits with it.
    #[must_use]
    pub fn take_fresh_lanes(&self) -> u64 {
        let fresh = Word64::new(inside(self.mapping.atomic_u64(LANES_FRESH)));
        // Looked at first: to take the bits is to write, and there is nothing to take at most looks.
        if fresh.load_relaxed() == 0 { 0 } else { fresh.take_bits_acquire() }
    }

    /// Whether a lane has something to take. Before sleep, after the fence of [`Executor::prepare_sleep`].
    #[must_use]
    pub fn has_fresh_lanes(&self) -> bool {
        Word64::new(inside(self.mapping.atomic_u64(LANES_FRESH))).load_relaxed() != 0
    }

    /// How many lanes and pairs were failed so far: one load.
    #[must_use]
    pub fn pairs_failed(&self) -> u64 {
        // SYNC: acquires the failures that were written before it was raised.
        Word64::new(inside(self.mapping.atomic_u64(PAIRS_FAILED))).load_acquire()
    }

    /// Writes why a pair was failed, and counts it: before the pair is.
    pub fn write_failure(&self, pair: PairNumber, answer: &Answer) {
        let at = self.parameters.failure_at(pair);
        inside(self.mapping.write_words(at, &answer.to_words()));
        let count = Word64::new(inside(self.mapping.atomic_u64(PAIRS_FAILED)));
        // SYNC: releases the answer. Only the executor writes the count.
        count.store_release(count.load_relaxed().wrapping_add(1));
    }

    /// Forgets why a pair was failed: it serves anew.
    pub fn clear_failure(&self, pair: PairNumber) {
        inside(self.mapping.write_words(self.parameters.failure_at(pair), &[0; ANSWER_WORDS]));
    }

    /// Why a pair was failed, if anything was written there.
    ///
    /// # Errors
    /// When it is no answer.
    pub fn failure(&self, pair: PairNumber) -> Result<Option<Answer>, AnswerError> {
        let mut words = [0; ANSWER_WORDS];
        inside(self.mapping.read_words(self.parameters.failure_at(pair), &mut words));
        if words == [0; ANSWER_WORDS] { Ok(None) } else { Answer::from_words(words).map(Some) }
    }

    pub(crate) fn words(&self) -> MappedWords {
        MappedWords { mapping: Arc::clone(&self.mapping), parameters: self.parameters }
    }
}

/// The words of a ring in mapped memory, at the offsets of the layout.
#[derive(Debug, Clone)]
pub(crate) struct MappedWords {
    mapping: Arc<Mapping>,
    parameters: Parameters,
}

/// Unwraps an access at an offset of the layout: the mapping was checked to be as large as the layout.
fn inside<T, E: std::fmt::Display>(access: Result<T, E>) -> T {
    match access {
        Ok(value) => value,
        Err(error) => unreachable!("the layout lies in its mapping: {error}"),
    }
}

impl MappedWords {
    pub(crate) fn parameters(&self) -> Parameters {
        self.parameters
    }

    /// Copies bytes into a slot's inline space, at `offset` of it.
    pub(crate) fn write_inline(&self, slot: u64, offset: u64, from: &[u8]) {
        inside(self.mapping.write(self.inline(slot, offset, from.len()), from));
    }

    /// Copies bytes out of a slot's inline space, from `offset` of it, each once.
    pub(crate) fn read_inline(&self, slot: u64, offset: u64, into: &mut [u8]) {
        inside(self.mapping.read(self.inline(slot, offset, into.len()), into));
    }

    fn inline(&self, slot: u64, offset: u64, len: usize) -> u64 {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        let limit = u64::from(self.parameters.inline_bytes());
        assert!(end.is_some_and(|end| end <= limit), "inline_ranges keeps to the slot");
        self.parameters.inline_at(slot) + offset
    }
}

impl Words for MappedWords {
    fn slots(&self) -> u64 {
        self.parameters.slots().into()
    }

    fn submitted(&self) -> Word64<'_> {
        Word64::new(inside(self.mapping.atomic_u64(SUBMITTED)))
    }

    fn submitter_sleeping(&self) -> Word32<'_> {
        Word32::new(inside(self.mapping.atomic_u32(SUBMITTER_SLEEPING)))
    }

    fn executor_sleeping(&self) -> Word32<'_> {
        Word32::new(inside(self.mapping.atomic_u32(EXECUTOR_SLEEPING)))
    }

    fn wake(&self) -> Word32<'_> {
        Word32::new(inside(self.mapping.atomic_u32(WAKE)))
    }

    fn state(&self, slot: u64) -> Word64<'_> {
        let at = self.parameters.completion_at(slot) + COMPLETION_STATE;
        Word64::new(inside(self.mapping.atomic_u64(at)))
    }

    fn write_descriptor(&self, slot: u64, words: &[u64]) {
        inside(self.mapping.write_words(self.parameters.descriptor_at(slot), words));
    }

    fn read_descriptor(&self, slot: u64, words: &mut [u64]) {
        inside(self.mapping.read_words(self.parameters.descriptor_at(slot), words));
    }

    fn touch_request(&self, slot: u64) {
        let descriptor = self.parameters.descriptor_at(slot);
        let has_inline = self.parameters.inline_bytes() > 0;
        let inline = has_inline.then(|| self.parameters.inline_at(slot));
        for line in [descriptor, descriptor + 64].into_iter().chain(inline) {
            // A load that nobody waits for: nothing depends on its value.
            let _value = Word64::new(inside(self.mapping.atomic_u64(line))).load_relaxed();
        }
    }

    fn write_answer(&self, slot: u64, words: &[u64]) {
        let at = self.parameters.completion_at(slot) + COMPLETION_ANSWER;
        inside(self.mapping.write_words(at, words));
    }

    fn read_answer(&self, slot: u64, words: &mut [u64]) {
        let at = self.parameters.completion_at(slot) + COMPLETION_ANSWER;
        inside(self.mapping.read_words(at, words));
    }
}

/// The second header, as it lies there now.
fn lane_header(mapping: &Mapping, bytes: u64) -> Result<LaneHeader, SessionMemoryError> {
    let mut header = [0; size_of::<LaneHeader>()];
    let too_small = SessionMemoryError::TooSmall { bytes };
    if mapping.read(HEADER_BYTES.into(), &mut header).is_err() {
        return Err(too_small);
    }
    LaneHeader::read_from_bytes(&header).map_err(|_| too_small)
}

/// The words of one lane in mapped memory.
#[derive(Debug, Clone)]
pub struct MappedLane {
    words: MappedWords,
    lane: LaneNumber,
}

impl MappedLane {
    fn word(&self, at: u64) -> Word64<'_> {
        Word64::new(inside(self.words.mapping.atomic_u64(at)))
    }

    fn parameters(&self) -> Parameters {
        self.words.parameters
    }
}

impl LaneWords for MappedLane {
    fn slots(&self) -> u64 {
        self.parameters().lane_slots().into()
    }

    fn bell(&self) -> Word64<'_> {
        self.word(self.parameters().bell_at(self.lane.pair()))
    }

    fn done(&self) -> Word64<'_> {
        self.word(self.parameters().done_at(self.lane.pair()))
    }

    fn submitted(&self) -> Word64<'_> {
        self.word(self.parameters().lane_submitted_at(self.lane))
    }

    fn fresh(&self) -> Word64<'_> {
        self.word(LANES_FRESH)
    }

    fn fresh_bit(&self) -> u64 {
        1 << self.lane.get()
    }

    fn executor_sleeping(&self) -> Word32<'_> {
        self.words.executor_sleeping()
    }

    fn state(&self, slot: u64) -> Word64<'_> {
        self.word(self.parameters().lane_state_at(self.lane, slot))
    }

    fn write_descriptor(&self, slot: u64, words: &[u64]) {
        let at = self.parameters().lane_descriptor_at(self.lane, slot);
        inside(self.words.mapping.write_words(at, words));
    }

    fn read_descriptor(&self, slot: u64, words: &mut [u64]) {
        let at = self.parameters().lane_descriptor_at(self.lane, slot);
        inside(self.words.mapping.read_words(at, words));
    }

    fn write_answer(&self, slot: u64, words: &[u64]) {
        let at = self.parameters().lane_state_at(self.lane, slot) + COMPLETION_ANSWER;
        inside(self.words.mapping.write_words(at, words));
    }

    fn read_answer(&self, slot: u64, words: &mut [u64]) {
        let at = self.parameters().lane_state_at(self.lane, slot) + COMPLETION_ANSWER;
        inside(self.words.mapping.read_words(at, words));
    }
}

/// The words of one pair in mapped memory. It knows their places: bells are looked at by the hundred, again and again.
#[derive(Debug, Clone)]
pub struct MappedPair {
    mapping: Arc<Mapping>,
    bell_at: u64,
    done_at: u64,
}

impl PairWords for MappedPair {
    fn bell(&self) -> Word64<'_> {
        Word64::new(inside(self.mapping.atomic_u64(self.bell_at)))
    }

    fn done(&self) -> Word64<'_> {
        Word64::new(inside(self.mapping.atomic_u64(self.done_at)))
    }
}

#[cfg(test)]
mod tests;
