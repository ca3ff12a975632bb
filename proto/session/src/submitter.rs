//! The end of the ring that asks for copies.

use std::time::{Duration, Instant};

use statecopy_descriptors::Doorbell;

use crate::answer::{Answer, AnswerError};
use crate::descriptor::{CopyDescriptor, CopyRequest, InlineRanges};
use crate::fault::Fault;
use crate::layout::ANSWER_WORDS;
use crate::memory::MappedWords;
use crate::ring::{Phase, RingFull, Sequence, StateBroken, SubmitterRing, WakeCount};
use crate::watch::{Looked, Spin, Watch};

/// Why a request was not submitted. Nothing was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Answers must be read first.
    #[error(transparent)]
    Full(#[from] RingFull),
    /// Inline indices or flags do not fit in a slot; refuse the caller with this.
    #[error("{}", .0.to_refusal())]
    Inline(Fault),
    /// The inline bytes handed in are not as many as the request says.
    #[error("The request has {given} bytes of inline {what}, and says {wanted}")]
    InlineLength {
        /// Indices or flags.
        what: &'static str,
        /// Bytes handed in.
        given: u64,
        /// Bytes that the request says.
        wanted: u64,
    },
}

/// Why a request's state cannot be told. The executor wrote something that this version does not know, or something else
/// wrote over the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PollError {
    /// Never submitted, or its answer was read before.
    #[error("Request {0} is not outstanding")]
    NotOutstanding(u64),
    /// The state word.
    #[error(transparent)]
    State(#[from] StateBroken),
    /// The answer's words. The slot is free again.
    #[error(transparent)]
    Answer(#[from] AnswerError),
}

/// Why a wait ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// What was read cannot be an answer.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// The operating system lets nobody sleep on the session memory.
    #[error("The session memory cannot be slept on")]
    Sleep(#[source] std::io::Error),
}

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The executor has not looked at it.
    Pending,
    /// It was checked and will be answered.
    Accepted,
    /// Here is its one answer.
    Answered(Answer),
}

/// The submitter of one session memory.
#[derive(Debug)]
pub struct Submitter {
    ring: SubmitterRing<MappedWords>,
    executor_bell: Doorbell,
}

impl Submitter {
    pub(crate) fn new(ring: SubmitterRing<MappedWords>, executor_bell: Doorbell) -> Self {
        Self { ring, executor_bell }
    }

    /// Submits a request, and rings if the executor sleeps. `indices` and `flags` are the bytes of inline ones, in the byte
    /// order of the machine, and empty otherwise.
    ///
    /// # Errors
    /// [`SubmitError`]; then nothing was submitted. Full is the caller's to wait out.
    pub fn try_submit(
        &mut self,
        request: &CopyRequest,
        indices: &[u8],
        flags: &[u8],
    ) -> Result<Sequence, SubmitError> {
        let inline_bytes = self.ring.words().parameters().inline_bytes();
        let ranges = request.inline_ranges(inline_bytes).map_err(SubmitError::Inline)?;
        check_length("indices", ranges.indices.as_ref(), indices)?;
        check_length("flags", ranges.flags.as_ref(), flags)?;
        let (sequence, slot) = self.ring.next()?;
        let InlineRanges { indices: index_range, flags: flag_range } = ranges;
        for (range, bytes) in [(index_range, indices), (flag_range, flags)] {
            if let Some(range) = range {
                self.ring.words().write_inline(slot, range.start, bytes);
            }
        }
        let descriptor = CopyDescriptor::encode(sequence, request);
        if self.ring.publish(&descriptor.to_words()) {
            self.executor_bell.ring();
        }
        Ok(sequence)
    }

    /// How far a request has come. Once it is answered, its slot is free and the next poll says that it is not outstanding.
    ///
    /// # Errors
    /// [`PollError`].
    pub fn poll(&mut self, sequence: Sequence) -> Result<Progress, PollError> {
        let mut words = [0; ANSWER_WORDS];
        match self.ring.poll(sequence, &mut words)? {
            None => Err(PollError::NotOutstanding(sequence.get())),
            Some(Phase::Pending) => Ok(Progress::Pending),
            Some(Phase::Accepted) => Ok(Progress::Accepted),
            Some(Phase::Answered) => Ok(Progress::Answered(Answer::from_words(words)?)),
        }
    }

    /// How many requests are submitted and their answers not read.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.ring.outstanding()
    }

    /// Something by which any thread sees and awaits answers, without the submitter.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.ring.words().clone())
    }

    /// Waits for a request's answer: looks for as long as `spin` says, then sleeps. `None` when `timeout` is over first; call
    /// again for as long as the executor is known to live. For a submitter whose executor wakes by [`crate::Waker::Futex`].
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(
        &mut self,
        sequence: Sequence,
        spin: Spin,
        timeout: Duration,
    ) -> Result<Option<Answer>, WaitError> {
        let watch = self.watch();
        if watch.spin(sequence, spin) == Looked::Answered
            && let Progress::Answered(answer) = self.poll(sequence)?
        {
            return Ok(Some(answer));
        }
        let until = Instant::now().checked_add(timeout);
        loop {
            let seen = self.prepare_sleep();
            let progress = self.poll(sequence);
            let left =
                until.map_or(timeout, |until| until.saturating_duration_since(Instant::now()));
            let slept = match progress {
                Ok(Progress::Pending | Progress::Accepted) => watch.sleep(seen, left),
                Ok(Progress::Answered(_)) | Err(_) => Ok(()),
            };
            self.cancel_sleep();
            slept.map_err(WaitError::Sleep)?;
            if let Progress::Answered(answer) = progress? {
                return Ok(Some(answer));
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// Says that a thread of the submitter is about to sleep: from now on the executor wakes at every answer. Look for all
    /// answers once after it, and after every wake-up; then none is missed. Threads that sleep on the futex hand what this
    /// returns to [`Watch::sleep`], and each calls [`Submitter::cancel_sleep`] when it is awake. A submitter that always
    /// sleeps on its doorbell (the supervisor) says this once.
    pub fn prepare_sleep(&mut self) -> WakeCount {
        self.ring.prepare_sleep()
    }

    /// Says that one thread is awake. A wake-up that is under way may still come.
    pub fn cancel_sleep(&mut self) {
        self.ring.cancel_sleep();
    }
}

fn check_length(
    what: &'static str,
    range: Option<&std::ops::Range<u64>>,
    bytes: &[u8],
) -> Result<(), SubmitError> {
    let wanted = range.map_or(0, |range| range.end - range.start);
    let given = bytes.len() as u64;
    if given == wanted { Ok(()) } else { Err(SubmitError::InlineLength { what, given, wanted }) }
}
