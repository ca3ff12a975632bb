//! Waiting for answers, by any thread.

use std::io;
use std::num::NonZeroUsize;
use std::thread;
use std::time::{Duration, Instant};

use crate::memory::MappedWords;
use crate::ring::{Sequence, WakeCount, Words, is_answered};

/// Looks between two questions of what time it is.
const LOOKS: u32 = 32;

/// Bytes that the slowest copy worth waiting for awake moves in a nanosecond. Faster ones are answered before the time is over.
const COPIED_PER_NANOSECOND: u64 = 8;
/// How long a copy's bytes keep a waiter awake at most. Waking up costs some 30 us, which is little beside so much.
const COPYING_MAX: Duration = Duration::from_millis(1);

/// Who gives way, and goes on so much later, was not alone on its CPU: it had better sleep, and be woken ahead of the others.
const ELSEWHERE: Duration = Duration::from_micros(20);

/// For how long a waiter looks for its answer before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spin {
    /// Without a break.
    time: Duration,
    /// After that, while whoever else wants the CPU goes first.
    yielding: Duration,
}

impl Spin {
    /// Not at all.
    pub const NONE: Self = Self { time: Duration::ZERO, yielding: Duration::ZERO };

    /// So long, where this process may use at least two of the machine's CPUs; else not at all, because the one that answers
    /// would wait for the CPU that the one who looks keeps busy.
    #[must_use]
    pub fn new(time: Duration, cpus_allowed: NonZeroUsize) -> Self {
        if cpus_allowed.get() < 2 { Self::NONE } else { Self { time, ..Self::NONE } }
    }

    /// The same time in parts of at most `most`, one at least, for who has to look at something else in between.
    pub fn slices(self, most: Duration) -> impl Iterator<Item = Self> {
        let rest = move |left: &Duration| left.checked_sub(most).filter(|left| !left.is_zero());
        std::iter::successors(Some(self.time), rest)
            .map(move |left| Self { time: left.min(most), ..Self::NONE })
    }

    /// The first of those parts.
    #[must_use]
    pub fn at_most(self, most: Duration) -> Self {
        Self { time: self.time.min(most), ..self }
    }

    /// As long again as a copy of so many bytes may take, at most a millisecond: a waiter that falls asleep right before the
    /// end pays for a wake-up, and one that stays awake is no longer awake than if it had copied the bytes itself. In that
    /// time it gives way to others, for example to threads that help with this very copy, and sleeps once there were some. Not
    /// at all stays not at all.
    #[must_use]
    pub fn while_copying(self, bytes: u64) -> Self {
        if self == Self::NONE {
            return self;
        }
        let yielding = Duration::from_nanos(bytes / COPIED_PER_NANOSECOND).min(COPYING_MAX);
        Self { yielding, ..self }
    }
}

/// What came of looking for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Looked {
    /// It is there.
    Answered,
    /// It is not; it has been looked for since then, give or take the few looks before the first one at the clock.
    InVain(Instant),
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

    /// Looks for a request's answer for so long.
    #[must_use]
    pub fn spin(&self, sequence: Sequence, spin: Spin) -> Looked {
        if spin == Spin::NONE {
            return match self.is_answered(sequence) {
                true => Looked::Answered,
                false => Looked::InVain(Instant::now()),
            };
        }
        let mut began = None;
        let mut gave_way: Option<Instant> = None;
        loop {
            for _ in 0..LOOKS {
                if self.is_answered(sequence) {
                    return Looked::Answered;
                }
                std::hint::spin_loop();
            }
            // The first looks cost no clock: most answers come within them.
            let now = Instant::now();
            let since = *began.get_or_insert(now);
            let looked = now.duration_since(since);
            let not_alone = gave_way.is_some_and(|at| now.duration_since(at) >= ELSEWHERE);
            if not_alone || looked >= spin.time.saturating_add(spin.yielding) {
                return Looked::InVain(since);
            }
            if looked >= spin.time {
                gave_way = Some(now);
                thread::yield_now();
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
