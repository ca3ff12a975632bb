//! The captured graphs of one session: copies that were armed once, and are made at every replay.
//!
//! ```text
//!           the bell names a slot             its stream wrote done       the bell is 0
//! idle ──────check the slot's copy──> running ─────────────────> answered ────────────> idle
//!   └──fault, or no such slot──> failed: every wait of the graph goes on, nothing moved
//! ```
//!
//! A slot holds a binding, regions and offsets, and no address: what it names is looked up, and checked again, at each bell. So it
//! stays good when layers sleep and wake in other memory; and where they are gone, nothing moves.
//!
//! A bell wakes nobody. While a pair is armed the executor looks at it: one load each. When there is nothing else to do it looks the next
//! slot up, and prepares for it; what comes is looked up and checked for itself.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::RefusalCode;
use statecopy_session::pair::DONE;
use statecopy_session::{
    CopyRequest, Fault, MappedPair, PairNumber, PairTaker, SessionMemory, SlotNumber, Subject,
    Wanted,
};

use crate::counters::{Counter, Counters};
use crate::record::SlotRecord;

use super::copying::Order;
use super::counts::RingCounts;
use super::ids::ById;
use super::ordered::{OrderedCopy, Over, Running, lost, refused};
use super::sessions::Sessions;
use super::station::{Trouble, Turn};
use super::table::SessionTable;

/// What a slot copies.
#[derive(Debug, Clone, Copy)]
struct Slot {
    request: CopyRequest,
    patience_ns: u64,
}

/// A pair of words, and the slots that its graph may ring.
#[derive(Debug)]
pub(super) struct ArmedPair {
    number: PairNumber,
    taker: PairTaker<MappedPair>,
    slots: ById<SlotNumber, Slot>,
    /// Its graph rang before the daemon drained, and its copy has not begun.
    is_owed: bool,
    /// The slot that was copied last.
    last: Option<SlotNumber>,
    /// Its next copy was prepared for, or runs.
    is_expected: bool,
}

impl ArmedPair {
    /// What follows the slot that was copied last.
    fn next(&self) -> Option<&Slot> {
        let at = |number| SlotNumber::new(number).and_then(|number| self.slots.get(&number));
        let last = self.last.map_or(0, SlotNumber::get);
        at(last + 1).or_else(|| at(1))
    }
}

/// A bell that rang.
#[derive(Debug, Clone, Copy)]
struct Rung {
    /// The place of its pair.
    at: usize,
    slot: u64,
    deaths: u8,
}

/// The graphs of one session.
#[derive(Debug)]
pub(super) struct Graphs<D: Device> {
    memory: SessionMemory,
    words: Arc<D::Words>,
    pairs: Vec<ArmedPair>,
    /// By the places of their pairs, which stay: no pair is disarmed while a copy runs. Room for one of each.
    running: Running<D, usize>,
    /// The pair that is looked at first: each in turn.
    first: usize,
    draining: bool,
    counts: Arc<RingCounts>,
}

impl<D: Device> Graphs<D> {
    /// No graph yet.
    pub(super) fn new(
        memory: SessionMemory,
        words: Arc<D::Words>,
        counts: Arc<RingCounts>,
    ) -> Self {
        let (pairs, running) = (Vec::new(), Running::with_room(0));
        Self { memory, words, pairs, running, first: 0, draining: false, counts }
    }

    /// Arms slots that were checked. `resumed`: an earlier executor, whose process is dead, had them armed.
    pub(super) fn arm(&mut self, slots: &[SlotRecord], resumed: bool) {
        for record in slots {
            let at = match self.place_of(record.pair) {
                Some(at) => at,
                None => self.add(record.pair, resumed),
            };
            let slot = Slot { request: record.request, patience_ns: record.patience_ns };
            self.pairs[at].slots.insert(record.slot, slot);
            self.pairs[at].is_expected = false;
        }
        self.running.make_room(self.pairs.len());
    }

    fn add(&mut self, number: PairNumber, resumed: bool) -> usize {
        let words = self.memory.pair(number);
        let taker = if resumed {
            let mut taker = PairTaker::resume(words);
            // A last write of the dead executor's device may have come after its waits were let go.
            if matches!(self.memory.failure(number), Ok(Some(_))) {
                taker.fail();
            }
            taker
        } else {
            self.memory.clear_failure(number);
            PairTaker::new(words)
        };
        let (slots, last) = (ById::default(), None);
        let (is_owed, is_expected) = (false, false);
        self.pairs.push(ArmedPair { number, taker, slots, is_owed, last, is_expected });
        self.pairs.len() - 1
    }

    /// Disarms a pair: a graph that is replayed all the same goes on at once, and nothing moves. No copy runs.
    pub(super) fn disarm(&mut self, number: PairNumber) -> Option<ArmedPair> {
        assert!(self.running.is_empty(), "no pair is disarmed while a copy runs");
        let mut pair = self.pairs.swap_remove(self.place_of(number)?);
        pair.taker.fail();
        Some(pair)
    }

    fn place_of(&self, number: PairNumber) -> Option<usize> {
        self.pairs.iter().position(|pair| pair.number == number)
    }

    /// The daemon drains: what was rung by now is copied, what rings later is not.
    pub(super) fn drain(&mut self) {
        self.draining = true;
        for pair in &mut self.pairs {
            pair.is_owed = pair.taker.is_rung();
        }
        for at in self.running.places() {
            self.pairs[at].is_owed = false;
        }
    }

    /// Whether a copy runs.
    pub(super) fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether a copy runs, or would if it were looked for.
    pub(super) fn is_due(&self) -> bool {
        self.is_busy() || self.pairs.iter().any(|pair| pair.taker.is_rung())
    }

    /// Whether a bell may ring: it wakes nobody, and is looked for.
    pub(super) fn awaits_bell(&self) -> bool {
        self.pairs.iter().any(|pair| !pair.taker.is_failed())
    }

    /// Begins at most one copy whose bell rang, and moves what runs on by at most one launch. `paused`: only what runs goes on.
    ///
    /// # Errors
    /// [`Trouble::Device`].
    pub(super) fn turn(
        &mut self,
        launcher: &mut D::Launcher,
        (sessions, table): (&Sessions<D>, Option<&Arc<SessionTable<D>>>),
        counters: &Counters,
        paused: bool,
    ) -> Result<Turn, Trouble> {
        let mut turn = Turn::Idle;
        if !paused && let Some(rung) = self.rung() {
            let hook_epoch = sessions.look_for_hooks(launcher);
            self.begin(rung, table, hook_epoch, counters);
            turn = Turn::Progressed;
        }
        // Last: the stream of what was just begun waits for every step between its bell and its launch.
        Ok(turn.max(self.step(launcher, counters)?))
    }

    /// Prepares for the slot that a graph rings next, if it rings them in the order in which they were captured, of a graph that was
    /// not prepared for. False: there is none.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        &mut self,
        launcher: &mut D::Launcher,
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
    ) -> Result<bool, DeviceFault> {
        let waits = |pair: &&mut ArmedPair| !pair.is_expected && !pair.taker.is_failed();
        let Some(pair) = self.pairs.iter_mut().find(waits) else { return Ok(false) };
        pair.is_expected = true;
        if let Some(Slot { request, .. }) = pair.next() {
            OrderedCopy::expect(launcher, table, request, hook_epoch)?;
        }
        Ok(true)
    }

    /// What was prepared for is gone.
    pub(super) fn expect_again(&mut self) {
        for pair in &mut self.pairs {
            pair.is_expected = false;
        }
    }

    /// Moves what runs on.
    fn step(&mut self, launcher: &mut D::Launcher, counters: &Counters) -> Result<Turn, Trouble> {
        let Self { memory, words, pairs, running, .. } = self;
        let order_of = |at: usize| Order {
            stream: pairs[at].number.get(),
            words: &**words,
            done_at: memory.parameters().done_at(pairs[at].number),
            done: DONE,
        };
        let (turn, over) = running.step(launcher, order_of)?;
        if let Some(over) = over {
            self.end(over, counters);
        }
        Ok(turn)
    }

    /// The next pair, in turn, whose graph has rung. Each that is looked at hears what its graph says.
    fn rung(&mut self) -> Option<Rung> {
        let first = self.first.min(self.pairs.len());
        let (before, from) = self.pairs.split_at_mut(first);
        let places = (first..).zip(from).chain((0..).zip(before));
        for (at, pair) in places {
            if let Wanted::Copy { slot, deaths } = pair.taker.look() {
                self.first = at + 1;
                return Some(Rung { at, slot, deaths });
            }
        }
        None
    }

    /// Begins the copy whose bell rang, if it may still run.
    fn begin(
        &mut self,
        Rung { at, slot, deaths }: Rung,
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
        counters: &Counters,
    ) {
        let pair = &mut self.pairs[at];
        let was_owed = std::mem::take(&mut pair.is_owed);
        let armed = SlotNumber::new(slot).and_then(|slot| pair.slots.get(&slot));
        let copy = match armed {
            _ if self.draining && !was_owed => Err(Fault::of(RefusalCode::Draining)),
            None => Err(Subject::Slot.fault(slot, pair.number.get().into())),
            Some(Slot { request, patience_ns }) => {
                OrderedCopy::begin(table, *request, (*patience_ns, deaths), hook_epoch)
            }
        };
        match copy {
            Ok(copy) => {
                (pair.last, pair.is_expected) = (SlotNumber::new(slot), true);
                pair.taker.begin();
                self.running.push(at, copy);
            }
            Err(fault) => self.fail(at, fault, counters),
        }
    }

    fn end(&mut self, Over { place: at, copy, result }: Over<D, usize>, counters: &Counters) {
        let copied = match result {
            Ok(copied) => copied,
            Err(fault) => return self.fail(at, fault, counters),
        };
        let taker = &mut self.pairs[at].taker;
        if copied.launches == 0 {
            // No stream was asked for anything.
            taker.settle_by_hand();
        }
        taker.finish();
        self.pairs[at].is_expected = false;
        copy.count(&copied, counters);
        self.counts.count(true);
    }

    /// Fails a pair of which nothing is under way.
    fn fail(&mut self, at: usize, fault: Fault, counters: &Counters) {
        counters.add(Counter::GraphsFailed, 1);
        self.counts.count(false);
        let pair = &mut self.pairs[at];
        self.memory.write_failure(pair.number, &refused(fault, counters));
        pair.taker.fail();
    }

    /// The device failed. What it was given any of is lost: its rows are undefined, and the next device process lets its graph go.
    /// The rest is left to that one.
    pub(super) fn lose(&mut self, counters: &Counters) {
        for at in self.running.lost() {
            counters.add(Counter::GraphsFailed, 1);
            self.counts.count(false);
            self.memory.write_failure(self.pairs[at].number, &lost(counters));
        }
    }
}
