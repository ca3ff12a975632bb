//! Waiting for answers, by any thread.

use std::io;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use crate::memory::MappedWords;
use crate::ring::{Sequence, WakeCount, Words, is_answered};

/// Looks between two questions of what time it is.
const LOOKS: u32 = 32;

/// For how long a waiter looks for its answer before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spin(Duration);

impl Spin {
    /// Not at all.
    pub const NONE: Self = Self(Duration::ZERO);

    /// So long, where this process may use at least two of the machine's CPUs; else not at all, because the one that answers
    /// would wait for the CPU that the one who looks keeps busy.
    #[must_use]
    pub fn new(time: Duration, cpus_allowed: NonZeroUsize) -> Self {
        if cpus_allowed.get() < 2 { Self::NONE } else { Self(time) }
    }

    /// The same time in parts of at most `most`, one at least, for who has to look at something else in between.
    pub fn slices(self, most: Duration) -> impl Iterator<Item = Self> {
        let rest = move |left: &Duration| left.checked_sub(most).filter(|left| !left.is_zero());
        std::iter::successors(Some(self.0), rest).map(move |left| Self(left.min(most)))
    }

    /// Whether it takes so long, or longer.
    #[must_use]
    pub fn is_at_least(self, time: Duration) -> bool {
        self.0 >= time
    }
}

/// The answers of one session memory, as any thread sees them beside the [`crate::Submitter`]. It reads no answer: it says
/// when reading one is worth while.
#[derive(Debug, Clone)]
pub struct Watch {
    words: MappedWords,
}

impl Watch {
    pub(crate) fn new(words: MappedWords) -> Self {
        Self { words }
    }

    /// Whether a request is answered and its answer not overtaken by the slot's next request. One load.
    #[must_use]
    pub fn is_answered(&self, sequence: Sequence) -> bool {
        is_answered(&self.words, sequence)
    }

    /// Looks for a request's answer for so long; true once it is there.
    #[must_use]
    pub fn spin(&self, sequence: Sequence, spin: Spin) -> bool {
        if spin == Spin::NONE {
            return self.is_answered(sequence);
        }
        let mut began = None;
        loop {
            for _ in 0..LOOKS {
                if self.is_answered(sequence) {
                    return true;
                }
                std::hint::spin_loop();
            }
            // The first looks cost no clock: most answers come within them.
            let now = Instant::now();
            if now.duration_since(*began.get_or_insert(now)) >= spin.0 {
                return false;
            }
        }
    }

    /// Sleeps until an answer comes that was not there when [`crate::Submitter::prepare_sleep`] returned `seen`, or the time
    /// is over; wakes for no reason, too.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn sleep(&self, seen: WakeCount, timeout: Duration) -> io::Result<()> {
        self.words.wake().futex_wait(seen.0, timeout)
    }

    /// Wakes every thread that sleeps here, for no reason that they could see.
    pub fn rouse(&self) {
        self.words.wake().futex_wake(u32::MAX >> 1);
    }
}
