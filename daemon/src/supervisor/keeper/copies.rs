//! Copies on their way through the supervisor's ring.
//!
//! ```text
//! waiting ──submit──> in flight ──answer──> gone
//!    ^                    │
//!    └──── device death ──┘   (at most once for a copy that was taken; then DEVICE_LOST)
//! ```
//!
//! * *submit*: in the order in which they came, as far as the ring has places.
//! * *answer*: the executor's, or DEADLINE_EXCEEDED for one that waits here and was never taken.
//! * *device death*: an answer that the dead executor left behind counts; what it had taken runs again once, what it had
//!   not taken just waits again. The order stays.

use std::collections::VecDeque;
use std::time::Instant;

use statecopy_kernels::device::Moved;
use statecopy_proto::{Refusal, RefusalCode};
use statecopy_session::{MonotonicNs, Progress, Sequence, SubmitError, Submitter};

use super::super::device::{Answer, Copy, CopyFlags, CopyIndices};

/// Deaths of the device process under a copy after which it is lost.
const DEATHS_MAX: u32 = 2;

#[derive(Debug)]
struct Pending {
    copy: Box<Copy>,
    answer: Answer<Moved>,
    deaths: u32,
}

/// Every copy that has not been answered.
#[derive(Debug)]
pub(super) struct Copies {
    waiting: VecDeque<Pending>,
    in_flight: VecDeque<(Sequence, Pending)>,
    waiting_max: usize,
}

impl Copies {
    /// `waiting_max`: copies that may wait for a place in the ring before more are OVERLOADED.
    pub(super) fn new(waiting_max: usize) -> Self {
        Self { waiting: VecDeque::new(), in_flight: VecDeque::new(), waiting_max }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.in_flight.is_empty()
    }

    /// Takes a copy in. One whose caller has gone away already is dropped: nothing of it has started.
    pub(super) fn push(&mut self, copy: Box<Copy>, answer: Answer<Moved>) {
        if self.waiting.len() < self.waiting_max {
            self.waiting.push_back(Pending { copy, answer, deaths: 0 });
            return;
        }
        let sentence = format!("{} copies wait for the device, as many as may", self.waiting.len());
        drop(answer.send(Err(Refusal::new(RefusalCode::Overloaded, sentence))));
    }

    /// Submits what the ring has places for.
    pub(super) fn submit(&mut self, ring: &mut Submitter) {
        while let Some(pending) = self.waiting.pop_front() {
            match submit_one(ring, &pending) {
                Ok(sequence) => self.in_flight.push_back((sequence, pending)),
                Err(SubmitError::Full(_)) => {
                    self.waiting.push_front(pending);
                    return;
                }
                Err(SubmitError::Inline(fault)) => {
                    drop(pending.answer.send(Err(fault.to_refusal())));
                }
                Err(error @ SubmitError::InlineLength { .. }) => {
                    let refusal = Refusal::new(RefusalCode::IndexType, error.to_string());
                    drop(pending.answer.send(Err(refusal)));
                }
            }
        }
    }

    /// Passes the executor's answers on. False when the ring makes no sense any more.
    pub(super) fn collect(&mut self, ring: &mut Submitter) -> bool {
        let mut sound = true;
        let mut left = VecDeque::with_capacity(self.in_flight.len());
        for (sequence, pending) in self.in_flight.drain(..) {
            match ring.poll(sequence) {
                Ok(Progress::Answered(answer)) => {
                    let moved = answer.result.map(|moved| Moved {
                        copied: moved.rows_copied,
                        masked: moved.rows_masked,
                    });
                    drop(pending.answer.send(moved.map_err(|fault| fault.to_refusal())));
                }
                Ok(Progress::Pending | Progress::Accepted) => left.push_back((sequence, pending)),
                Err(_) => {
                    sound = false;
                    left.push_back((sequence, pending));
                }
            }
        }
        self.in_flight = left;
        sound
    }

    /// The device process is dead and reaped: keeps its last answers, puts the rest back in order.
    pub(super) fn recover(&mut self, ring: &mut Submitter) {
        self.collect(ring);
        while let Some((sequence, mut pending)) = self.in_flight.pop_back() {
            if !matches!(ring.poll(sequence), Ok(Progress::Pending)) {
                pending.deaths += 1;
            }
            if pending.deaths >= DEATHS_MAX {
                drop(pending.answer.send(Err(lost())));
            } else {
                self.waiting.push_front(pending);
            }
        }
    }

    /// Refuses what waits here past its deadline and never started.
    pub(super) fn expire(&mut self, now: Instant) {
        let (late, left) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|pending| pending.deaths == 0 && pending.copy.deadline <= now);
        self.waiting = left;
        let late: VecDeque<Pending> = late;
        for pending in late {
            let sentence = "The copy waited for the device until its deadline and never started";
            let refusal = Refusal::new(RefusalCode::DeadlineExceeded, sentence);
            drop(pending.answer.send(Err(refusal)));
        }
    }

    /// The earliest deadline of what waits here.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().filter(|pending| pending.deaths == 0);
        waiting.map(|pending| pending.copy.deadline).min()
    }

    /// Answers everything: there will be no device process any more.
    pub(super) fn abandon(&mut self) {
        let in_flight = self.in_flight.drain(..).map(|(_, pending)| pending);
        for pending in in_flight.chain(self.waiting.drain(..)) {
            let sentence = "The device process is gone and is not started again";
            drop(pending.answer.send(Err(Refusal::new(RefusalCode::Unavailable, sentence))));
        }
    }
}

fn lost() -> Refusal {
    Refusal::new(
        RefusalCode::DeviceLost,
        "The device process died twice while it had this copy, which may be the cause",
    )
}

fn submit_one(ring: &mut Submitter, pending: &Pending) -> Result<Sequence, SubmitError> {
    let copy = &*pending.copy;
    let index_bytes = match &copy.indices {
        CopyIndices::Inline(_, bytes) => bytes.as_slice(),
        CopyIndices::Shared(..) => &[],
    };
    let flag_bytes = match &copy.flags {
        CopyFlags::Inline(bytes) => bytes.as_slice(),
        CopyFlags::None | CopyFlags::Shared(..) => &[],
    };
    let request = copy.request(deadline(pending), MonotonicNs::now());
    ring.try_submit(&request, index_bytes, flag_bytes)
}

/// A copy that a dead device process had taken may have started: it must run again, however late.
fn deadline(pending: &Pending) -> MonotonicNs {
    if pending.deaths > 0 {
        return MonotonicNs::NEVER;
    }
    MonotonicNs::now().after(pending.copy.deadline.saturating_duration_since(Instant::now()))
}
