//! Carries the serving guard's counts into the counter memory.

use std::sync::Arc;

use statecopy_kernels::guard::{Door, ServingGuard};

use crate::counters::{Counter, Counters};

/// The counts that have been carried over. They are added as differences, so that a restarted device process goes on where
/// the dead one stopped.
#[derive(Debug)]
pub(super) struct GuardExport {
    guard: Arc<ServingGuard>,
    entries: [u64; Door::ALL.len()],
    while_serving: [u64; Door::ALL.len()],
}

impl GuardExport {
    pub(super) fn new(guard: Arc<ServingGuard>) -> Self {
        Self { guard, entries: [0; Door::ALL.len()], while_serving: [0; Door::ALL.len()] }
    }

    /// Carries over what came since.
    pub(super) fn publish(&mut self, counters: &Counters) {
        for (at, door) in Door::ALL.into_iter().enumerate() {
            let entries = self.guard.entries(door);
            let while_serving = self.guard.entries_while_serving(door);
            if entries != self.entries[at] {
                counters.add(Counter::Entries(door), entries - self.entries[at]);
                self.entries[at] = entries;
            }
            if while_serving != self.while_serving[at] {
                let since = while_serving - self.while_serving[at];
                counters.add(Counter::EntriesWhileServing(door), since);
                self.while_serving[at] = while_serving;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_device_process_counts_on_where_the_dead_one_stopped() {
        let (_memory, counters) = Counters::create().unwrap();
        for _ in 0..2 {
            let guard = Arc::new(ServingGuard::new(false));
            let mut export = GuardExport::new(Arc::clone(&guard));
            guard.enter(Door::Compiler);
            export.publish(&counters);
            guard.shut();
            guard.enter(Door::Compiler);
            export.publish(&counters);
            export.publish(&counters);
        }
        assert_eq!(counters.get(Counter::Entries(Door::Compiler)), 4);
        assert_eq!(counters.get(Counter::EntriesWhileServing(Door::Compiler)), 2);
        assert_eq!(counters.get(Counter::Entries(Door::Environment)), 0);
    }
}
