//! One lane, and the copies that are ordered in it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use statecopy_descriptors::Mapping;
use statecopy_proto::{Direction, Refusal, RefusalCode};
use statecopy_session::lane::{LaneWords as _, phase_of};
use statecopy_session::layout::ANSWER_WORDS;
use statecopy_session::{
    Answer, AnswerError, CopyDescriptor, FREED, LaneNumber, LanePhase, LaneSubmitter, MappedLane,
    Sequence, StateBroken,
};

use super::Lanes;
use crate::blocking;
use crate::call::{Call, Failure};
use crate::copies::resolve;
use crate::error::{Error, ProtocolError};
use crate::lock::lock;
use crate::ring::Held;
use crate::{Plan, Request};

/// For how long an answer to a request is looked for without giving way to others.
const SPIN: Duration = Duration::from_micros(100);

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
    /// The last request that was accepted: nothing later is on the stream.
    accepted: u64,
    /// A request that the next bell would ring, too, though nobody is to see it done.
    doubt: Option<Doubt>,
}

/// Why no bell of a lane may be rung any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// A request was never said to be accepted or refused. It may be accepted yet.
    Unanswered,
    /// A request was accepted, and its stream took neither the bell nor the wait.
    NotEnqueued,
}

/// What became of [`StreamLane::try_order`].
#[derive(Debug)]
#[must_use = "a request may have been asked"]
pub enum Tried {
    /// It was accepted: its bell, and its done.
    Accepted([LaneWord; 2]),
    /// It was asked, and is not checked yet: [`StreamLane::accepted`] waits on.
    Asked(Asked),
    /// Nothing was asked: there is no place. [`StreamLane::order`] waits for one.
    Full,
}

/// A request that was asked and not checked.
#[derive(Debug)]
#[must_use = "it may be accepted yet"]
pub struct Asked {
    sequence: Sequence,
    call: Call,
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
        let submitter = submitter.map_err(|error| {
            lanes.give_back(number);
            failed(broken(error))
        })?;
        let (held, client, accepted) = (VecDeque::new(), client.clone(), submitter.published());
        Ok(Self { lanes, number, submitter, held, client, accepted, doubt: None })
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
        let call = order_call(plan, request);
        let ordered = loop {
            match self.ask(plan.as_async(), direction, request, &call) {
                Ok(Some(sequence)) => break self.checked(sequence, &call).map(|()| sequence),
                Ok(None) => {}
                Err(failure) => break Err(failure),
            }
            if let Err(failure) = self.wait_for_place(&call) {
                break Err(failure);
            }
        };
        match ordered {
            Ok(sequence) => Ok(Ordered { lane: self, sequence }),
            Err(failure) => Err(self.error(&call, failure)),
        }
    }

    /// The same for a caller that does not want to wait for long: at most for so long for the check, and not for a place.
    ///
    /// # Errors
    /// As [`StreamLane::order`].
    pub fn try_order(
        &mut self,
        plan: &blocking::Plan,
        direction: Direction,
        request: &Request<'_>,
        patience: Duration,
    ) -> Result<Tried, Error> {
        let call = order_call(plan, request);
        let asked = self.ask(plan.as_async(), direction, request, &call);
        let Some(sequence) = asked.map_err(|failure| self.error(&call, failure))? else {
            return Ok(Tried::Full);
        };
        let until = Instant::now() + patience;
        while self.submitter.phase(sequence) == Ok(LanePhase::Told) {
            if Instant::now() >= until {
                return Ok(Tried::Asked(Asked { sequence, call }));
            }
            std::hint::spin_loop();
        }
        self.accepted(&Asked { sequence, call }).map(Tried::Accepted)
    }

    /// Waits until what was asked was checked. Its bell, and its done.
    ///
    /// # Errors
    /// As [`StreamLane::order`].
    pub fn accepted(&mut self, asked: &Asked) -> Result<[LaneWord; 2], Error> {
        let Asked { sequence, call } = asked;
        match self.checked(*sequence, call) {
            Ok(()) => {
                let ordered = Ordered { lane: self, sequence: *sequence };
                Ok([ordered.bell(), ordered.done()])
            }
            Err(failure) => Err(self.error(call, failure)),
        }
    }

    fn error(&self, call: &Call, failure: Failure) -> Error {
        call.error(&self.client.as_async().shared.address, failure)
    }

    /// Publishes a request; `None` where there is no place.
    fn ask(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
        call: &Call,
    ) -> Result<Option<Sequence>, Failure> {
        self.sound()?;
        let Some(link) = self.lanes.live_link(plan.client())? else {
            return Err(self.earlier_life());
        };
        let mut copy = resolve(&link, &plan.record, direction, request, call.left())?;
        let place = self.submitter.place().map_err(broken)?;
        self.let_settled_go();
        let Some(sequence) = place else { return Ok(None) };
        let patience = u64::try_from(copy.deadline.as_nanos()).unwrap_or(u64::MAX);
        let descriptor =
            CopyDescriptor::encode_ordered(sequence, &copy.request(self.lanes.session), patience);
        self.doubt = Some(Doubt::Unanswered);
        if self.submitter.publish(&descriptor.to_words()) {
            self.lanes.bell.ring();
        }
        self.held.push_back((sequence, std::mem::take(&mut copy.held)));
        Ok(Some(sequence))
    }

    /// Lets go of the memory that settled copies held, as the next request would.
    pub fn let_go(&mut self) {
        // Words that cannot be read are told of elsewhere.
        let _place = self.submitter.place();
        self.let_settled_go();
    }

    fn let_settled_go(&mut self) {
        let settled = self.submitter.settled();
        while self.held.front().is_some_and(|(sequence, _)| sequence.get() <= settled) {
            self.held.pop_front();
        }
    }

    /// Waits for a place.
    fn wait_for_place(&mut self, call: &Call) -> Result<(), Failure> {
        let mut waiting = Waiting::default();
        while self.submitter.place().map_err(broken)?.is_none() {
            self.sound()?;
            if call.left().is_none() {
                return Err(full(self.submitter.words().slots()).into());
            }
            waiting.pause();
        }
        Ok(())
    }

    /// Waits until the executor has said whether the request may be put on the stream.
    fn checked(&mut self, sequence: Sequence, call: &Call) -> Result<(), Failure> {
        let mut waiting = Waiting::default();
        loop {
            match self.submitter.phase(sequence).map_err(broken)? {
                LanePhase::Accepted => {
                    self.doubt = None;
                    self.accepted = sequence.get();
                    return Ok(());
                }
                LanePhase::Settled => {
                    self.doubt = None;
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
                // Nobody is left who could accept it.
                self.doubt = None;
                return Err(silence.before_start());
            }
            if call.left().is_none() {
                // Nobody takes it back: it may be accepted yet. It never runs before a bell.
                return Err(Failure::Unanswered);
            }
            waiting.pause();
        }
    }

    /// The stream took neither the bell nor the wait of a request that was accepted. It would run at the next bell: every later
    /// call says so, and none is rung.
    pub fn distrust(&mut self) {
        self.doubt = Some(Doubt::NotEnqueued);
    }

    /// Whether all that was accepted is over: done, or never done.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let Some(last) = Sequence::new(self.accepted) else { return true };
        self.submitter.settled() >= self.accepted
            || self.submitter.phase(last) == Ok(LanePhase::Settled)
    }

    /// How many copies are on the stream, at most: those that were not seen to be over.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.accepted.saturating_sub(self.submitter.settled())
    }

    /// Whether nobody serves it any more, and every copy that was put on the stream is done: another may take its place, and nobody
    /// need hear of it.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        let link = self.client.as_async().shared.link();
        let is_over =
            self.lanes.silence.get().is_some() || !link.is_some_and(|link| self.lanes.is_of(&link));
        let was_failed = || self.lanes.memory.failure(self.number.pair()) != Ok(None);
        is_over && self.is_settled() && !was_failed()
    }

    /// Whether everything that was put on the stream so far was or will be copied. A load or two: for the end of each step.
    ///
    /// # Errors
    /// Why the lane was failed: its waits went on, and rows that were not there yet are undefined.
    pub fn check(&self) -> Result<(), Error> {
        self.sound().map_err(|failure| {
            let timeout = self.client.as_async().shared.options.call_timeout;
            self.error(&Call::new("check a lane", timeout), failure)
        })
    }

    fn sound(&self) -> Result<(), Failure> {
        if let Some(doubt) = self.doubt {
            return Err(doubt.refusal().into());
        }
        let is_lost = || self.lanes.silence.get().is_some() && !self.is_settled();
        if self.submitter.words().done().load_acquire() != FREED && !is_lost() {
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
        // SYNC: acquires the rows that the copy wrote.
        let is_there = || words.done().load_acquire() >= self.sequence.get();
        if Waiting::until(Instant::now().checked_add(timeout), is_there) {
            return self.lane.check();
        }
        let sentence = format!("The copy was not done within {timeout:?}");
        Err(Refusal::new(RefusalCode::DeadlineExceeded, sentence).into())
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
    /// Waits until it is so, or that time has come. Whether it is so.
    pub(crate) fn until(until: Option<Instant>, mut is_so: impl FnMut() -> bool) -> bool {
        let mut waiting = Self::default();
        while !is_so() {
            if until.is_some_and(|until| Instant::now() >= until) {
                return false;
            }
            waiting.pause();
        }
        true
    }

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

pub(super) fn no_lanes() -> Refusal {
    let sentence = "The session has no lanes: its copies go over gRPC, or the daemon is older than protocol version 4";
    Refusal::new(RefusalCode::VersionMismatch, sentence)
        .about("lane")
        .remedied_by("Connect with transport \"ring\" to a daemon of this version.")
}

impl Doubt {
    fn refusal(self) -> Refusal {
        let (code, what) = match self {
            Self::Unanswered => (
                RefusalCode::DeadlineExceeded,
                "was not looked at within its deadline: it may be accepted yet, and",
            ),
            Self::NotEnqueued => {
                (RefusalCode::Unavailable, "was accepted, and its stream did not take it: it")
            }
        };
        let sentence = format!("A request of the lane {what} would run at the next bell");
        Refusal::new(code, sentence).about("lane").remedied_by("Open another lane for the stream.")
    }
}

fn order_call(plan: &blocking::Plan, request: &Request<'_>) -> Call {
    Call::new("order a copy", plan.as_async().client().copy_deadline(request))
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
