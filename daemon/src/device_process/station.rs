//! One ring and the copy that runs for it: where a submitter is served.
//!
//! ```text
//! idle ──take, check──> running ──last part done──> idle
//!   └──refuse──> idle
//! ```
//!
//! * *take, check*: the request was held against its sealed plan and accepted; it holds its own hold on everything it uses.
//! * *refuse*: answered at once, nothing moved. So is a request under which two device processes died: it may be the cause.
//! * *last part done*: answered. Requests of one ring run one after the other, in the order submitted.
//!
//! A ring whose words make no sense is dead: nothing of it is served again, and its session is told to end.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::{RefusalCode, SessionId};
use statecopy_session::{
    Answer, CopyRequest, Executor as Ring, Fault, MonotonicNs, RingBroken, Sequence, Subject, Taken,
};

use crate::counters::{Counter, Counters};

use super::copying::{Copied, Inline, Progress, Running};
use super::counts::RingCounts;
use super::graphs::Graphs;
use super::sessions::Sessions;
use super::streams::{Service, Streams};

/// Deaths of the device process under a request after which it is not run again.
pub(super) const DEATHS_MAX: u8 = 2;

/// Whose requests a ring may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The supervisor's own: any session, as the descriptor says.
    Supervisor,
    /// A worker's: this session, whatever the descriptor says.
    Session(SessionId),
}

/// What a turn did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// There was nothing to do.
    Idle,
    /// A copy waits for the device.
    Waiting,
    /// Something moved on.
    Progressed,
}

/// Why a turn ended badly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The ring makes no sense from now on. Said until [`Station::note_told`]; then it is idle for ever.
    Ring(RingBroken),
    /// The device failed under the running copy, which is not answered yet. Nothing more can be asked of the device.
    Device(DeviceFault),
}

impl From<RingBroken> for Trouble {
    fn from(broken: RingBroken) -> Self {
        Self::Ring(broken)
    }
}

/// A request under way.
#[derive(Debug)]
struct Job<D: Device> {
    sequence: Sequence,
    request: CopyRequest,
    session: SessionId,
    begun: MonotonicNs,
    running: Running<D>,
}

/// One ring and the copy that runs for it.
#[derive(Debug)]
pub(super) struct Station<D: Device> {
    scope: Scope,
    ring: Ring,
    inline: Inline,
    job: Option<Job<D>>,
    health: Health,
    closing: Closing,
    counts: Arc<RingCounts>,
    /// `None` where the session memory has none.
    streams: Option<Streams<D>>,
}

/// Whether the ring makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Sound,
    /// It does not, and its session has not been told.
    Broken(RingBroken),
    /// It does not, and its session has been told to end.
    Told,
}

/// Whether new requests are served, once the daemon drains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closing {
    /// It does not drain.
    Open,
    /// What was submitted before is served: at most so many more, a ring full.
    Emptying(u32),
    /// DRAINING.
    Closed,
}

impl<D: Device> Station<D> {
    pub(super) fn new(scope: Scope, ring: Ring, inline: Inline, counts: Arc<RingCounts>) -> Self {
        Self {
            scope,
            ring,
            inline,
            job: None,
            health: Health::Sound,
            closing: Closing::Open,
            counts,
            streams: None,
        }
    }

    /// The same with lanes and graphs.
    pub(super) fn with_streams(self, streams: Option<Streams<D>>) -> Self {
        Self { streams, ..self }
    }

    /// The session's graphs.
    pub(super) fn graphs(&mut self) -> Option<&mut Graphs<D>> {
        self.streams.as_mut().map(|streams| &mut streams.graphs)
    }

    /// Prepares for one copy whose bell may ring soon. False: there is none that was not prepared for.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        &mut self,
        launcher: &mut D::Launcher,
        sessions: &Sessions<D>,
    ) -> Result<bool, DeviceFault> {
        match (&mut self.streams, self.scope, self.health) {
            (Some(streams), Scope::Session(session), Health::Sound) => {
                streams.expect(launcher, sessions.table(session), sessions.hook_epoch())
            }
            _ => Ok(false),
        }
    }

    /// What the launcher had prepared for is gone.
    pub(super) fn expect_again(&mut self) {
        if let Some(streams) = &mut self.streams {
            streams.expect_again();
        }
    }

    pub(super) fn scope(&self) -> Scope {
        self.scope
    }

    /// Whether requests of that session may come in here.
    pub(super) fn serves(&self, session: SessionId) -> bool {
        self.scope == Scope::Supervisor || self.scope == Scope::Session(session)
    }

    /// Whether a copy of that session runs here.
    pub(super) fn works_for(&self, session: SessionId) -> bool {
        self.job.as_ref().is_some_and(|job| job.session == session)
            || self.serves(session) && self.streams.as_ref().is_some_and(Streams::is_busy)
    }

    /// Whether a stream waits for a copy.
    pub(super) fn is_rung(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::is_due)
    }

    /// Whether a bell may ring, which wakes nobody.
    pub(super) fn awaits_bell(&self) -> bool {
        self.streams.as_ref().is_some_and(Streams::awaits_bell)
    }

    /// The daemon drains: what was submitted is served, what comes later is DRAINING. True once nothing is left to serve; what was
    /// accepted and not rung moved nothing, and its stream may never come.
    /// The supervisor's own ring is never closed: the supervisor refuses by itself.
    pub(super) fn close(&mut self) -> bool {
        if self.scope == Scope::Supervisor || self.health != Health::Sound {
            return true;
        }
        if self.closing == Closing::Open {
            self.closing = Closing::Emptying(self.ring.parameters().slots());
            if let Some(graphs) = self.graphs() {
                graphs.drain();
            }
        }
        self.closing == Closing::Closed && self.job.is_none() && !self.is_rung()
    }

    /// Takes new buffers for inline indices and flags; gives the old ones back.
    pub(super) fn fit(&mut self, inline: Inline) -> Inline {
        std::mem::replace(&mut self.inline, inline)
    }

    /// The session has been told that its ring makes no sense.
    pub(super) fn note_told(&mut self) {
        self.health = Health::Told;
    }

    /// Does one bounded thing for the ring, and one for the lanes and the graphs. `paused`: only what runs goes on.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn turn(
        &mut self,
        launcher: &mut D::Launcher,
        sessions: &Sessions<D>,
        counters: &Counters,
        paused: bool,
    ) -> Result<Turn, Trouble> {
        let ring = match &self.job {
            None if paused => Ok(Turn::Idle),
            _ => self.turn_of_ring(launcher, sessions, counters),
        };
        // What runs for streams goes on, also where the ring makes no sense.
        let streams = self.turn_of_streams(launcher, sessions, counters, paused);
        Ok(ring?.max(streams?))
    }

    fn turn_of_streams(
        &mut self,
        launcher: &mut D::Launcher,
        sessions: &Sessions<D>,
        counters: &Counters,
        paused: bool,
    ) -> Result<Turn, Trouble> {
        let (Some(streams), Scope::Session(session)) = (&mut self.streams, self.scope) else {
            return Ok(Turn::Idle);
        };
        // What runs goes on to its end, whatever became of the words: the session's own end waits for it.
        let how = Service {
            paused: paused || self.health != Health::Sound,
            closed: self.closing != Closing::Open,
        };
        let turn = streams.turn(launcher, (sessions, sessions.table(session)), counters, how);
        if let Err(Trouble::Ring(broken)) = turn {
            self.health = Health::Broken(broken);
        }
        turn
    }

    /// Takes a request, or moves the running one on by one launch.
    fn turn_of_ring(
        &mut self,
        launcher: &mut D::Launcher,
        sessions: &Sessions<D>,
        counters: &Counters,
    ) -> Result<Turn, Trouble> {
        if self.job.is_none() && !self.begin(sessions, launcher, counters)? {
            return Ok(Turn::Idle);
        }
        let Some(job) = &mut self.job else { return Ok(Turn::Progressed) };
        let progress = job.running.step(launcher, &self.inline, &job.request, None);
        Ok(match progress.map_err(Trouble::Device)? {
            Progress::Waiting => Turn::Waiting,
            Progress::MovedOn => Turn::Progressed,
            Progress::Done(copied) => {
                self.finish(Ok(copied), counters);
                Turn::Progressed
            }
        })
    }

    /// The device failed. A copy that it was given any of is DEVICE_LOST: it may be the cause, and its rows are undefined.
    /// One that had not begun is left to the next device process.
    pub(super) fn lose(&mut self, counters: &Counters) {
        if self.job.as_ref().is_some_and(|job| job.running.has_begun()) {
            self.finish(Err(Subject::Device.fault(0, 0)), counters);
        }
        if let Some(streams) = &mut self.streams {
            streams.lose(counters);
        }
    }

    /// Takes a request, and answers it at once if it is refused. False: there was none.
    fn begin(
        &mut self,
        sessions: &Sessions<D>,
        launcher: &D::Launcher,
        counters: &Counters,
    ) -> Result<bool, RingBroken> {
        match self.health {
            Health::Sound => {}
            Health::Broken(broken) => return Err(broken),
            Health::Told => return Ok(false),
        }
        let taken = match self.ring.take() {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                if self.closing != Closing::Open {
                    self.closing = Closing::Closed;
                }
                return Ok(false);
            }
            Err(broken) => {
                self.health = Health::Broken(broken);
                return Err(broken);
            }
        };
        let begun = self.begun(&taken);
        match self.check(&taken, begun, sessions, launcher) {
            Ok(job) => self.job = Some(job),
            Err(fault) => {
                counters.add(Counter::Refusals(fault.code), 1);
                self.answer(taken.sequence, Err(fault), 0);
            }
        }
        Ok(true)
    }

    /// The time at which a request is taken, where anything depends on it: what moves nothing is never late, and nothing of it is
    /// measured. A clock costs more than the rest of an empty request.
    fn begun(&self, taken: &Taken) -> MonotonicNs {
        match self.scope {
            Scope::Session(_) if taken.descriptor.selected == 0 => MonotonicNs(0),
            Scope::Session(_) | Scope::Supervisor => MonotonicNs::now(),
        }
    }

    fn check(
        &mut self,
        taken: &Taken,
        begun: MonotonicNs,
        sessions: &Sessions<D>,
        launcher: &D::Launcher,
    ) -> Result<Job<D>, Fault> {
        let deaths = self.ring.deaths(taken.sequence);
        if deaths >= DEATHS_MAX {
            return Err(Fault::of(RefusalCode::DeviceLost));
        }
        match self.closing {
            Closing::Open => {}
            Closing::Closed | Closing::Emptying(0) => {
                self.closing = Closing::Closed;
                return Err(Fault::of(RefusalCode::Draining));
            }
            Closing::Emptying(left) => self.closing = Closing::Emptying(left - 1),
        }
        let mut request = taken.descriptor.parse()?;
        if deaths > 0 {
            // It may have started under the dead executor: it must run again, however late.
            request.deadline = MonotonicNs::NEVER;
        }
        let session = match self.scope {
            Scope::Supervisor => request.session,
            Scope::Session(session) => session,
        };
        let hook_epoch = sessions.look_for_hooks(launcher);
        let table = sessions.table(session);
        let running = Running::check(table, &request, hook_epoch, begun)?;
        let ranges = request.inline_ranges(self.ring.parameters().inline_bytes())?;
        self.inline.fill(&self.ring, taken.sequence, &request, &ranges);
        running.check_unique(&request, &mut self.inline, &ranges)?;
        if request.selected > 0 {
            // Of nothing, nothing can die. The word is on its way to the submitter for longer than that request takes.
            self.ring.accept(taken.sequence);
        }
        Ok(Job { sequence: taken.sequence, request, session, begun, running })
    }

    fn finish(&mut self, result: Result<Copied, Fault>, counters: &Counters) {
        let Some(job) = &self.job else { return };
        let executor_ns = match &result {
            Ok(copied) if copied.launches > 0 => {
                let nanoseconds = MonotonicNs::now().since(job.begun).as_nanos();
                u64::try_from(nanoseconds).unwrap_or(u64::MAX)
            }
            Ok(_) | Err(_) => 0,
        };
        match &result {
            Ok(copied) => copied.count(job.request.direction, executor_ns, counters),
            Err(_) => counters.add(Counter::Refusals(RefusalCode::DeviceLost), 1),
        }
        self.answer(job.sequence, result.map(|copied| copied.moved), executor_ns);
        // The submitter need not wait while what the copy held is let go.
        self.job = None;
    }

    fn answer(
        &mut self,
        sequence: Sequence,
        result: Result<statecopy_session::Moved, Fault>,
        executor_ns: u64,
    ) {
        self.counts.count(result.is_ok());
        self.ring.answer(sequence, &Answer { result, executor_ns });
    }

    /// Says that the executor is about to sleep; false if there is something to do first.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        self.job.is_none()
            && self.ring.prepare_sleep()
            && self.streams.as_ref().is_none_or(|streams| match self.health {
                Health::Sound => streams.may_sleep(),
                // Nothing more is taken.
                Health::Broken(_) | Health::Told => !streams.is_busy(),
            })
    }

    /// Says that the executor is awake.
    pub(super) fn cancel_sleep(&mut self) {
        self.ring.cancel_sleep();
    }
}
