//! The ring between one submitter and one executor, over words that live anywhere.
//!
//! ```text
//!              next() + publish()         take()              answer()              poll()
//! slot: free -----------------> published -----> taken, accepted -----> answered -----> free
//! ```
//!
//! * *publish*: the submitter writes the slot's inline space and descriptor, then counts it in `submitted`.
//! * *take*: the executor sees the count, copies the descriptor out once, and notes the slot as taken, privately.
//! * *accept*: the slot's `state` says so, and how many executors have accepted it: the next one asks when this one dies.
//! * *answer*: the executor writes the answer, then the `state`, and notes the slot as free, privately.
//! * *poll*: the submitter reads `state`, then the answer, and notes the slot as free, privately.
//!
//! Sequences count from 1 and are never used again; sequence `s` lives in slot `(s - 1) mod slots`. `submitted` is how many
//! were published. `state` is `sequence << 2 | phase`, and its sequence only grows. Every shared word has one writer.

use std::fmt;

use crate::sync::{Word32, Word64, fence_seq_cst};

#[cfg(all(test, loom))]
mod loom_tests;

/// Bits of a `state` word below the sequence.
const PHASE_BITS: u32 = 2;
const PHASE_ACCEPTED: u64 = 1;
const PHASE_ANSWERED: u64 = 2;
/// Accepted by an executor that took it over from a dead one which had accepted it too.
const PHASE_ACCEPTED_AGAIN: u64 = 3;

/// The largest sequence that a `state` word can hold.
const SEQUENCE_MAX: u64 = u64::MAX >> PHASE_BITS;

/// Where the words of one ring live.
///
/// `slot` is always below [`Words::slots`]. Descriptor and answer are moved word by word, each once, in any order.
pub trait Words {
    /// How many slots: a power of two.
    fn slots(&self) -> u64;
    /// How many requests were ever published. Written by the submitter.
    fn submitted(&self) -> Word64<'_>;
    /// Not zero while the submitter sleeps. Written by the submitter.
    fn submitter_sleeping(&self) -> Word32<'_>;
    /// Not zero while the executor sleeps. Written by the executor.
    fn executor_sleeping(&self) -> Word32<'_>;
    /// Counts wake-ups of a submitter that sleeps on it. Written by the executor.
    fn wake(&self) -> Word32<'_>;
    /// Sequence and phase of a completion slot. Written by the executor.
    fn state(&self, slot: u64) -> Word64<'_>;
    /// Writes a descriptor, relaxed. Its first word is the sequence.
    fn write_descriptor(&self, slot: u64, words: &[u64]);
    /// Reads a descriptor, relaxed.
    fn read_descriptor(&self, slot: u64, words: &mut [u64]);
    /// Asks for the cache lines of a descriptor and of what is inline first, and looks at nothing in them: only ever a matter
    /// of time.
    fn touch_request(&self, slot: u64);
    /// Writes an answer, relaxed.
    fn write_answer(&self, slot: u64, words: &[u64]);
    /// Reads an answer, relaxed.
    fn read_answer(&self, slot: u64, words: &mut [u64]);
}

/// One request of a ring. Counts from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

impl Sequence {
    /// The number in the descriptor and in the `state` word.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }

    /// The request of that number; none is 0.
    #[must_use]
    pub fn new(number: u64) -> Option<Self> {
        (number > 0).then_some(Self(number))
    }

    /// The request of that number, which is not 0.
    pub(crate) fn of(number: u64) -> Self {
        Self(number)
    }

    /// The slot that it lives in.
    pub(crate) fn slot(self, slots: u64) -> u64 {
        (self.0 - 1) & (slots - 1)
    }

    fn state(self, phase: u64) -> u64 {
        self.0 << PHASE_BITS | phase
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The next slot's last answer has not been read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("All {slots} slots of the ring are in use, or their answers have not been read")]
pub struct RingFull {
    /// How many slots it has.
    pub slots: u64,
}

/// Why the executor takes nothing from a ring any more. The submitter broke the protocol, or something wrote over its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingBroken {
    /// `submitted` went backwards.
    #[error("The count of submitted requests went back from {taken} to {submitted}")]
    Backwards {
        /// How many were taken.
        taken: u64,
        /// What the word says.
        submitted: u64,
    },
    /// `submitted` jumped past the slots.
    #[error(
        "The count of submitted requests jumped from {taken} to {submitted} in a ring of {slots} slots"
    )]
    Jumped {
        /// How many were taken.
        taken: u64,
        /// What the word says.
        submitted: u64,
        /// How many slots there are.
        slots: u64,
    },
    /// A descriptor carries another sequence than its place in the ring.
    #[error("The descriptor of request {expected} says that it is request {found}")]
    SequenceDiffers {
        /// Its place.
        expected: u64,
        /// What it says.
        found: u64,
    },
    /// A slot was submitted again before it was answered.
    #[error(
        "Request {sequence} was submitted to the slot of request {occupant}, which is not answered yet"
    )]
    Unanswered {
        /// The new request.
        sequence: u64,
        /// The one that is there.
        occupant: u64,
    },
}

/// How far a request has come, as its `state` word says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not looked at yet.
    Pending,
    /// Checked and accepted; its answer will come.
    Accepted,
    /// Answered; the answer has been read, and the slot is free.
    Answered,
}

/// A `state` word that the protocol cannot have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The state word of request {sequence} holds {found:#x}")]
pub struct StateBroken {
    /// The request that was polled.
    pub sequence: u64,
    /// What the word holds.
    pub found: u64,
}

/// The submitter's end: publishes requests, reads answers.
#[derive(Debug)]
pub struct SubmitterRing<W> {
    words: W,
    slots: u64,
    published: u64,
    /// For each slot, the request whose answer has not been read yet.
    unread: Box<[Option<Sequence>]>,
    /// How many threads sleep, or are about to.
    sleepers: u32,
}

/// What the wake word held before a look: sleep only while it still does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeCount(pub(crate) u32);

/// Whether a request's `state` word says answered. One load, by any thread, beside the submitter's own.
pub fn is_answered<W: Words>(words: &W, sequence: Sequence) -> bool {
    // SYNC: only a hint. The poll that follows loads the word again and acquires the answer.
    words.state(sequence.slot(words.slots())).load_relaxed() == sequence.state(PHASE_ANSWERED)
}

/// How many requests are submitted and not answered, as the shared words say now: a count for who only watches. The submitter
/// can write what it likes there, so it is no more than a claim, of at most as many as there are slots.
pub fn pending<W: Words>(words: &W) -> u64 {
    let slots = words.slots();
    let submitted = words.submitted().load_relaxed();
    let newest = (0..slots).map_while(|back| submitted.checked_sub(back).filter(|at| *at > 0));
    newest.filter(|at| !is_answered(words, Sequence(*at))).count() as u64
}

impl<W: Words> SubmitterRing<W> {
    /// The submitter of a fresh memory.
    pub fn new(words: W) -> Self {
        let slots = words.slots();
        Self { words, slots, published: 0, unread: private_slots(slots, None), sleepers: 0 }
    }

    /// Where the words live.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// The sequence and slot of the next request. Until it is published, its inline space is the submitter's to write.
    ///
    /// # Errors
    /// [`RingFull`] while the slot's last answer has not been read.
    pub fn next(&self) -> Result<(Sequence, u64), RingFull> {
        let sequence = Sequence(self.published + 1);
        let slot = sequence.slot(self.slots);
        match self.unread[index(slot)] {
            None => Ok((sequence, slot)),
            Some(_) => Err(RingFull { slots: self.slots }),
        }
    }

    /// Publishes the request that [`SubmitterRing::next`] named; true if the executor sleeps and wants its doorbell rung.
    ///
    /// # Panics
    /// When there is no such slot, or the descriptor's first word is another sequence.
    pub fn publish(&mut self, descriptor: &[u64]) -> bool {
        let next = self.next();
        let Ok((sequence, slot)) = next else {
            panic!("nothing is published past a full ring");
        };
        assert_eq!(descriptor.first(), Some(&sequence.0), "a descriptor starts with its sequence");
        self.words.write_descriptor(slot, descriptor);
        self.unread[index(slot)] = Some(sequence);
        self.published = sequence.0;
        // SYNC: releases descriptor and inline space; `TakerRing::take` acquires them by its load of `submitted`.
        self.words.submitted().store_release(sequence.0);
        // SYNC: the submitter stores `submitted` and then loads `executor_sleeping`; the executor stores `executor_sleeping`
        // and then loads `submitted` (`TakerRing::prepare_sleep`). One of the two must see the other's store, or the
        // executor sleeps on a published request. That is store-then-load on both sides, which release and acquire do
        // not order: an AcqRel fence here loses the wake-up (loom_tests shows it). Two SeqCst fences stand in one order,
        // and the loads behind the later one see the stores before the earlier one.
        fence_seq_cst();
        self.words.executor_sleeping().load_relaxed() != 0
    }

    /// How far a request has come. When it is answered, the answer is copied out and the slot is free. `None` when the
    /// request is not outstanding: never published, or its answer was read before.
    ///
    /// # Errors
    /// [`StateBroken`] when the word holds nothing that the executor writes.
    pub fn poll(
        &mut self,
        sequence: Sequence,
        answer: &mut [u64],
    ) -> Result<Option<Phase>, StateBroken> {
        let slot = sequence.slot(self.slots);
        if self.unread[index(slot)] != Some(sequence) {
            return Ok(None);
        }
        // SYNC: acquires the answer that `TakerRing::answer` released.
        let found = self.words.state(slot).load_acquire();
        if found == sequence.state(PHASE_ANSWERED) {
            // The executor does not write this answer again before the submitter publishes to the slot again.
            self.words.read_answer(slot, answer);
            self.unread[index(slot)] = None;
            return Ok(Some(Phase::Answered));
        }
        if [PHASE_ACCEPTED, PHASE_ACCEPTED_AGAIN]
            .map(|phase| sequence.state(phase))
            .contains(&found)
        {
            return Ok(Some(Phase::Accepted));
        }
        // Before the executor has said anything, the word tells of the slot's last request, if there was one.
        let last = sequence.0.checked_sub(self.slots).filter(|last| *last > 0);
        if found == last.map_or(0, |last| Sequence(last).state(PHASE_ANSWERED)) {
            return Ok(Some(Phase::Pending));
        }
        Err(StateBroken { sequence: sequence.0, found })
    }

    /// How many requests are published and their answers not read.
    pub fn outstanding(&self) -> usize {
        self.unread.iter().flatten().count()
    }

    /// Says that a thread of the submitter is about to sleep until an answer comes. Poll once more after it, and sleep only
    /// while the wake word holds what is returned here: an answer that this poll does not see changes it (or rings the
    /// doorbell). Threads add up; each calls [`SubmitterRing::cancel_sleep`] when it is awake.
    pub fn prepare_sleep(&mut self) -> WakeCount {
        self.sleepers += 1;
        self.words.submitter_sleeping().store_relaxed(self.sleepers);
        // SYNC: pairs with the fence in `TakerRing::answer`: either the poll that follows sees the `state` stored there,
        // or the executor sees that the submitter sleeps.
        fence_seq_cst();
        // SYNC: loaded before the poll. The executor stores the answer's `state` before it raises this word: who loads the
        // raised word here acquires that `state`, so its poll sees the answer; who loads the old one does not fall asleep
        // once it is raised, because the kernel compares it again under the lock that the wake-up takes.
        WakeCount(self.words.wake().load_acquire())
    }

    /// Says that one of the threads is awake.
    pub fn cancel_sleep(&mut self) {
        self.sleepers = self.sleepers.saturating_sub(1);
        self.words.submitter_sleeping().store_relaxed(self.sleepers);
    }
}

/// The executor's end: takes requests, writes answers. It trusts no word that it reads.
#[derive(Debug)]
pub struct TakerRing<W> {
    words: W,
    slots: u64,
    /// How many requests were taken.
    taken: u64,
    /// For each slot, the request that is taken and not answered.
    unanswered: Box<[Option<Sequence>]>,
    /// Up to here the requests were submitted to an earlier executor.
    inherited: u64,
    /// For each slot, what the earlier executor did with its inherited request.
    before: Box<[Before]>,
    broken: Option<RingBroken>,
}

/// What became of an inherited request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// Answered.
    Answered,
    /// Accepted by so many executors, all dead now.
    Died(u8),
}

impl<W: Words> TakerRing<W> {
    /// The executor of a fresh memory.
    pub fn new(words: W) -> Self {
        let slots = words.slots();
        Self {
            words,
            slots,
            taken: 0,
            unanswered: private_slots(slots, None),
            inherited: 0,
            before: private_slots(slots, Before::Died(0)),
            broken: None,
        }
    }

    /// The executor that follows a dead one: it takes again, in order, every request whose `state` word does not say
    /// answered. That word is the very one that the submitter reads, so no answer that was seen is given again. A submitter
    /// that writes into it misleads nobody but itself.
    ///
    /// When `submitted` cannot be a count, the ring is broken from the start, as [`TakerRing::take`] tells.
    pub fn resume(words: W) -> Self {
        let mut ring = Self::new(words);
        // SYNC: acquires the descriptors, as in `take`.
        let submitted = ring.words.submitted().load_acquire();
        if submitted > SEQUENCE_MAX {
            ring.broken = Some(RingBroken::Jumped { taken: 0, submitted, slots: ring.slots });
            return ring;
        }
        ring.taken = submitted.saturating_sub(ring.slots);
        ring.inherited = submitted;
        for sequence in (ring.taken + 1..=submitted).map(Sequence) {
            let slot = sequence.slot(ring.slots);
            // The dead executor's process is gone: there is nobody whose stores this load could miss.
            let state = ring.words.state(slot).load_acquire();
            ring.before[index(slot)] = match state ^ sequence.state(0) {
                PHASE_ANSWERED => Before::Answered,
                PHASE_ACCEPTED => Before::Died(1),
                PHASE_ACCEPTED_AGAIN => Before::Died(2),
                _ => Before::Died(0),
            };
        }
        ring
    }

    /// Where the words live.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Takes the next request, and copies its descriptor out once. The slot is its own until it is answered.
    ///
    /// # Errors
    /// [`RingBroken`], and the same one at every later call: what is in the ring now cannot be told from garbage.
    pub fn take(&mut self, descriptor: &mut [u64]) -> Result<Option<Sequence>, RingBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        let taken = self.take_checked(descriptor);
        self.broken = taken.err();
        taken
    }

    fn take_checked(&mut self, descriptor: &mut [u64]) -> Result<Option<Sequence>, RingBroken> {
        // SYNC: acquires descriptor and inline space, which `SubmitterRing::publish` released. A hostile submitter need not
        // have released them: then their bytes are garbage, which the checks behind this expect anyway.
        let submitted = self.words.submitted().load_acquire();
        let (taken, slots) = (self.taken, self.slots);
        if submitted < taken {
            return Err(RingBroken::Backwards { taken, submitted });
        }
        if submitted - taken > slots || submitted > SEQUENCE_MAX {
            return Err(RingBroken::Jumped { taken, submitted, slots });
        }
        while self.taken < submitted {
            let sequence = Sequence(self.taken + 1);
            let slot = sequence.slot(slots);
            if sequence.0 <= self.inherited && self.before[index(slot)] == Before::Answered {
                self.taken = sequence.0;
                continue;
            }
            if let Some(occupant) = self.unanswered[index(slot)] {
                let (sequence, occupant) = (sequence.0, occupant.0);
                return Err(RingBroken::Unanswered { sequence, occupant });
            }
            self.words.read_descriptor(slot, descriptor);
            let found = descriptor.first().copied().unwrap_or(0);
            if found != sequence.0 {
                return Err(RingBroken::SequenceDiffers { expected: sequence.0, found });
            }
            self.taken = sequence.0;
            self.unanswered[index(slot)] = Some(sequence);
            return Ok(Some(sequence));
        }
        // The next request's lines are on their way while its count is: they need not be waited for one after the other.
        self.words.touch_request(Sequence(self.taken + 1).slot(slots));
        Ok(None)
    }

    /// The slot of a request that is taken and not answered.
    ///
    /// # Panics
    /// When it is not.
    pub fn slot_of(&self, sequence: Sequence) -> u64 {
        let slot = sequence.slot(self.slots);
        let occupant = self.unanswered[index(slot)];
        assert_eq!(occupant, Some(sequence), "a request is taken before, and answered once");
        slot
    }

    /// Under how many executors that had accepted it, and then died, a request was: 0, 1, or 2 for more.
    ///
    /// # Panics
    /// When the request is not taken, or was answered.
    pub fn deaths(&self, sequence: Sequence) -> u8 {
        let slot = self.slot_of(sequence);
        match self.before[index(slot)] {
            Before::Died(deaths) if sequence.0 <= self.inherited => deaths,
            Before::Died(_) | Before::Answered => 0,
        }
    }

    /// Tells the submitter that a request was checked and will be answered, and the next executor that it was begun.
    ///
    /// # Panics
    /// When the request is not taken, or was answered.
    pub fn accept(&self, sequence: Sequence) {
        let slot = self.slot_of(sequence);
        let phase = if self.deaths(sequence) == 0 { PHASE_ACCEPTED } else { PHASE_ACCEPTED_AGAIN };
        // SYNC: `SubmitterRing::poll` acquires it; nothing else is told by it.
        self.words.state(slot).store_release(sequence.state(phase));
    }

    /// Raises the wake word, for a submitter that sleeps on it; then wake who sleeps there.
    pub fn raise_wake(&self) {
        // Only the executor writes it. What a hostile submitter stores there misleads its own threads.
        let next = self.words.wake().load_relaxed().wrapping_add(1);
        // SYNC: releases the answer's `state`, which was stored before; see `SubmitterRing::prepare_sleep`.
        self.words.wake().store_release(next);
    }

    /// Gives a request its one answer; true if the submitter sleeps and wants its doorbell rung. From here the slot is the
    /// submitter's again.
    ///
    /// # Panics
    /// When the request is not taken, or was answered.
    pub fn answer(&mut self, sequence: Sequence, answer: &[u64]) -> bool {
        let slot = self.slot_of(sequence);
        self.words.write_answer(slot, answer);
        self.unanswered[index(slot)] = None;
        // SYNC: releases the answer; `SubmitterRing::poll` acquires it by its load of `state`.
        self.words.state(slot).store_release(sequence.state(PHASE_ANSWERED));
        // SYNC: pairs with the fence in `SubmitterRing::prepare_sleep`, for the reason told in `SubmitterRing::publish`.
        fence_seq_cst();
        self.words.submitter_sleeping().load_relaxed() != 0
    }

    /// How many requests are taken and not answered.
    pub fn outstanding(&self) -> usize {
        self.unanswered.iter().flatten().count()
    }

    /// Says that the executor is about to sleep; false if there is a request to take first (then it is awake again). After
    /// true, every request that is published rings the doorbell. A broken ring has nothing to take.
    pub fn prepare_sleep(&self) -> bool {
        self.words.executor_sleeping().store_relaxed(1);
        // SYNC: pairs with the fence in `SubmitterRing::publish`: either this load sees the new count, or the submitter
        // sees that the executor sleeps.
        fence_seq_cst();
        let submitted = self.words.submitted().load_relaxed();
        let idle = submitted == self.taken || self.broken.is_some();
        if !idle {
            self.cancel_sleep();
        }
        idle
    }

    /// Says that the executor is awake.
    pub fn cancel_sleep(&self) {
        self.words.executor_sleeping().store_relaxed(0);
    }
}

fn private_slots<T: Clone>(slots: u64, value: T) -> Box<[T]> {
    assert!(slots.is_power_of_two(), "a ring has a power of two of slots");
    vec![value; index(slots)].into_boxed_slice()
}

/// A slot as an index of a private table. A ring has at most 1,024 slots, a lane at most 4,096.
pub(crate) fn index(slot: u64) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}
