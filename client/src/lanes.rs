//! Lanes: copies in the order of a worker's stream.
//!
//! ```text
//! order() ──refused: an error, nothing is on the stream
//!    └─accepted──> the stream writes the bell, waits for done ──> the copy ran in between
//! ```
//!
//! The host waits for the check of a request and for nothing else. Two words of memory that is shared with the daemon order the copy
//! between what the stream was asked before and after: [`Ordered::bell`] and [`Ordered::done`]. A CUDA stream writes and waits for
//! them itself; a worker of the host device does it on whatever thread its work runs ([`Ordered::ring`], [`Ordered::wait`]).
//!
//! A copy that cannot be made once its bell has rung frees the stream: every wait of the lane goes on, its packed rows are undefined,
//! and every later call on the lane says why, as [`StreamLane::check`] does. So does the end of the daemon.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use statecopy_descriptors::{Doorbell, Mapping};
use statecopy_proto::{Direction, Refusal, RefusalCode, SessionId};
use statecopy_session::lane::{LaneWords as _, phase_of};
use statecopy_session::layout::ANSWER_WORDS;
use statecopy_session::{
    Answer, AnswerError, CopyDescriptor, FREED, LaneNumber, LanePhase, LaneSubmitter, MappedLane,
    Sequence, SessionMemory, StateBroken,
};

use crate::blocking;
use crate::call::{Call, Failure};
use crate::copies::resolve;
use crate::error::{Error, ProtocolError};
use crate::graphs::Pairs;
use crate::link::Link;
use crate::lock::lock;
use crate::ring::Held;
use crate::socket::{DescriptorSocket, Silence};
use crate::{Client, Plan, Request};

/// How often somebody looks whether the daemon lives while lanes are open.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For how long an answer to a request is looked for without giving way to others.
const SPIN: Duration = Duration::from_micros(100);

/// The lanes of one session, shared by those that are open.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) memory: SessionMemory,
    bell: Doorbell,
    session: SessionId,
    socket: Arc<DescriptorSocket>,
    /// A bit for each lane that is open.
    open: Mutex<u64>,
    pub(crate) graphs: Mutex<Pairs>,
    /// Why nothing is run any more.
    pub(crate) silence: OnceLock<Silence>,
    watched: Mutex<bool>,
    /// What copies touch that nobody waits for any more: kept until the session's end.
    kept: Mutex<Vec<Held>>,
    /// Notified at the end.
    end: Arc<(Mutex<bool>, Condvar)>,
}

impl Lanes {
    pub(crate) fn new(
        memory: SessionMemory,
        bell: Doorbell,
        session: SessionId,
        socket: Arc<DescriptorSocket>,
    ) -> Self {
        Self {
            memory,
            bell,
            session,
            socket,
            open: Mutex::default(),
            graphs: Mutex::default(),
            silence: OnceLock::new(),
            watched: Mutex::default(),
            kept: Mutex::default(),
            end: Arc::default(),
        }
    }

    /// Those of the client's session.
    pub(crate) fn of(client: &blocking::Client, call: Call) -> Result<Arc<Self>, Error> {
        let link = client.link(call)?;
        let lanes = link
            .carrier
            .lanes()
            .ok_or_else(|| call.error(&client.as_async().shared.address, no_lanes().into()))?;
        Self::watch(lanes)?;
        Ok(Arc::clone(lanes))
    }

    /// The link of the session that they are of, while it lives.
    pub(crate) fn live_link(
        self: &Arc<Self>,
        client: &Client,
    ) -> Result<Option<Arc<Link>>, Failure> {
        let live = client.shared.live_link().map_err(Failure::Local)?;
        let is_of_it =
            |link: &Arc<Link>| link.carrier.lanes().is_some_and(|lanes| Arc::ptr_eq(lanes, self));
        Ok(live.filter(is_of_it))
    }

    /// Takes a lane that nobody has.
    fn take(&self) -> Result<LaneNumber, Refusal> {
        let mut open = lock(&self.open);
        let number = open.trailing_ones();
        let lane = LaneNumber::new(number).ok_or_else(|| {
            let sentence = format!("All {number} lanes of the session are open or were failed");
            Refusal::new(RefusalCode::QuotaExceeded, sentence)
                .about("lane")
                .remedied_by("Drop lanes that are no longer used; use one lane for each stream.")
        })?;
        *open |= 1 << number;
        Ok(lane)
    }

    fn give_back(&self, lane: LaneNumber) {
        *lock(&self.open) &= !(1 << lane.get());
    }

    /// Has a thread look whether the daemon lives, from the first lane on: a stream that waits for it cannot.
    fn watch(lanes: &Arc<Self>) -> Result<(), Error> {
        let mut watched = lock(&lanes.watched);
        if !*watched {
            let (weak, end) = (Arc::downgrade(lanes), Arc::clone(&lanes.end));
            let thread = thread::Builder::new().name("statecopy-lanes".to_owned());
            thread.spawn(move || watch(&weak, &end)).map_err(Error::Runtime)?;
            *watched = true;
        }
        Ok(())
    }

    /// The words of every lane that is open now.
    fn opened(&self) -> impl Iterator<Item = MappedLane> {
        let open = *lock(&self.open);
        let is_open = move |lane: &LaneNumber| open >> lane.get() & 1 == 1;
        LaneNumber::all().filter(is_open).map(|lane| self.memory.lane(lane))
    }

    /// Whether a copy of an open lane or a graph is not over.
    pub(crate) fn has_unsettled(&self) -> bool {
        let is_unsettled = |words: MappedLane| {
            let last = Sequence::new(words.submitted().load_relaxed());
            last.is_some_and(|last| phase_of(&words, last) != Ok(LanePhase::Settled))
        };
        self.opened().any(is_unsettled) || self.has_unsettled_graphs()
    }

    /// Lets every wait of every open lane and of every graph go on. The executor's process is known dead, or never writes for this session again.
    fn free(&self) {
        for words in self.opened() {
            // SYNC: the worker's stream waits for it; the silence is seen by who sees it.
            words.done().store_release(FREED);
        }
        self.free_graphs();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // A stream may still wait for what is never run now.
        self.free();
        *lock(&self.end.0) = true;
        self.end.1.notify_all();
    }
}

/// Frees the lanes once nobody serves them any more, and again as long as they are open: a last write may come late.
fn watch(lanes: &Weak<Lanes>, (ended, end): &(Mutex<bool>, Condvar)) {
    let mut over = lock(ended);
    while !*over {
        over = end.wait_timeout(over, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        let Some(lanes) = lanes.upgrade() else { return };
        // Not held while the lanes are let go: their end takes it.
        drop(over);
        if let Some(silence) = lanes.socket.silence() {
            if lanes.silence.get().is_none() {
                lanes.note_cut_graphs();
            }
            lanes.silence.get_or_init(|| silence);
            lanes.free();
        }
        lanes.disarm_dropped();
        drop(lanes);
        over = lock(ended);
    }
}

/// An ordered sequence of copies of one session: one for each stream of a worker.
///
/// It belongs to one life of the daemon. Once that is over it says so at every call; open another then. A lane whose copies are not
/// all done when it is dropped stays taken until the session ends.
#[derive(Debug)]
pub struct StreamLane {
    lanes: Arc<Lanes>,
    number: LaneNumber,
    submitter: LaneSubmitter<MappedLane>,
    /// The memory of copies that may not be done.
    held: VecDeque<(Sequence, Held)>,
    client: blocking::Client,
    /// A request was never said to be accepted or refused. It may be accepted yet, and the next bell would ring it, too.
    unsure: bool,
}

/// A copy that was accepted, and runs once its bell rings.
///
/// Dropped without its bell, it runs when the bell of a later one rings.
#[derive(Debug)]
#[must_use = "a copy runs when its bell rings"]
pub struct Ordered<'a> {
    lane: &'a StreamLane,
    sequence: Sequence,
}

/// A 64-bit word of the shared memory of a lane, and a value of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneWord {
    /// Bytes from the start of the mapping.
    pub offset: u64,
    /// What is written, or waited for.
    pub value: u64,
}

impl StreamLane {
    /// Opens a lane of the client's session.
    pub(crate) fn open(client: &blocking::Client) -> Result<Self, Error> {
        let call = Call::new("open a lane", client.as_async().shared.options.call_timeout);
        let failed = |failure| call.error(&client.as_async().shared.address, failure);
        let lanes = Lanes::of(client, call)?;
        let number = lanes.take().map_err(|refusal| failed(refusal.into()))?;
        let submitter = LaneSubmitter::resume(lanes.memory.lane(number));
        let submitter = submitter.map_err(|error| failed(broken(error)))?;
        let (held, client) = (VecDeque::new(), client.clone());
        Ok(Self { lanes, number, submitter, held, client, unsure: false })
    }

    /// The shared memory that the words of [`Ordered`] are offsets of, and the range that all such words lie in.
    #[must_use]
    pub fn memory(&self) -> (&Arc<Mapping>, Range<u64>) {
        let memory = &self.lanes.memory;
        (memory.mapping(), memory.parameters().pair_words())
    }

    /// Asks for a copy behind all earlier ones of the lane, and waits until it was checked. Indices and flags lie in registered
    /// memory. Where as many are accepted and not done as the daemon allows, it waits for a place.
    ///
    /// # Errors
    /// The daemon's refusal, as of [`crate::Plan::gather`]: nothing is to be put on the stream. OVERLOADED when there is no place
    /// within the request's deadline. What [`StreamLane::check`] says.
    pub fn order(
        &mut self,
        plan: &blocking::Plan,
        direction: Direction,
        request: &Request<'_>,
    ) -> Result<Ordered<'_>, Error> {
        let plan: &Plan = plan.as_async();
        let shared = &plan.client().shared;
        let call = Call::new("order a copy", plan.client().copy_deadline(request));
        let ordered = self.submit(plan, direction, request, &call);
        match ordered {
            Ok(sequence) => Ok(Ordered { lane: self, sequence }),
            Err(failure) => Err(call.error(&shared.address, failure)),
        }
    }

    fn submit(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
        call: &Call,
    ) -> Result<Sequence, Failure> {
        self.sound()?;
        let Some(link) = self.lanes.live_link(plan.client())? else {
            return Err(self.earlier_life());
        };
        let mut copy = resolve(&link, &plan.record, direction, request, call.left())?;
        let sequence = self.place(call)?;
        let patience = u64::try_from(copy.deadline.as_nanos()).unwrap_or(u64::MAX);
        let descriptor =
            CopyDescriptor::encode_ordered(sequence, &copy.request(self.lanes.session), patience);
        if self.submitter.publish(&descriptor.to_words()) {
            self.lanes.bell.ring();
        }
        self.held.push_back((sequence, std::mem::take(&mut copy.held)));
        let checked = self.checked(sequence, call);
        self.unsure = matches!(checked, Err(Failure::Unanswered));
        checked.map(|()| sequence)
    }

    /// Waits for a place; gives up what settled copies held.
    fn place(&mut self, call: &Call) -> Result<Sequence, Failure> {
        let mut waiting = Waiting::default();
        loop {
            let place = self.submitter.place().map_err(broken)?;
            let settled = self.submitter.settled();
            while self.held.front().is_some_and(|(sequence, _)| sequence.get() <= settled) {
                self.held.pop_front();
            }
            if let Some(sequence) = place {
                return Ok(sequence);
            }
            self.sound()?;
            if call.left().is_none() {
                return Err(full(self.submitter.words().slots()).into());
            }
            waiting.pause();
        }
    }

    /// Waits until the executor has said whether the request may be put on the stream.
    fn checked(&self, sequence: Sequence, call: &Call) -> Result<(), Failure> {
        let mut waiting = Waiting::default();
        loop {
            match self.submitter.phase(sequence).map_err(broken)? {
                LanePhase::Accepted => return Ok(()),
                LanePhase::Settled => {
                    let mut words = [0; ANSWER_WORDS];
                    self.submitter.read_answer(sequence, &mut words);
                    self.sound()?;
                    return match Answer::from_words(words).map_err(unread)?.result {
                        Ok(_) => Ok(()),
                        Err(fault) => Err(fault.to_refusal().into()),
                    };
                }
                LanePhase::Told => {}
            }
            if let Some(silence) = self.lanes.silence.get() {
                return Err(silence.before_start());
            }
            if call.left().is_none() {
                // Nobody takes it back: it may be accepted yet. It never runs before a bell.
                return Err(Failure::Unanswered);
            }
            waiting.pause();
        }
    }

    /// Whether everything that was put on the stream so far was or will be copied. A load or two: for the end of each step.
    ///
    /// # Errors
    /// Why the lane was failed: its waits went on, and rows that were not there yet are undefined.
    pub fn check(&self) -> Result<(), Error> {
        let shared = &self.client.as_async().shared;
        let call = Call::new("check a lane", shared.options.call_timeout);
        self.sound().map_err(|failure| call.error(&shared.address, failure))
    }

    fn sound(&self) -> Result<(), Failure> {
        if self.unsure {
            return Err(unsure().into());
        }
        if self.submitter.words().done().load_acquire() != FREED {
            return Ok(());
        }
        match self.lanes.memory.failure(self.number.pair()).map_err(unread)? {
            Some(Answer { result: Err(fault), .. }) => Err(fault.to_refusal().into()),
            Some(Answer { result: Ok(_), .. }) | None => Err(self.earlier_life()),
        }
    }

    fn earlier_life(&self) -> Failure {
        match self.lanes.silence.get() {
            Some(silence) => silence.after_start(),
            None => earlier_life("lane", "Open another lane."),
        }
    }
}

impl Drop for StreamLane {
    fn drop(&mut self) {
        let is_readable = self.submitter.place().is_ok();
        if is_readable
            && self.submitter.settled() == self.submitter.published()
            && self.sound().is_ok()
        {
            self.lanes.give_back(self.number);
        } else {
            lock(&self.lanes.kept).extend(self.held.drain(..).map(|(_, held)| held));
        }
    }
}

impl Ordered<'_> {
    /// What the stream writes, behind what the copy comes after.
    #[must_use]
    pub fn bell(&self) -> LaneWord {
        let parameters = self.lane.lanes.memory.parameters();
        let offset = parameters.bell_at(self.lane.number.pair());
        LaneWord { offset, value: self.sequence.get() }
    }

    /// What the stream waits for, at least, before what comes after the copy.
    #[must_use]
    pub fn done(&self) -> LaneWord {
        let parameters = self.lane.lanes.memory.parameters();
        let offset = parameters.done_at(self.lane.number.pair());
        LaneWord { offset, value: self.sequence.get() }
    }

    /// Rings by this thread, for work that is no stream of a device.
    pub fn ring(&self) {
        // SYNC: releases what this thread wrote before: the copy reads it.
        self.lane.submitter.words().bell().store_release(self.sequence.get());
    }

    /// Waits on this thread until the copy is done.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED when it is not within that time; it may be done later. What [`StreamLane::check`] says.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        let words = self.lane.submitter.words();
        let until = Instant::now().checked_add(timeout);
        let mut waiting = Waiting::default();
        // SYNC: acquires the rows that the copy wrote.
        while words.done().load_acquire() < self.sequence.get() {
            if until.is_some_and(|until| Instant::now() >= until) {
                let sentence = format!("The copy was not done within {timeout:?}");
                return Err(Refusal::new(RefusalCode::DeadlineExceeded, sentence).into());
            }
            waiting.pause();
        }
        self.lane.check()
    }

    /// Whether it is over: done, or never done.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        phase_of(self.lane.submitter.words(), self.sequence) == Ok(LanePhase::Settled)
    }
}

/// Looks again at once for a while, then gives way.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Option<Instant>);

impl Waiting {
    pub(crate) fn pause(&mut self) {
        let now = Instant::now();
        if now.duration_since(*self.0.get_or_insert(now)) < SPIN {
            std::hint::spin_loop();
        } else {
            thread::sleep(SPIN);
        }
    }
}

/// What was opened with a daemon that does not serve it any more.
pub(crate) fn earlier_life(what: &str, remedy: &str) -> Failure {
    let sentence = format!("The {what} belongs to an earlier session of the client");
    let refusal = Refusal::new(RefusalCode::IncarnationMismatch, sentence).about(what);
    refusal.remedied_by(remedy).into()
}

fn no_lanes() -> Refusal {
    let sentence = "The session has no lanes: its copies go over gRPC, or the daemon is older than protocol version 4";
    Refusal::new(RefusalCode::VersionMismatch, sentence)
        .about("lane")
        .remedied_by("Connect with transport \"ring\" to a daemon of this version.")
}

fn unsure() -> Refusal {
    let sentence = "A request of the lane was not looked at within its deadline: it may be accepted yet, and would run at the next bell";
    Refusal::new(RefusalCode::DeadlineExceeded, sentence)
        .about("lane")
        .remedied_by("Open another lane for the stream.")
}

fn full(slots: u64) -> Refusal {
    let sentence = format!(
        "All {slots} places of the lane are taken by copies that are not done, and none became free before the deadline"
    );
    Refusal::new(RefusalCode::Overloaded, sentence).about("lane")
}

fn protocol(error: &StateBroken) -> ProtocolError {
    ProtocolError::Ring { reason: error.to_string() }
}

fn broken(error: StateBroken) -> Failure {
    protocol(&error).into()
}

pub(crate) fn unread(error: AnswerError) -> Failure {
    ProtocolError::Ring { reason: error.to_string() }.into()
}
