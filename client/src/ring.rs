//! Copies over the session memory's ring: in steady state without a system call.
//!
//! ```text
//!          submit            wait, or the completing thread
//! free ----------> in flight ------------------------------> free
//!                     |                                        ^
//!                     +---- given up ----> nobody's -----------+  (the next to submit reads its answer)
//! ```
//!
//! * *submit*: a slot is taken, and holds the memory that the copy touches until its answer is read.
//! * *wait*: a thread looks for its own answer, then sleeps on the session memory's futex. All sleepers wake at each answer.
//! * *completing thread*: the same for tasks, which must not wait: it answers each through a channel.
//! * *given up*: by a deadline, or because nobody wants the answer any more. The copy may run yet: slot and memory stay.

mod complete;
mod state;

use std::mem;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use statecopy_descriptors::Doorbell;
use statecopy_kernels::device::Moved;
use statecopy_kernels::host::cpus_allowed;
use statecopy_proto::{Refusal, RefusalCode};
use statecopy_session::{
    DaemonClock, Identity, Looked, MonotonicNs, Sequence, SessionMemory, Spin, Watch,
};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::call::{Call, Failure};
use crate::error::ProtocolError;
use crate::lanes::Lanes;
use crate::lock::lock;
use crate::socket::{DescriptorSocket, RingDescriptors, Silence};
use crate::transport::ResolvedCopy;

pub(crate) use state::Held;
use state::{Owner, State, Submitted};

/// What becomes of one copy.
pub(crate) type Outcome = Result<Moved, Failure>;

/// Whoever spins or sleeps looks so often whether anybody is left who may answer.
const SLICE: Duration = Duration::from_millis(20);

/// The ring of one session.
#[derive(Debug)]
pub(crate) struct RingCopies {
    ring: Arc<Ring>,
    completing: Mutex<Option<JoinHandle<()>>>,
    /// `None` where the daemon is too old for them.
    lanes: Option<Arc<Lanes>>,
}

/// What everybody who has a copy in flight shares.
#[derive(Debug)]
struct Ring {
    state: Mutex<State>,
    /// A slot became free: for threads.
    freed: Condvar,
    /// The same, for tasks.
    freed_tasks: Notify,
    /// There is something to complete, or the end has come.
    work: Condvar,
    watch: Watch,
    spin: Spin,
    socket: Arc<DescriptorSocket>,
}

/// One copy in flight for a thread. Dropped before its answer was read, it is nobody's.
#[derive(Debug)]
pub(crate) struct Flight {
    ring: Arc<Ring>,
    sequence: Sequence,
    /// How many bytes it moves.
    bytes: u64,
    /// Its answer was read: there is nothing to give up.
    landed: bool,
}

/// One copy in flight for a task.
#[derive(Debug)]
pub(crate) struct TaskFlight {
    flight: Flight,
    outcome: oneshot::Receiver<Outcome>,
}

impl RingCopies {
    /// Opens the ring that the daemon sent.
    pub(crate) fn open(
        descriptors: RingDescriptors,
        identity: Identity,
        spin: Duration,
        socket: Arc<DescriptorSocket>,
    ) -> Result<Self, ProtocolError> {
        let unusable = |reason: String| ProtocolError::Ring { reason };
        let memory =
            SessionMemory::open(descriptors.memory).map_err(|error| unusable(error.to_string()))?;
        if memory.identity() != identity {
            return Err(unusable("it belongs to another session".to_owned()));
        }
        let clock = DaemonClock::new(descriptors.asked_at, memory.made_at(), MonotonicNs::now());
        let bell = Doorbell::from_fd(descriptors.executor_bell)
            .map_err(|error| unusable(error.to_string()))?;
        let lanes = match memory.parameters().lane_slots() {
            0 => None,
            _ => {
                let bell = bell.try_clone().map_err(|error| unusable(error.to_string()))?;
                let socket = Arc::clone(&socket);
                Some(Arc::new(Lanes::new(memory.clone(), bell, identity.session, socket)))
            }
        };
        let submitter = memory.submitter(bell);
        let watch = submitter.watch();
        let state = State::new(submitter, memory.parameters(), identity.session, clock);
        let ring = Ring {
            state: Mutex::new(state),
            freed: Condvar::new(),
            freed_tasks: Notify::new(),
            work: Condvar::new(),
            watch,
            spin: Spin::new(spin, cpus_allowed()),
            socket,
        };
        Ok(Self { ring: Arc::new(ring), completing: Mutex::default(), lanes })
    }

    /// The lanes of the session memory.
    pub(crate) fn lanes(&self) -> Option<&Arc<Lanes>> {
        self.lanes.as_ref()
    }

    /// Copies that may be in flight at once.
    pub(crate) fn slots(&self) -> usize {
        lock(&self.ring.state).slots()
    }

    /// Whether a copy was not answered yet, whoever waits for it.
    pub(crate) fn has_unanswered(&self) -> bool {
        lock(&self.ring.state).has_unanswered() || self.has_unsettled_lanes()
    }

    /// Whether a copy that nobody waits for any more was not answered yet.
    pub(crate) fn has_given_up(&self) -> bool {
        lock(&self.ring.state).has_given_up() || self.has_unsettled_lanes()
    }

    fn has_unsettled_lanes(&self) -> bool {
        self.lanes.as_ref().is_some_and(|lanes| lanes.has_unsettled())
    }

    /// Submits a copy for this thread, if there is a place.
    pub(crate) fn try_submit(
        &self,
        copy: &mut ResolvedCopy<'_>,
    ) -> Result<Option<Flight>, Failure> {
        let submitted = lock(&self.ring.state).submit(copy, Owner::Thread)?;
        Ok(self.flight(submitted, copy.packed_bytes))
    }

    fn flight(&self, submitted: Submitted, bytes: u64) -> Option<Flight> {
        let Submitted::Taken(sequence) = submitted else { return None };
        Some(Flight { ring: Arc::clone(&self.ring), sequence, bytes, landed: false })
    }

    /// Submits a copy for this thread. A full ring is waited for until the copy's start is due.
    pub(crate) fn submit(&self, copy: ResolvedCopy<'_>, start: &Call) -> Result<Flight, Failure> {
        let mut copy = copy;
        let mut state = lock(&self.ring.state);
        loop {
            let submitted = state.submit(&mut copy, Owner::Thread)?;
            if let Some(flight) = self.flight(submitted, copy.packed_bytes) {
                return Ok(flight);
            }
            copy.deadline = start.left().ok_or_else(|| full(&state))?;
            state.waiting_for_place += 1;
            let slice = copy.deadline.min(SLICE);
            let waited = self.ring.freed.wait_timeout(state, slice);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting_for_place -= 1;
            if let Some(silence) = self.ring.socket.silence() {
                return Err(silence.before_start());
            }
        }
    }

    /// Submits a copy for this task. A full ring is waited for until the copy's start is due.
    pub(crate) async fn submit_task(
        &self,
        copy: ResolvedCopy<'_>,
        start: &Call,
    ) -> Result<TaskFlight, Failure> {
        self.start_completing()?;
        let mut copy = copy;
        loop {
            // Before the look, so that no slot becomes free unheard.
            let freed = self.ring.freed_tasks.notified();
            let (sender, outcome) = oneshot::channel();
            let submitted = lock(&self.ring.state).submit(&mut copy, Owner::Task(sender))?;
            if let Some(flight) = self.flight(submitted, copy.packed_bytes) {
                self.ring.work.notify_one();
                return Ok(TaskFlight { flight, outcome });
            }
            copy.deadline = start.left().ok_or_else(|| full(&lock(&self.ring.state)))?;
            if timeout(copy.deadline.min(SLICE), freed).await.is_err()
                && let Some(silence) = self.ring.socket.silence()
            {
                return Err(silence.before_start());
            }
        }
    }

    fn start_completing(&self) -> Result<(), Failure> {
        let mut completing = lock(&self.completing);
        if completing.is_none() {
            let ring = Arc::clone(&self.ring);
            let thread = std::thread::Builder::new()
                .name("statecopy-ring".to_owned())
                .spawn(move || complete::run(&ring))
                .map_err(|error| Failure::Local(crate::Error::Runtime(error)))?;
            *completing = Some(thread);
        }
        Ok(())
    }
}

impl Drop for RingCopies {
    fn drop(&mut self) {
        lock(&self.ring.state).ending = true;
        self.ring.work.notify_one();
        self.ring.watch.rouse();
        if let Some(thread) = lock(&self.completing).take() {
            // At most one slice.
            thread.join().ok();
        }
    }
}

impl Ring {
    /// Reads the outcome of a copy that is answered, and tells whoever waits for a place.
    fn take(&self, state: &mut State, sequence: Sequence) -> Option<Outcome> {
        let outcome = state.take(sequence)?;
        self.tell_freed(state);
        Some(outcome)
    }

    fn tell_freed(&self, state: &mut State) {
        if state.waiting_for_place > 0 {
            self.freed.notify_all();
        }
        if mem::take(&mut state.tasks_wait) {
            self.freed_tasks.notify_waiters();
        }
    }

    /// The outcome of a copy, if its answer will not come any more: one that is there already counts.
    fn outcome_in_silence(&self, sequence: Sequence) -> Option<Outcome> {
        let silence = self.socket.silence()?;
        let mut state = lock(&self.state);
        let outcome = state.take(sequence);
        Some(outcome.unwrap_or_else(|| Err(state.lose(sequence, &silence))))
    }
}

impl Flight {
    /// Waits for the answer on this thread, until the call's deadline.
    pub(crate) fn wait(mut self, whole: &Call) -> Outcome {
        match self.look() {
            Ok(outcome) => outcome,
            Err(_since) => self.wait_on(whole),
        }
    }

    /// Looks for the answer while this thread may stay awake, and nobody need be asked whether there will be one. In vain:
    /// since when it has been looked for.
    pub(crate) fn look(&mut self) -> Result<Outcome, Instant> {
        let Self { ring, sequence, bytes, landed } = self;
        match ring.watch.spin(*sequence, ring.spin.at_most(SLICE).while_copying(*bytes)) {
            Looked::Answered => {
                let outcome = ring.take(&mut lock(&ring.state), *sequence);
                *landed = outcome.is_some();
                outcome.ok_or_else(Instant::now)
            }
            Looked::InVain(since) => Err(since),
        }
    }

    /// Waits for an answer that was looked for in vain, until the call's deadline.
    pub(crate) fn wait_on(self, whole: &Call) -> Outcome {
        let Self { ring, sequence, .. } = &self;
        // Only who spins for very long has slices left.
        for spin in ring.spin.slices(SLICE).skip(1) {
            if let Some(outcome) = ring.outcome_in_silence(*sequence) {
                return outcome;
            }
            if whole.left().is_none() {
                break;
            }
            if ring.watch.spin(*sequence, spin) == Looked::Answered
                && let Some(outcome) = ring.take(&mut lock(&ring.state), *sequence)
            {
                return outcome;
            }
        }
        loop {
            let seen = {
                let mut state = lock(&ring.state);
                let seen = state.submitter.prepare_sleep();
                if let Some(outcome) = ring.take(&mut state, *sequence) {
                    state.submitter.cancel_sleep();
                    return outcome;
                }
                seen
            };
            let left = whole.left();
            let slept = ring.watch.sleep(seen, left.unwrap_or_default().min(SLICE));
            lock(&ring.state).submitter.cancel_sleep();
            slept.map_err(|error| Failure::Lost(error.into()))?;
            if left.is_none() {
                return Err(Failure::Unanswered);
            }
            if !ring.watch.is_answered(*sequence)
                && let Some(outcome) = ring.outcome_in_silence(*sequence)
            {
                return outcome;
            }
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.landed {
            lock(&self.ring.state).give_up(self.sequence);
        }
    }
}

impl TaskFlight {
    /// Waits for the answer, until the call's deadline.
    pub(crate) async fn wait(self, whole: &Call) -> Outcome {
        let Self { flight, outcome } = self;
        let answered = tokio::time::timeout_at(whole.deadline, outcome).await;
        drop(flight);
        match answered {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(Silence::DaemonGone.after_start()),
            Err(_) => Err(Failure::Unanswered),
        }
    }
}

fn full(state: &State) -> Failure {
    let sentence = format!(
        "All {} places of the session's ring are taken, and none became free before the copy's deadline",
        state.slots()
    );
    Refusal::new(RefusalCode::Overloaded, sentence).about("lane").into()
}

#[cfg(test)]
mod tests;
