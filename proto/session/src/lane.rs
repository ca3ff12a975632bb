//! A lane: stream-ordered requests of one worker's stream, over words that live anywhere.
//!
//! ```text
//!       publish()        accept()             ring            begin()          the stream, finish()
//! free ----------> told ----------> accepted ------> rung ----------> started --------------------> settled = free
//!                   |                                 |
//!                   +--refuse()--> settled            +--fail()--> settled; the lane is failed
//! ```
//!
//! * *publish*: the submitter writes the slot's descriptor, then counts it in `submitted`, and marks the lane as fresh.
//! * *accept, refuse*: the executor holds the request against the sealed plan, and says so in the slot's `state`. The submitter
//!   waits for that, so that a bad request is an error of the call; only an accepted one is put on the stream.
//! * *ring*: the worker's stream writes `bell = n`, and waits for `done >= n`. Nothing of a request that is not rung is given to
//!   a device: it can be given up at any time.
//! * *begin*: the executor saw the bell. It reads the descriptor again and checks it again: what was accepted may not hold any more.
//! * *finish*: the executor's stream wrote `done = n`, and then told the executor, who says settled. The slot is free.
//! * *fail*: `done = ` [`FREED`]: every wait of the lane goes on, at once and for good. Nothing more is run in it.
//!
//! Request `n` counts from 1, lives in slot `(n - 1) mod slots`, and is never used again. `state` is `n << 3 | phase`. Requests are
//! run in their order; a bell rings all that come before it, too. Each word has one writer, but for `done`: the executor's stream,
//! the executor, and the submitter's side once the executor's process is dead.

use crate::ring::{RingBroken, Sequence, StateBroken, index};
use crate::sync::{Word32, Word64, fence_seq_cst};

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

/// What `done` holds when every wait for it goes on: larger than any request's number, and every bit that a wait may test.
pub const FREED: u64 = i64::MAX as u64;

const PHASE_BITS: u32 = 3;
const PHASE_ACCEPTED: u64 = 1;
const PHASE_SETTLED: u64 = 2;
const PHASE_STARTED: u64 = 3;
/// Started by an executor that took it over from a dead one which had started it, too.
const PHASE_STARTED_AGAIN: u64 = 4;
/// The largest number that a `state` word can hold; below [`FREED`].
const NUMBER_MAX: u64 = u64::MAX >> PHASE_BITS;

/// Where the words of one lane live. `slot` is always below [`LaneWords::slots`].
pub trait LaneWords {
    /// How many slots: a power of two.
    fn slots(&self) -> u64;
    /// The last request that the worker's stream reached.
    fn bell(&self) -> Word64<'_>;
    /// The last request whose copy is done, or [`FREED`].
    fn done(&self) -> Word64<'_>;
    /// How many requests were ever published. Written by the submitter.
    fn submitted(&self) -> Word64<'_>;
    /// A bit for each lane with something to take: set by submitters, taken by the executor.
    fn fresh(&self) -> Word64<'_>;
    /// This lane's bit.
    fn fresh_bit(&self) -> u64;
    /// Not zero while the executor sleeps. Written by the executor.
    fn executor_sleeping(&self) -> Word32<'_>;
    /// Number and phase of a slot. Written by the executor.
    fn state(&self, slot: u64) -> Word64<'_>;
    /// Writes a descriptor, relaxed. Its first word is the number.
    fn write_descriptor(&self, slot: u64, words: &[u64]);
    /// Reads a descriptor, relaxed.
    fn read_descriptor(&self, slot: u64, words: &mut [u64]);
    /// Writes an answer, relaxed.
    fn write_answer(&self, slot: u64, words: &[u64]);
    /// Reads an answer, relaxed.
    fn read_answer(&self, slot: u64, words: &mut [u64]);
}

fn state_of(sequence: Sequence, phase: u64) -> u64 {
    sequence.get() << PHASE_BITS | phase
}

/// How far a request has come, as its `state` word says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LanePhase {
    /// Not looked at yet.
    Told,
    /// Checked, and not settled: it may be put on the stream.
    Accepted,
    /// Over: its answer can be read, and stays until a request is published to the same slot.
    Settled,
}

/// The submitter's end of a lane.
#[derive(Debug)]
pub struct LaneSubmitter<W> {
    words: W,
    slots: u64,
    published: u64,
    /// Up to here everything is settled.
    settled: u64,
}

impl<W: LaneWords> LaneSubmitter<W> {
    /// The submitter of a fresh lane.
    pub fn new(words: W) -> Self {
        let slots = words.slots();
        assert!(slots.is_power_of_two(), "a lane has a power of two of slots");
        Self { words, slots, published: 0, settled: 0 }
    }

    /// The submitter that follows an earlier one of the same memory, all of whose requests are settled.
    ///
    /// # Errors
    /// [`StateBroken`] when they are not.
    pub fn resume(words: W) -> Result<Self, StateBroken> {
        let published = words.submitted().load_relaxed();
        if published > 0 {
            let last = Sequence::of(published);
            if phase_of(&words, last)? != LanePhase::Settled {
                let found = words.state(last.slot(words.slots())).load_relaxed();
                return Err(StateBroken { sequence: published, found });
            }
        }
        Ok(Self { published, settled: published, ..Self::new(words) })
    }

    /// Where the words live.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// The number of the next request; `None` while its slot belongs to one that is not settled.
    ///
    /// # Errors
    /// [`StateBroken`] when a word holds nothing that the executor writes.
    pub fn place(&mut self) -> Result<Option<Sequence>, StateBroken> {
        while self.settled < self.published
            && self.phase(Sequence::of(self.settled + 1))? == LanePhase::Settled
        {
            self.settled += 1;
        }
        let has_place = self.published - self.settled < self.slots;
        Ok(has_place.then(|| Sequence::of(self.published + 1)))
    }

    /// Publishes the request that [`LaneSubmitter::place`] named; true if the executor sleeps and wants its doorbell rung.
    ///
    /// # Panics
    /// When there is no place, or the descriptor's first word is another number.
    pub fn publish(&mut self, descriptor: &[u64]) -> bool {
        assert!(
            self.published - self.settled < self.slots,
            "nothing is published past a full lane"
        );
        let sequence = Sequence::of(self.published + 1);
        assert_eq!(
            descriptor.first(),
            Some(&sequence.get()),
            "a descriptor starts with its number"
        );
        self.words.write_descriptor(sequence.slot(self.slots), descriptor);
        self.published = sequence.get();
        // SYNC: releases the descriptor; `LaneTaker::take` acquires it.
        self.words.submitted().store_release(sequence.get());
        // SYNC: releases `submitted`: who takes the bit sees the count.
        self.words.fresh().set_bits_release(self.words.fresh_bit());
        // SYNC: as in `SubmitterRing::publish`. The executor stores `executor_sleeping`, fences, and loads `fresh`; this stores
        // `fresh`, fences, and loads `executor_sleeping`. One of the two sees the other.
        fence_seq_cst();
        self.words.executor_sleeping().load_relaxed() != 0
    }

    /// How far a request has come that was published and not replaced in its slot by a later one.
    ///
    /// # Errors
    /// [`StateBroken`] when the word holds nothing that the executor writes.
    pub fn phase(&self, sequence: Sequence) -> Result<LanePhase, StateBroken> {
        phase_of(&self.words, sequence)
    }

    /// Copies out the answer of a settled request.
    pub fn read_answer(&self, sequence: Sequence, answer: &mut [u64]) {
        self.words.read_answer(sequence.slot(self.slots), answer);
    }

    /// Up to here everything was settled when [`LaneSubmitter::place`] last looked.
    pub fn settled(&self) -> u64 {
        self.settled
    }

    /// The last request that was published.
    pub fn published(&self) -> u64 {
        self.published
    }
}

/// How far a request has come, for any thread, beside the submitter's own.
///
/// # Errors
/// [`StateBroken`] when the word holds nothing that the executor writes.
pub fn phase_of<W: LaneWords>(words: &W, sequence: Sequence) -> Result<LanePhase, StateBroken> {
    let slots = words.slots();
    // SYNC: acquires the answer that the executor released.
    let found = words.state(sequence.slot(slots)).load_acquire();
    let last = sequence.get().checked_sub(slots).filter(|last| *last > 0);
    let before = last.map_or(0, |last| state_of(Sequence::of(last), PHASE_SETTLED));
    match found {
        found if found == state_of(sequence, PHASE_SETTLED) => Ok(LanePhase::Settled),
        found if found >> PHASE_BITS == sequence.get() => match found & ((1 << PHASE_BITS) - 1) {
            PHASE_ACCEPTED | PHASE_STARTED | PHASE_STARTED_AGAIN => Ok(LanePhase::Accepted),
            _ => Err(StateBroken { sequence: sequence.get(), found }),
        },
        found if found == before => Ok(LanePhase::Told),
        _ => Err(StateBroken { sequence: sequence.get(), found }),
    }
}

/// The executor's end of a lane. It trusts no word that it reads.
#[derive(Debug)]
pub struct LaneTaker<W> {
    words: W,
    slots: u64,
    /// How many requests were taken.
    taken: u64,
    /// The oldest request that is not settled, or the one after `taken`.
    front: u64,
    /// A bit for each slot whose request was refused: it is settled, and passed over.
    refused: Box<[u64]>,
    /// How many executors started the request at the front and died: of a lane that was taken over.
    deaths: u8,
    failed: bool,
    broken: Option<RingBroken>,
}

impl<W: LaneWords> LaneTaker<W> {
    /// The executor of a fresh lane.
    pub fn new(words: W) -> Self {
        let slots = words.slots();
        assert!(slots.is_power_of_two(), "a lane has a power of two of slots");
        let refused = vec![0; index(slots.div_ceil(64))].into_boxed_slice();
        Self { words, slots, taken: 0, front: 1, refused, deaths: 0, failed: false, broken: None }
    }

    /// The executor that follows a dead one, whose process is known dead. What was accepted stays so; what `done` says is done is
    /// settled; what was told and not looked at is taken. A submitter that wrote into the words misleads nobody but itself.
    ///
    /// `settled` is the answer that a request gets which `done` tells of.
    pub fn resume(words: W, settled: &[u64]) -> Self {
        let mut lane = Self::new(words);
        // SYNC: acquires the descriptors, as in `take`.
        let submitted = lane.words.submitted().load_acquire();
        if submitted > NUMBER_MAX {
            lane.broken = Some(RingBroken::Jumped { taken: 0, submitted, slots: lane.slots });
            return lane;
        }
        lane.taken = submitted.saturating_sub(lane.slots);
        lane.front = lane.taken + 1;
        for sequence in (lane.taken + 1..=submitted).map(Sequence::of) {
            match lane.words.state(sequence.slot(lane.slots)).load_acquire() ^ state_of(sequence, 0)
            {
                PHASE_SETTLED => lane.set_refused(sequence, true),
                PHASE_ACCEPTED | PHASE_STARTED | PHASE_STARTED_AGAIN => {
                    lane.set_refused(sequence, false);
                }
                _ => break,
            }
            lane.taken = sequence.get();
        }
        lane.pass_refused();
        // SYNC: acquires what the stream wrote before it; the dead executor's process writes no more.
        let done = lane.words.done().load_acquire();
        lane.failed = done == FREED;
        while !lane.failed && lane.front <= lane.taken && lane.front <= done {
            lane.settle(settled);
        }
        if lane.front <= lane.taken {
            let front = Sequence::of(lane.front);
            lane.deaths = match lane.words.state(front.slot(lane.slots)).load_relaxed()
                ^ state_of(front, 0)
            {
                PHASE_STARTED => 1,
                PHASE_STARTED_AGAIN => 2,
                _ => 0,
            };
        }
        lane
    }

    /// Where the words live.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Takes the next request, and copies its descriptor out. It is owed [`LaneTaker::accept`] or [`LaneTaker::refuse`].
    ///
    /// # Errors
    /// [`RingBroken`], and the same one at every later call.
    pub fn take(&mut self, descriptor: &mut [u64]) -> Result<Option<Sequence>, RingBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        let taken = self.take_checked(descriptor);
        self.broken = taken.err();
        taken
    }

    fn take_checked(&mut self, descriptor: &mut [u64]) -> Result<Option<Sequence>, RingBroken> {
        // SYNC: acquires the descriptor, which `LaneSubmitter::publish` released.
        let submitted = self.words.submitted().load_acquire();
        let (taken, slots) = (self.taken, self.slots);
        if submitted < taken {
            return Err(RingBroken::Backwards { taken, submitted });
        }
        if submitted - (self.front - 1) > slots || submitted > NUMBER_MAX {
            return Err(RingBroken::Jumped { taken, submitted, slots });
        }
        if submitted == taken {
            return Ok(None);
        }
        let sequence = Sequence::of(taken + 1);
        self.read(sequence, descriptor)?;
        self.taken = sequence.get();
        self.set_refused(sequence, false);
        Ok(Some(sequence))
    }

    fn read(&self, sequence: Sequence, descriptor: &mut [u64]) -> Result<(), RingBroken> {
        self.words.read_descriptor(sequence.slot(self.slots), descriptor);
        let found = descriptor.first().copied().unwrap_or(0);
        if found == sequence.get() {
            return Ok(());
        }
        Err(RingBroken::SequenceDiffers { expected: sequence.get(), found })
    }

    /// Tells the submitter that a request was checked, and may be put on the stream.
    pub fn accept(&self, sequence: Sequence) {
        // SYNC: nothing is told by it but itself; released for symmetry with the others.
        let state = state_of(sequence, PHASE_ACCEPTED);
        self.words.state(sequence.slot(self.slots)).store_release(state);
    }

    /// Refuses a request that was just taken. It is never run, whatever the bell says.
    pub fn refuse(&mut self, sequence: Sequence, answer: &[u64]) {
        self.set_refused(sequence, true);
        self.write_settled(sequence, answer);
        self.pass_refused();
    }

    /// Whether there is an accepted request that is not settled: then the bell is worth looking at.
    pub fn is_waiting(&self) -> bool {
        self.front <= self.taken
    }

    /// How many requests are taken and not settled; refused ones among them count.
    pub fn outstanding(&self) -> u64 {
        self.taken + 1 - self.front
    }

    /// Whether the lane was failed.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// The oldest request that is not settled, if the worker's stream has reached it.
    pub fn rung(&self) -> Option<Sequence> {
        if !self.is_waiting() || self.failed {
            return None;
        }
        // SYNC: acquires what the worker's stream did before the bell, as far as the host sees it.
        let bell = self.words.bell().load_acquire();
        (bell >= self.front).then(|| Sequence::of(self.front))
    }

    /// Copies out the descriptor of the oldest request that is not settled, for who prepares for its bell. It is read again when
    /// it begins.
    pub fn head(&self, descriptor: &mut [u64]) -> Option<Sequence> {
        let front = (self.is_waiting() && !self.failed).then(|| Sequence::of(self.front))?;
        self.read(front, descriptor).is_ok().then_some(front)
    }

    /// Begins the request that [`LaneTaker::rung`] named: copies its descriptor out again. Gives under how many executors it was
    /// started before that died: 0, 1, or 2 for more.
    ///
    /// # Errors
    /// [`RingBroken`] when another descriptor lies there: nothing can be run, and the session is dead.
    pub fn begin(&mut self, descriptor: &mut [u64]) -> Result<u8, RingBroken> {
        let sequence = Sequence::of(self.front);
        if let Err(broken) = self.read(sequence, descriptor) {
            self.broken = Some(broken);
            return Err(broken);
        }
        let phase = if self.deaths == 0 { PHASE_STARTED } else { PHASE_STARTED_AGAIN };
        // SYNC: for the executor that follows this one: stored before anything is asked of a device.
        self.words.state(sequence.slot(self.slots)).store_release(state_of(sequence, phase));
        Ok(self.deaths)
    }

    /// Lets the wait of the request at the front go on, where no stream was asked for anything. None of the lane has anything under way.
    pub fn settle_by_hand(&self) {
        // SYNC: as the stream's own write.
        self.words.done().store_release(self.front);
    }

    /// The request at the front is over, and its waits went on by what the stream wrote.
    pub fn finish(&mut self, answer: &[u64]) {
        assert!(self.is_waiting(), "a request is finished once");
        self.settle(answer);
    }

    /// Lets every wait of the lane go on for good: what was accepted and not settled is settled with that answer, and nothing is
    /// run any more. No write of a stream to `done` is under way.
    pub fn fail(&mut self, answer: &[u64]) {
        self.failed = true;
        while self.is_waiting() {
            self.settle(answer);
        }
        // SYNC: the answers are seen by who sees this.
        self.words.done().store_release(FREED);
    }

    fn settle(&mut self, answer: &[u64]) {
        self.write_settled(Sequence::of(self.front), answer);
        self.front += 1;
        self.deaths = 0;
        self.pass_refused();
    }

    fn write_settled(&self, sequence: Sequence, answer: &[u64]) {
        let slot = sequence.slot(self.slots);
        self.words.write_answer(slot, answer);
        // SYNC: releases the answer.
        self.words.state(slot).store_release(state_of(sequence, PHASE_SETTLED));
    }

    fn pass_refused(&mut self) {
        while self.is_waiting() && self.is_refused(Sequence::of(self.front)) {
            self.front += 1;
        }
    }

    fn is_refused(&self, sequence: Sequence) -> bool {
        let slot = sequence.slot(self.slots);
        self.refused[index(slot / 64)] >> (slot % 64) & 1 == 1
    }

    fn set_refused(&mut self, sequence: Sequence, refused: bool) {
        let slot = sequence.slot(self.slots);
        let word = &mut self.refused[index(slot / 64)];
        *word = *word & !(1 << (slot % 64)) | u64::from(refused) << (slot % 64);
    }
}
