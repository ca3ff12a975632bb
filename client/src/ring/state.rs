//! The submitter's end of the ring, and whose each slot is. Short critical sections, no waiting.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::device::Moved;
use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::{
    CopyRequest, DaemonClock, MonotonicNs, Parameters, PollError, Progress, Sequence, Subject,
    SubmitError, Submitter,
};
use tokio::sync::oneshot;
use zerocopy::IntoBytes;

use crate::call::Failure;
use crate::error::ProtocolError;
use crate::region::RegionRecord;
use crate::socket::Silence;
use crate::transport::{ResolvedCopy, ResolvedFlags, ResolvedIndices};

use super::Outcome;

/// Memory that a copy touches: packed, indices, flags.
pub(crate) type Held = [Option<Arc<RegionRecord>>; 3];

/// Who reads a slot's answer.
#[derive(Debug)]
pub(super) enum Owner {
    /// A thread that waits, or will.
    Thread,
    /// The completing thread, for a task.
    Task(oneshot::Sender<Outcome>),
    /// Nobody wants it; whoever submits next.
    Nobody,
}

#[derive(Debug)]
struct Entry {
    sequence: Sequence,
    owner: Owner,
    /// Kept, never looked at: the daemon may write to it until the answer.
    _held: Held,
}

/// Whether a copy found a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Submitted {
    Taken(Sequence),
    Full,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) submitter: Submitter,
    /// Threads that wait for a slot to become free.
    pub(super) waiting_for_place: usize,
    /// A task found no place since tasks were last told of one.
    pub(super) tasks_wait: bool,
    /// The completing thread is to end.
    pub(super) ending: bool,
    entries: Box<[Option<Entry>]>,
    /// Entries that are a task's.
    tasks: usize,
    /// Entries that are nobody's.
    given_up: usize,
    session: SessionId,
    clock: DaemonClock,
    /// By how much the coarse clock may be behind.
    tick: Duration,
}

impl State {
    pub(super) fn new(
        submitter: Submitter,
        parameters: Parameters,
        session: SessionId,
        clock: DaemonClock,
    ) -> Self {
        let entries = std::iter::repeat_with(|| None).take(parameters.slots() as usize).collect();
        Self {
            submitter,
            waiting_for_place: 0,
            tasks_wait: false,
            ending: false,
            entries,
            tasks: 0,
            given_up: 0,
            session,
            clock,
            tick: MonotonicNs::coarse_tick(),
        }
    }

    pub(super) fn slots(&self) -> usize {
        self.entries.len()
    }

    /// Whether a task waits for an answer.
    pub(super) fn has_tasks(&self) -> bool {
        self.tasks > 0
    }

    /// Whether a copy was not answered yet, whoever waits for it.
    pub(super) fn has_unanswered(&mut self) -> bool {
        self.read_for_nobody();
        self.entries.iter().any(Option::is_some)
    }

    /// Whether a copy that nobody waits for any more was not answered yet.
    pub(super) fn has_given_up(&mut self) -> bool {
        self.read_for_nobody();
        self.given_up > 0
    }

    /// Submits a copy, if there is a place; then what it holds is held here. A copy that the ring cannot carry is refused.
    pub(super) fn submit(
        &mut self,
        copy: &mut ResolvedCopy<'_>,
        owner: Owner,
    ) -> Result<Submitted, Failure> {
        self.read_for_nobody();
        let request = self.request(copy);
        let indices: &[u8] = match copy.indices {
            ResolvedIndices::Int32(values) => values.as_bytes(),
            ResolvedIndices::Int64(values) => values.as_bytes(),
            ResolvedIndices::Shared(..) => &[],
        };
        let flags: &[u8] = match &copy.flags {
            ResolvedFlags::Inline(flags) => flags,
            ResolvedFlags::None | ResolvedFlags::Shared(_) => &[],
        };
        let sequence = match self.submitter.try_submit(&request, indices, flags) {
            Ok(sequence) => sequence,
            Err(SubmitError::Full(_)) => {
                self.tasks_wait |= matches!(owner, Owner::Task(_));
                return Ok(Submitted::Full);
            }
            Err(refused) => return Err(refusal(&refused, copy).into()),
        };
        if matches!(owner, Owner::Task(_)) {
            self.tasks += 1;
        }
        let at = self.index(sequence);
        self.entries[at] = Some(Entry { sequence, owner, _held: mem::take(&mut copy.held) });
        Ok(Submitted::Taken(sequence))
    }

    fn request(&self, copy: &ResolvedCopy<'_>) -> CopyRequest {
        // What moves nothing is never late. A precise clock would cost a small copy more than a deadline is worth to it.
        let (submitted_at, deadline) = if copy.selected == 0 {
            (MonotonicNs(0), MonotonicNs::NEVER)
        } else {
            let now = self.clock.at(MonotonicNs::coarse());
            (now, now.after(copy.deadline.saturating_add(self.tick)))
        };
        CopyRequest { deadline, submitted_at, ..copy.request(self.session) }
    }

    /// The outcome of a copy, once it is answered; its slot is free then. `None` before, and for one that was taken before.
    pub(super) fn take(&mut self, sequence: Sequence) -> Option<Outcome> {
        let at = self.index(sequence);
        self.entries[at].as_ref().filter(|entry| entry.sequence == sequence)?;
        let outcome = self.poll(sequence)?;
        self.forget(at);
        Some(outcome)
    }

    fn poll(&mut self, sequence: Sequence) -> Option<Outcome> {
        match self.submitter.poll(sequence) {
            Ok(Progress::Pending | Progress::Accepted) => None,
            Ok(Progress::Answered(answer)) => Some(match answer.result {
                Ok(moved) => Ok(Moved { copied: moved.rows_copied, masked: moved.rows_masked }),
                Err(fault) => Err(fault.to_refusal().into()),
            }),
            Err(error) => Some(Err(broken(&error))),
        }
    }

    /// A copy whose answer will not come. What no executor had begun moved nothing.
    pub(super) fn lose(&mut self, sequence: Sequence, silence: &Silence) -> Failure {
        match self.submitter.poll(sequence) {
            Ok(Progress::Pending) => silence.before_start(),
            Ok(Progress::Accepted | Progress::Answered(_)) | Err(_) => silence.after_start(),
        }
    }

    /// Nobody wants the answer any more.
    pub(super) fn give_up(&mut self, sequence: Sequence) {
        let at = self.index(sequence);
        if self.entries[at].as_ref().is_some_and(|entry| entry.sequence == sequence) {
            self.disown(at);
        }
    }

    /// Makes a slot nobody's: whose it was.
    fn disown(&mut self, at: usize) -> Option<Owner> {
        let owner = mem::replace(&mut self.entries[at].as_mut()?.owner, Owner::Nobody);
        match owner {
            Owner::Thread => self.given_up += 1,
            Owner::Task(_) => {
                self.tasks -= 1;
                self.given_up += 1;
            }
            Owner::Nobody => {}
        }
        Some(owner)
    }

    /// Answers every task whose copy is answered; true if a slot became free.
    pub(super) fn complete_tasks(&mut self) -> bool {
        self.complete(|state, sequence| state.poll(sequence))
    }

    /// Answers every task: their copies' answers will not come any more.
    pub(super) fn fail_tasks(&mut self, silence: &Silence) {
        self.complete(|state, sequence| {
            let outcome = state.poll(sequence);
            Some(outcome.unwrap_or_else(|| Err(state.lose(sequence, silence))))
        });
    }

    fn complete(
        &mut self,
        mut outcome: impl FnMut(&mut Self, Sequence) -> Option<Outcome>,
    ) -> bool {
        let mut freed = false;
        for at in 0..self.entries.len() {
            let Some(Entry { sequence, owner: Owner::Task(_), .. }) = self.entries[at] else {
                continue;
            };
            let Some(outcome) = outcome(self, sequence) else { continue };
            freed = true;
            // What was lost may run yet.
            let lost = matches!(&outcome, Err(failure) if failure.is_unknown());
            let owner = if lost { self.disown(at) } else { self.forget(at) };
            if let Some(Owner::Task(task)) = owner {
                // A task that went away meanwhile wants no answer.
                task.send(outcome).ok();
            }
        }
        freed
    }

    /// Reads the answers that nobody wants, so that their slots and memory are free.
    fn read_for_nobody(&mut self) {
        if self.given_up == 0 {
            return;
        }
        for at in 0..self.entries.len() {
            let Some(Entry { sequence, owner: Owner::Nobody, .. }) = self.entries[at] else {
                continue;
            };
            if self.poll(sequence).is_some() {
                self.forget(at);
            }
        }
    }

    fn forget(&mut self, at: usize) -> Option<Owner> {
        let owner = self.entries[at].take()?.owner;
        match owner {
            Owner::Thread => {}
            Owner::Task(_) => self.tasks -= 1,
            Owner::Nobody => self.given_up -= 1,
        }
        Some(owner)
    }

    fn index(&self, sequence: Sequence) -> usize {
        let slots = self.entries.len() as u64;
        usize::try_from((sequence.get() - 1) % slots).unwrap_or(usize::MAX)
    }
}

fn broken(error: &PollError) -> Failure {
    ProtocolError::Ring { reason: error.to_string() }.into()
}

/// Why the ring cannot carry a copy: the same codes as the daemon's.
fn refusal(error: &SubmitError, copy: &ResolvedCopy<'_>) -> Refusal {
    match error {
        SubmitError::Inline(_) if copy.selected > copy.max_selected => {
            Subject::Selected.fault(copy.selected, copy.max_selected).to_refusal()
        }
        SubmitError::Inline(fault) => fault
            .to_refusal()
            .remedied_by("Put indices and flags into a registered region, or select fewer rows."),
        SubmitError::InlineLength { .. } => {
            Refusal::new(RefusalCode::FlagsMismatch, error.to_string()).about("flags")
        }
        SubmitError::Full(_) => Refusal::new(RefusalCode::Overloaded, error.to_string()),
    }
}
