//! Graph lanes: copies that a captured graph makes at every replay.
//!
//! ```text
//! arm() ──refused: an error of the capture
//!   └─armed──> the graph holds four steps: wait for idle, ring, wait for done, take note ──> each replay copies in between
//! ```
//!
//! A slot is armed once, while the graph is captured, and the daemon checks its copy again at every replay. It names a layer and
//! places in regions: so it stays good when the layer sleeps and is bound to other memory of the same signature, and when the device
//! process is started again. What cannot be copied frees the graph: every wait goes on, rows are undefined, and
//! [`GraphLane::check`] says why. So does the end of the daemon.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_descriptors::Mapping;
use statecopy_proto::{Direction, Refusal, RefusalCode, v1};
use statecopy_session::layout::{LANES, PAIRS};
use statecopy_session::pair::{DONE, IDLE, PairWords as _};
use statecopy_session::{Answer, FREED, MappedPair, PairNumber, SlotNumber};

use crate::blocking;
use crate::call::{Call, Failure};
use crate::copies::resolve;
use crate::error::Error;
use crate::lanes::{LaneWord, Lanes, Waiting, earlier_life, unread};
use crate::link::Link;
use crate::lock::lock;
use crate::ring::Held;
use crate::transport::{direction_message, message};
use crate::{Plan, Request};

/// How long the daemon is given to disarm a graph before somebody looks again whether it lives.
const DISARM_MAX: Duration = Duration::from_millis(100);
/// How long it is let alone after that: a registration of the session may take minutes, and is not to be asked all the while.
const DISARM_AGAIN: Duration = Duration::from_millis(500);

/// The pairs of words that the graphs of one session have.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    taken: BTreeSet<PairNumber>,
    /// Those of which a copy may have been under way when nobody served it any more.
    cut: BTreeSet<PairNumber>,
    /// Those of graphs that are gone, which the daemon is to hear.
    dropped: Vec<Dropped>,
    /// Until then it is not asked to hear.
    let_alone: Option<Instant>,
}

/// A graph that is gone.
#[derive(Debug)]
struct Dropped {
    pair: PairNumber,
    client: blocking::Client,
    /// What its copies touch: kept until the daemon knows, too.
    _held: Vec<Held>,
}

impl Pairs {
    /// Takes a pair that no graph has.
    fn take(&mut self) -> Result<PairNumber, Refusal> {
        let free =
            (LANES..PAIRS).filter_map(PairNumber::of_graph).find(|pair| !self.taken.contains(pair));
        let pair = free.ok_or_else(|| {
            let sentence = format!("All {} graph lanes of the session are open", PAIRS - LANES);
            Refusal::new(RefusalCode::QuotaExceeded, sentence)
                .about("graph")
                .remedied_by("Drop graphs that are no longer replayed.")
        })?;
        self.taken.insert(pair);
        Ok(pair)
    }

    /// The graphs that the daemon is to hear of now.
    fn take_dropped(&mut self, is_over: bool) -> Vec<Dropped> {
        if !is_over && self.let_alone.is_some_and(|until| Instant::now() < until) {
            return Vec::new();
        }
        std::mem::take(&mut self.dropped)
    }
}

impl Lanes {
    /// The words of every graph.
    pub(crate) fn pairs(&self) -> Vec<MappedPair> {
        self.taken_pairs().into_iter().map(|(_, words)| words).collect()
    }

    fn taken_pairs(&self) -> Vec<(PairNumber, MappedPair)> {
        let pairs = lock(&self.graphs).taken.clone();
        pairs.into_iter().map(|pair| (pair, self.memory.pair(pair))).collect()
    }

    /// Whether a copy of a graph is not over.
    pub(crate) fn has_unsettled_graphs(&self) -> bool {
        self.taken_pairs().iter().any(|(_, words)| is_unsettled(words))
    }

    /// Notes which graphs wait for a copy, before they are let go: it may have moved bytes.
    pub(crate) fn note_cut_graphs(&self) {
        let cut = self.taken_pairs().into_iter().filter(|(_, words)| is_unsettled(words));
        let cut: Vec<_> = cut.map(|(pair, _)| pair).collect();
        lock(&self.graphs).cut.extend(cut);
    }

    /// Tells the daemon of graphs that are gone. Once nobody serves them nobody needs to hear.
    pub(crate) fn disarm_dropped(self: &Arc<Self>) {
        let is_over = self.silence.get().is_some();
        let mut dropped = lock(&self.graphs).take_dropped(is_over);
        while let Some(graph) = dropped.pop() {
            if !is_over && self.disarm(&graph).is_err() {
                // It is asked again later: nothing of the graph is let go before.
                dropped.push(graph);
                lock(&self.graphs).let_alone = Instant::now().checked_add(DISARM_AGAIN);
                break;
            }
            lock(&self.graphs).taken.remove(&graph.pair);
        }
        lock(&self.graphs).dropped.append(&mut dropped);
    }

    fn disarm(self: &Arc<Self>, graph: &Dropped) -> Result<(), Failure> {
        let call = Call::new("disarm a graph", DISARM_MAX);
        let link = self.live_link(graph.client.as_async())?.ok_or(Failure::Late)?;
        let (session, pair) = (Some(link.reference()), graph.pair.get());
        let request = call.request(v1::DisarmGraphRequest { session, pair })?;
        let disarm = async { Ok(call.answer(link.registry().disarm_graph(request)).await) };
        let reply = graph.client.drive(disarm)??;
        Ok(link.same_life(&reply.incarnation)?)
    }
}

/// Whether a graph has rung and its copy is not done.
pub(crate) fn is_unsettled(words: &MappedPair) -> bool {
    words.bell().load_relaxed() != 0 && words.done().load_relaxed() & DONE == 0
}

/// The copies that one captured graph makes on one stream: one pair of words, and a slot for each copy.
///
/// Keep it for as long as the graph may be replayed. It belongs to one life of the daemon; once that is over it says so at every call,
/// and the graph is to be captured again.
///
/// ```no_run
/// # use std::time::Duration;
/// # use statecopy_client::blocking::{Client, Plan};
/// # use statecopy_client::{Direction, Error, Request, Step};
/// # fn capture(client: &Client, plan: &Plan, request: &Request<'_>) -> Result<(), Error> {
/// let mut lane = client.open_graph_lane()?;
/// let gather = lane.arm(plan, Direction::Gather, request)?;
/// for step in gather.steps() {
///     match step {
///         Step::Write(word) => { /* the graph writes it: cuStreamWriteValue64 while it is captured */ }
///         Step::WaitAny(word) => { /* the graph waits: cuStreamWaitValue64, CU_STREAM_WAIT_VALUE_AND */ }
///     }
/// }
/// // Work that is no stream of a device replays by itself.
/// gather.replay(&lane, Duration::from_secs(1))?;
/// lane.check()
/// # }
/// ```
#[derive(Debug)]
pub struct GraphLane {
    lanes: Arc<Lanes>,
    pair: PairNumber,
    words: MappedPair,
    client: blocking::Client,
    /// The last slot that the daemon was asked to arm.
    last: u64,
    /// Whether it has armed one.
    is_armed: bool,
    /// What copies of the graph touch.
    held: Vec<Held>,
}

/// A copy that a graph makes at every replay, once it holds its four steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a copy is made where a graph holds its steps"]
pub struct Armed {
    slot: SlotNumber,
    bell_at: u64,
    done_at: u64,
}

/// What a stream does to a word of the shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It writes the value.
    Write(LaneWord),
    /// It waits until the word has any bit of the value.
    WaitAny(LaneWord),
}

impl GraphLane {
    /// Opens a graph lane of the client's session.
    pub(crate) fn open(client: &blocking::Client) -> Result<Self, Error> {
        let shared = &client.as_async().shared;
        let call = Call::new("open a graph lane", shared.options.call_timeout);
        let lanes = Lanes::of(client, call)?;
        let pair = lock(&lanes.graphs).take();
        let pair = pair.map_err(|refusal| call.error(&shared.address, refusal.into()))?;
        let words = lanes.memory.pair(pair);
        // What a graph before it left there.
        words.bell().store_release(0);
        let client = client.clone();
        Ok(Self { lanes, pair, words, client, last: 0, is_armed: false, held: Vec::new() })
    }

    /// The shared memory that the words of [`Armed`] are offsets of, and the range that all such words lie in: the same as
    /// [`crate::StreamLane::memory`] gives.
    #[must_use]
    pub fn memory(&self) -> (&Arc<Mapping>, Range<u64>) {
        let memory = &self.lanes.memory;
        (memory.mapping(), memory.parameters().pair_words())
    }

    /// Arms the next slot: the daemon checks the copy as it checks a request, and keeps it for the graph's replays. Indices and flags
    /// lie in registered memory, and are read at each replay. The request's deadline counts from each bell.
    ///
    /// # Errors
    /// The daemon's refusal, as of [`crate::Plan::gather`]; QUOTA_EXCEEDED when no slot is left. What [`GraphLane::check`] says.
    pub fn arm(
        &mut self,
        plan: &blocking::Plan,
        direction: Direction,
        request: &Request<'_>,
    ) -> Result<Armed, Error> {
        let plan = plan.as_async();
        let shared = &plan.client().shared;
        let call = Call::new("arm a graph", shared.options.call_timeout);
        let armed = self.arm_slot(plan, direction, request, &call);
        armed.map_err(|failure| call.error(&shared.address, failure))
    }

    fn arm_slot(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
        call: &Call,
    ) -> Result<Armed, Failure> {
        self.sound()?;
        let link = self.lanes.live_link(plan.client())?.ok_or_else(|| self.earlier_life())?;
        let slot = SlotNumber::new(self.last + 1).ok_or_else(full)?;
        let patience = plan.client().copy_deadline(request);
        let mut copy = resolve(&link, &plan.record, direction, request, Some(patience))?;
        let directed = v1::DirectedCopy {
            direction: direction_message(direction).into(),
            copy: Some(message(&copy, None)),
        };
        // Whatever is answered: a slot that may be armed is not asked for again.
        self.last = slot.get();
        self.arm_on(&link, slot, directed, call)?;
        self.is_armed = true;
        self.held.push(std::mem::take(&mut copy.held));
        let parameters = self.lanes.memory.parameters();
        let (bell_at, done_at) = (parameters.bell_at(self.pair), parameters.done_at(self.pair));
        Ok(Armed { slot, bell_at, done_at })
    }

    fn arm_on(
        &self,
        link: &Link,
        slot: SlotNumber,
        copy: v1::DirectedCopy,
        call: &Call,
    ) -> Result<(), Failure> {
        let request = call.request(v1::ArmGraphRequest {
            session: Some(link.reference()),
            pair: self.pair.get(),
            slot: u32::try_from(slot.get()).unwrap_or(u32::MAX),
            copy: Some(copy),
        })?;
        let arm = async { Ok(call.answer(link.registry().arm_graph(request)).await) };
        let reply = self.client.drive(arm)??;
        Ok(link.same_life(&reply.incarnation)?)
    }

    /// Whether every replay so far was or will be copied. A load or two: for the end of each step.
    ///
    /// # Errors
    /// Why the graph was failed: its waits went on, and rows that were not there yet are undefined. STALE_PLAN or REGION_UNKNOWN when
    /// what it copies is not there any more, INCARNATION_MISMATCH when the daemon that it was captured with is gone, UNAVAILABLE when
    /// it went away under a copy.
    pub fn check(&self) -> Result<(), Error> {
        self.sound().map_err(|failure| {
            let shared = &self.client.as_async().shared;
            let call = Call::new("check a graph", shared.options.call_timeout);
            call.error(&shared.address, failure)
        })
    }

    fn sound(&self) -> Result<(), Failure> {
        let is_freed = self.is_armed && self.words.done().load_acquire() == FREED;
        if !is_freed && self.lanes.silence.get().is_none() {
            return Ok(());
        }
        match self.lanes.memory.failure(self.pair).map_err(unread)? {
            Some(Answer { result: Err(fault), .. }) if is_freed => Err(fault.to_refusal().into()),
            _ => Err(self.earlier_life()),
        }
    }

    fn earlier_life(&self) -> Failure {
        let was_cut = lock(&self.lanes.graphs).cut.contains(&self.pair);
        match self.lanes.silence.get().filter(|_| was_cut) {
            Some(silence) => silence.after_start(),
            None => earlier_life("graph", "Capture the graph again."),
        }
    }

    fn wait_any(&self, bits: u64, until: Option<Instant>) -> Result<(), Error> {
        // SYNC: acquires the rows that the copy wrote.
        let is_there = || self.words.done().load_acquire() & bits != 0;
        if Waiting::until(until, is_there) {
            return Ok(());
        }
        let sentence = "A replay of the graph was not done in time";
        Err(Refusal::new(RefusalCode::DeadlineExceeded, sentence).into())
    }
}

impl Drop for GraphLane {
    fn drop(&mut self) {
        // It may be the driver that lets a graph go, in a thread that must not wait: another one tells the daemon.
        let mut pairs = lock(&self.lanes.graphs);
        if self.last == 0 {
            pairs.taken.remove(&self.pair);
            return;
        }
        let (pair, client) = (self.pair, self.client.clone());
        pairs.dropped.push(Dropped { pair, client, _held: std::mem::take(&mut self.held) });
    }
}

impl Armed {
    /// What the graph does, in this order, behind what the copy comes after and before what comes after the copy.
    #[must_use]
    pub fn steps(&self) -> [Step; 4] {
        let bell = |value| Step::Write(LaneWord { offset: self.bell_at, value });
        let done = |value| Step::WaitAny(LaneWord { offset: self.done_at, value });
        [done(IDLE), bell(self.slot.get()), done(DONE), bell(0)]
    }

    /// Does the four steps on this thread, for work that is no stream of a device. One thread at a time, for all slots of a lane.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED when a wait takes longer than that; the lane is of no more use then. What [`GraphLane::check`] says.
    pub fn replay(&self, lane: &GraphLane, timeout: Duration) -> Result<(), Error> {
        for step in self.steps() {
            match step {
                // SYNC: releases what this thread wrote before: the copy reads it.
                Step::Write(word) => lane.words.bell().store_release(word.value),
                Step::WaitAny(word) => {
                    lane.wait_any(word.value, Instant::now().checked_add(timeout))?;
                }
            }
        }
        lane.check()
    }
}

fn full() -> Refusal {
    let sentence = format!("All {} slots of the graph are armed", SlotNumber::MAX.get());
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .about("slot")
        .remedied_by("Open another graph lane.")
}
