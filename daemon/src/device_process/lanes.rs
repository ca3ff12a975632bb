//! The lanes of one session: stream-ordered copies, from a worker's stream to the word that it waits for.
//!
//! ```text
//! told ──check──> accepted ──the bell──> check again ──> running ──its stream wrote done──> settled
//!   └──refused                                └──fault──> the lane is failed: every wait of it goes on, nothing moved
//! ```
//!
//! Nothing of a request is given to the device before its bell: a stream that waited there would hold up other lanes, launches and
//! frees. So an accepted request is a number in the session memory and nothing else; whoever dies, or changes what it names, is
//! noticed at the bell. A request is checked when it comes and at its bell, each time as a private copy; what is prepared in
//! between is only time.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::RefusalCode;
use statecopy_session::layout::DESCRIPTOR_WORDS;
use statecopy_session::{
    Answer, CopyDescriptor, Fault, LaneNumber, LaneTaker, MappedLane, MonotonicNs, Moved,
    RingBroken, Sequence, SessionMemory,
};

use crate::counters::{Counter, Counters};

use super::checks::check;
use super::copying::Order;
use super::counts::RingCounts;
use super::ordered::{OrderedCopy, Over, Running, lost, refused};
use super::sessions::Sessions;
use super::station::{Trouble, Turn};
use super::table::SessionTable;

/// What is written for a request that an earlier executor ran to its end, and could not say so: how many rows it moved is not known.
const INHERITED: Answer =
    Answer { result: Ok(Moved { rows_copied: 0, rows_masked: 0 }), executor_ns: 0 };

/// A lane, and the number of its request that is copied.
type Place = (LaneNumber, u64);

/// The lanes of one session.
#[derive(Debug)]
pub(super) struct Lanes<D: Device> {
    memory: SessionMemory,
    words: Arc<D::Words>,
    takers: Box<[LaneTaker<MappedLane>]>,
    /// A bit for each lane that may have something to take.
    fresh: u64,
    /// A bit for each lane with something accepted and not settled.
    waiting: u64,
    /// A bit for each lane of which a copy runs.
    busy: u64,
    /// A bit for each lane whose oldest request was prepared for.
    expected: u64,
    /// Room for one of each lane.
    running: Running<D, Place>,
    /// The lane that is looked at first, for a bell and for a request: each in turn.
    first: u32,
    taken: u32,
    counts: Arc<RingCounts>,
}

impl<D: Device> Lanes<D> {
    /// The lanes of a fresh memory, or what a dead executor left of them.
    pub(super) fn open(
        memory: SessionMemory,
        words: Arc<D::Words>,
        resumed: bool,
        counts: Arc<RingCounts>,
    ) -> Self {
        let taker = |lane: LaneNumber| {
            if !resumed {
                return LaneTaker::new(memory.lane(lane));
            }
            let mut taker = LaneTaker::resume(memory.lane(lane), &INHERITED.to_words());
            // A last write of the dead executor's device may have come after its waits were let go.
            if let Ok(Some(failure)) = memory.failure(lane.pair()) {
                taker.fail(&failure.to_words());
            }
            taker
        };
        let takers: Box<[_]> = LaneNumber::all().map(taker).collect();
        let waiting = |taker: &LaneTaker<_>| taker.is_waiting();
        let waiting = bits(takers.iter().map(waiting));
        let running = Running::with_room(takers.len());
        let fresh = if resumed { u64::MAX } else { 0 };
        let (busy, expected, first, taken) = (0, 0, 0, 0);
        Self {
            memory,
            words,
            takers,
            fresh,
            waiting,
            busy,
            expected,
            running,
            first,
            taken,
            counts,
        }
    }

    /// Whether a copy runs.
    pub(super) fn is_busy(&self) -> bool {
        self.busy != 0
    }

    /// Whether a copy runs, or would if it were looked for.
    pub(super) fn is_due(&self) -> bool {
        self.busy != 0 || self.takers.iter().any(|taker| taker.rung().is_some())
    }

    /// Whether a bell may ring: it wakes nobody, and is looked for.
    pub(super) fn awaits_bell(&self) -> bool {
        self.waiting != 0
    }

    /// Whether nothing runs and nothing is to be taken. After the fence of the ring's own hand-shake.
    pub(super) fn may_sleep(&self) -> bool {
        self.busy == 0 && self.fresh == 0 && !self.memory.has_fresh_lanes()
    }

    /// Takes at most one request, begins at most one whose bell rang, and moves what runs on by at most one launch. `paused`: only
    /// what runs goes on. `closed`: what comes is refused.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn turn(
        &mut self,
        launcher: &mut D::Launcher,
        (sessions, table): (&Sessions<D>, Option<&Arc<SessionTable<D>>>),
        counters: &Counters,
        (paused, closed): (bool, bool),
    ) -> Result<Turn, Trouble> {
        let mut turn = Turn::Idle;
        if !paused {
            self.fresh |= self.memory.take_fresh_lanes();
        }
        if !paused && self.fresh | self.waiting & !self.busy != 0 {
            let hook_epoch = sessions.look_for_hooks(launcher);
            if self.fresh != 0 {
                self.take(table, hook_epoch, counters, closed)?;
                turn = Turn::Progressed;
            }
            if let Some(rung) = self.rung() {
                self.begin(rung, table, hook_epoch, counters)?;
                turn = Turn::Progressed;
            }
        }
        // Last: the stream of what was just begun waits for every step between its bell and its launch.
        Ok(turn.max(self.step(launcher, counters)?))
    }

    /// Prepares for the oldest request of a lane that was not prepared for. False: there is none.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        &mut self,
        launcher: &mut D::Launcher,
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
    ) -> Result<bool, DeviceFault> {
        let lane = (self.waiting & !self.busy & !self.expected).trailing_zeros();
        let Some(taker) = self.takers.get(index(lane)) else { return Ok(false) };
        self.expected |= 1 << lane;
        let mut words = [0; DESCRIPTOR_WORDS];
        if taker.head(&mut words).is_some()
            && let Ok(request) = CopyDescriptor::from_words(words).parse_ordered()
        {
            OrderedCopy::expect(launcher, table, &request, hook_epoch)?;
        }
        Ok(true)
    }

    /// What was prepared for is gone.
    pub(super) fn expect_again(&mut self) {
        self.expected = 0;
    }

    /// Moves what runs on.
    fn step(&mut self, launcher: &mut D::Launcher, counters: &Counters) -> Result<Turn, Trouble> {
        let Self { memory, words, running, .. } = self;
        let order_of = |(lane, number): Place| Order {
            stream: lane.get(),
            words: &**words,
            done_at: memory.parameters().done_at(lane.pair()),
            done: number,
        };
        let (turn, over) = running.step(launcher, order_of)?;
        if let Some(over) = over {
            self.end(over, counters);
        }
        Ok(turn)
    }

    /// Takes a request of the first lane that may have one, and says whether it is accepted.
    fn take(
        &mut self,
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
        counters: &Counters,
        closed: bool,
    ) -> Result<(), RingBroken> {
        let lane = next_of(self.fresh, self.taken);
        self.taken = (lane + 1) % u64::BITS;
        let taker = &mut self.takers[index(lane)];
        let mut words = [0; DESCRIPTOR_WORDS];
        let Some(sequence) = taker.take(&mut words)? else {
            self.fresh &= !(1 << lane);
            return Ok(());
        };
        let acceptable = match (closed, taker.is_failed()) {
            (true, _) => Err(Fault::of(RefusalCode::Draining)),
            (_, true) => Err(Fault::of(RefusalCode::DeviceLost)),
            _ => CopyDescriptor::from_words(words)
                .parse_ordered()
                .and_then(|request| {
                    check(table.map(|table| &**table), &request, hook_epoch, MonotonicNs(0))
                })
                .map(drop),
        };
        match acceptable {
            Ok(()) => {
                taker.accept(sequence);
                self.waiting |= 1 << lane;
            }
            Err(fault) => {
                self.counts.count(false);
                taker.refuse(sequence, &refused(fault, counters).to_words());
            }
        }
        Ok(())
    }

    /// The next lane, in turn, whose worker's stream has reached its oldest request, and that request.
    fn rung(&mut self) -> Option<(LaneNumber, Sequence)> {
        let mut left = self.waiting & !self.busy;
        while left != 0 {
            let lane = next_of(left, self.first);
            if let Some(sequence) = self.takers[index(lane)].rung() {
                self.first = (lane + 1) % u64::BITS;
                return LaneNumber::new(lane).map(|lane| (lane, sequence));
            }
            left &= !(1 << lane);
        }
        None
    }

    /// Begins the request whose bell rang, if it may still run.
    fn begin(
        &mut self,
        (lane, sequence): (LaneNumber, Sequence),
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
        counters: &Counters,
    ) -> Result<(), RingBroken> {
        let mut words = [0; DESCRIPTOR_WORDS];
        let deaths = self.takers[index(lane.get())].begin(&mut words)?;
        let descriptor = CopyDescriptor::from_words(words);
        let how = (descriptor.deadline_ns, deaths);
        let copy = descriptor
            .parse_ordered()
            .and_then(|request| OrderedCopy::begin(table, request, how, hook_epoch));
        match copy {
            Ok(copy) => {
                self.busy |= 1 << lane.get();
                self.expected &= !(1 << lane.get());
                self.running.push((lane, sequence.get()), copy);
            }
            Err(fault) => self.fail(lane, fault, counters),
        }
        Ok(())
    }

    fn end(
        &mut self,
        Over { place: (lane, _), copy, result }: Over<D, Place>,
        counters: &Counters,
    ) {
        self.busy &= !(1 << lane.get());
        let copied = match result {
            Ok(copied) => copied,
            Err(fault) => return self.fail(lane, fault, counters),
        };
        let executor_ns = copy.count(&copied, counters);
        self.counts.count(true);
        let taker = &mut self.takers[index(lane.get())];
        if copied.launches == 0 {
            // No stream was asked for anything, and none of this lane has anything under way.
            taker.settle_by_hand();
        }
        taker.finish(&Answer { result: Ok(copied.moved), executor_ns }.to_words());
        self.note_waiting(lane);
    }

    /// Fails a lane of which nothing is under way.
    fn fail(&mut self, lane: LaneNumber, fault: Fault, counters: &Counters) {
        counters.add(Counter::LanesFailed, 1);
        self.counts.count(false);
        let answer = refused(fault, counters);
        self.memory.write_failure(lane.pair(), &answer);
        self.takers[index(lane.get())].fail(&answer.to_words());
        self.note_waiting(lane);
    }

    fn note_waiting(&mut self, lane: LaneNumber) {
        if !self.takers[index(lane.get())].is_waiting() {
            self.waiting &= !(1 << lane.get());
        }
    }

    /// The device failed. What it was given any of is lost: its rows are undefined, and the next device process lets its lane go.
    /// The rest is left to that one.
    pub(super) fn lose(&mut self, counters: &Counters) {
        for (lane, _) in self.running.lost() {
            counters.add(Counter::LanesFailed, 1);
            self.counts.count(false);
            self.memory.write_failure(lane.pair(), &lost(counters));
        }
    }
}

/// The first bit that is set, from one on and round again.
fn next_of(bits: u64, from: u32) -> u32 {
    (bits.rotate_right(from).trailing_zeros() + from) % u64::BITS
}

/// The first bit for the first.
fn bits(each: impl Iterator<Item = bool>) -> u64 {
    each.enumerate().fold(0, |bits, (at, bit)| bits | u64::from(bit) << at)
}

fn index(lane: u32) -> usize {
    usize::try_from(lane).unwrap_or(usize::MAX)
}
