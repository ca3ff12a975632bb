//! What one ring's requests came to.

use crate::sync::{AtomicU64, Ordering};

/// Counted by the executor, read by the preparing thread.
#[derive(Debug, Default)]
pub(super) struct RingCounts {
    copies: AtomicU64,
    refusals: AtomicU64,
}

impl RingCounts {
    /// Counts an answer. Only the executor's thread does: nobody comes between load and store.
    pub(super) fn count(&self, done: bool) {
        let counter = if done { &self.copies } else { &self.refusals };
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Requests completed, and requests refused.
    pub(super) fn read(&self) -> (u64, u64) {
        (self.copies.load(Ordering::Relaxed), self.refusals.load(Ordering::Relaxed))
    }
}
