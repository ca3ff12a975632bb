//! The answer to one request: as four words of a completion slot, and parsed.

use statecopy_proto::RefusalCode;

use crate::fault::{Fault, Subject};
use crate::layout::ANSWER_WORDS;

const MOVED: u64 = 1;
const REFUSED: u64 = 2;

/// What a copy did, over all its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Rows copied.
    pub rows_copied: u64,
    /// Rows cleared (gather) or skipped (scatter).
    pub rows_masked: u64,
}

/// The one terminal answer of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// What was done, or why nothing was.
    pub result: Result<Moved, Fault>,
    /// How long the executor had the request, in nanoseconds, from taking it to answering it. 0 where nothing was launched.
    pub executor_ns: u64,
}

/// Words that are no answer: not of this version, or written over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The outcome.
    #[error("{0:#x} is no outcome of a copy")]
    Outcome(u64),
    /// The refusal's code.
    #[error("{0} is no refusal code")]
    Code(u16),
    /// The refusal's subject.
    #[error("{0} is no subject of a refusal")]
    Subject(u16),
}

impl Answer {
    /// The answer as it lies in a completion slot: `outcome | code << 16 | subject << 32`, two numbers, the nanoseconds.
    #[must_use]
    pub fn to_words(&self) -> [u64; ANSWER_WORDS] {
        let (outcome, first, second) = match &self.result {
            Ok(moved) => (MOVED, moved.rows_copied, moved.rows_masked),
            Err(fault) => {
                let code = u64::from(fault.code.number()) << 16;
                let subject = u64::from(fault.subject.number()) << 32;
                (REFUSED | code | subject, fault.value, fault.limit)
            }
        };
        [outcome, first, second, self.executor_ns]
    }

    /// Reads the answer from a completion slot.
    ///
    /// # Errors
    /// [`AnswerError`] about the first number that stands for nothing.
    pub fn from_words(words: [u64; ANSWER_WORDS]) -> Result<Self, AnswerError> {
        let [outcome, first, second, executor_ns] = words;
        let [kind_low, kind_high, code_low, code_high, subject_low, subject_high, rest @ ..] =
            outcome.to_le_bytes();
        let kind = u64::from(u16::from_le_bytes([kind_low, kind_high]));
        let code = u16::from_le_bytes([code_low, code_high]);
        let subject = u16::from_le_bytes([subject_low, subject_high]);
        if rest != [0, 0] || (kind == MOVED && outcome != MOVED) {
            return Err(AnswerError::Outcome(outcome));
        }
        let result = match kind {
            MOVED => Ok(Moved { rows_copied: first, rows_masked: second }),
            REFUSED => Err(Fault {
                code: RefusalCode::try_from(code).map_err(|_| AnswerError::Code(code))?,
                subject: Subject::try_from(subject).map_err(|_| AnswerError::Subject(subject))?,
                value: first,
                limit: second,
            }),
            _ => return Err(AnswerError::Outcome(outcome)),
        };
        Ok(Self { result, executor_ns })
    }
}

#[cfg(test)]
mod tests;
