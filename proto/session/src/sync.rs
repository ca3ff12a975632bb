//! The atomic words of the session memory: the standard library's, or loom's where it checks the rings.
//!
//! Only the operations that the rings need have a name here, so that each use says which ordering it relies on.

#![expect(clippy::disallowed_types, reason = "this is the module that names them")]

#[cfg(loom)]
use loom::sync::atomic as atomics;
#[cfg(not(loom))]
use std::{io, sync::atomic as atomics, time::Duration};

use atomics::Ordering;
#[cfg(not(loom))]
use rustix::{io::Errno, thread::futex, time::Timespec};

/// The atomic under a [`Word64`], for those who make the words.
pub type AtomicU64Cell = atomics::AtomicU64;
/// The atomic under a [`Word32`].
pub type AtomicU32Cell = atomics::AtomicU32;

macro_rules! word {
    ($(#[$doc:meta])* $name:ident, $atomic:ident, $value:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name<'a>(&'a atomics::$atomic);

        impl<'a> $name<'a> {
            /// The word that lives there.
            #[must_use]
            pub fn new(word: &'a atomics::$atomic) -> Self {
                Self(word)
            }

            /// Loads it; orders nothing.
            #[must_use]
            pub fn load_relaxed(self) -> $value {
                self.0.load(Ordering::Relaxed)
            }

            /// Loads it; all that its writer did before the release store of that value is seen after it.
            #[must_use]
            pub fn load_acquire(self) -> $value {
                self.0.load(Ordering::Acquire)
            }

            /// Stores it; orders nothing.
            pub fn store_relaxed(self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }

            /// Stores it, after all that this thread did before.
            pub fn store_release(self, value: $value) {
                self.0.store(value, Ordering::Release);
            }
        }
    };
}

word!(
    /// A shared 64-bit word.
    Word64, AtomicU64, u64
);
word!(
    /// A shared 32-bit word.
    Word32, AtomicU32, u32
);

impl Word64<'_> {
    /// Sets bits, after all that this thread did before. Others may set and take bits meanwhile.
    pub fn set_bits_release(self, bits: u64) {
        self.0.fetch_or(bits, Ordering::Release);
    }

    /// Takes all bits that are set, and leaves none; what their setters did before is seen after it.
    #[must_use]
    pub fn take_bits_acquire(self) -> u64 {
        self.0.swap(0, Ordering::Acquire)
    }
}

#[cfg(not(loom))]
impl Word32<'_> {
    /// Sleeps while the word holds `expected`, until it is woken or the time is over; wakes for no reason, too. Other
    /// processes that map the word wake it.
    ///
    /// # Errors
    /// When the kernel cannot reach the word.
    pub fn futex_wait(self, expected: u32, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match futex::wait(self.0, futex::Flags::empty(), expected, Some(&timeout)) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Wakes at most so many sleepers of all processes. Never blocks. A word that the kernel cannot reach has no sleepers.
    pub fn futex_wake(self, sleepers_max: u32) {
        futex::wake(self.0, futex::Flags::empty(), sleepers_max).ok();
    }
}

/// Puts all that this thread did before it, and all that it does after it, into one order with the other side's fence.
#[expect(clippy::disallowed_methods, reason = "this is the module that names it")]
pub fn fence_seq_cst() {
    atomics::fence(Ordering::SeqCst);
}
