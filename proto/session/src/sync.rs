//! The atomic words of the session memory: the standard library's, or loom's where it checks the rings.
//!
//! Only the operations that the rings need have a name here, so that each use says which ordering it relies on.

#![expect(clippy::disallowed_types, reason = "this is the module that names them")]

#[cfg(loom)]
use loom::sync::atomic as atomics;
#[cfg(not(loom))]
use std::sync::atomic as atomics;

use atomics::Ordering;

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

/// Puts all that this thread did before it, and all that it does after it, into one order with the other side's fence.
#[expect(clippy::disallowed_methods, reason = "this is the module that names it")]
pub fn fence_seq_cst() {
    atomics::fence(Ordering::SeqCst);
}
