//! The watch over "serving never compiles, never reads the environment, never allocates device memory" (contract: Plan).
//!
//! Every device calls [`ServingGuard::enter`] at the door of its compiler, its environment and its allocator. From a seal
//! until the next registration or rebind the doors are shut: an entry is counted, and where the daemon was told so
//! (tests do) it ends the process on the spot.

use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// What must not be entered while serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// The compiler, or what loads a compiled artifact.
    Compiler,
    /// The environment of the process.
    Environment,
    /// The allocator of device memory.
    DeviceAllocator,
}

impl Door {
    /// Every door.
    pub const ALL: [Self; 3] = [Self::Compiler, Self::Environment, Self::DeviceAllocator];

    /// The name in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Compiler => "compiler",
            Self::Environment => "environment",
            Self::DeviceAllocator => "device_allocator",
        }
    }

    fn ordinal(self) -> usize {
        match self {
            Self::Compiler => 0,
            Self::Environment => 1,
            Self::DeviceAllocator => 2,
        }
    }
}

/// Counts the entries, and refuses them while serving.
#[derive(Debug, Default)]
pub struct ServingGuard {
    serving: AtomicBool,
    aborts: bool,
    entries: [AtomicU64; 3],
    entries_while_serving: [AtomicU64; 3],
}

impl ServingGuard {
    /// A guard with open doors. `aborts`: whether an entry while serving ends the process.
    #[must_use]
    pub fn new(aborts: bool) -> Self {
        Self { aborts, ..Self::default() }
    }

    /// Shuts the doors: everything is sealed.
    pub fn shut(&self) {
        self.serving.store(true, Ordering::SeqCst);
    }

    /// Opens the doors: a registration or rebind runs.
    pub fn open(&self) {
        self.serving.store(false, Ordering::SeqCst);
    }

    /// Called at the door, before anything behind it.
    pub fn enter(&self, door: Door) {
        self.entries[door.ordinal()].fetch_add(1, Ordering::Relaxed);
        if self.serving.load(Ordering::SeqCst) {
            self.entries_while_serving[door.ordinal()].fetch_add(1, Ordering::Relaxed);
            assert!(!self.aborts, "The {} was entered after the seal", door.label());
        }
    }

    /// Entries so far.
    #[must_use]
    pub fn entries(&self, door: Door) -> u64 {
        self.entries[door.ordinal()].load(Ordering::Relaxed)
    }

    /// Entries while serving: zero, or something is wrong.
    #[must_use]
    pub fn entries_while_serving(&self, door: Door) -> u64 {
        self.entries_while_serving[door.ordinal()].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_while_serving_are_held_against_the_device() {
        let guard = ServingGuard::new(false);
        for door in Door::ALL {
            guard.enter(door);
            guard.shut();
            guard.enter(door);
            guard.open();
            guard.enter(door);
            assert_eq!((guard.entries(door), guard.entries_while_serving(door)), (3, 1));
        }
    }

    #[test]
    #[should_panic(expected = "The compiler was entered after the seal")]
    fn an_entry_while_serving_ends_the_process_where_it_was_told_so() {
        let guard = ServingGuard::new(true);
        guard.shut();
        guard.enter(Door::Compiler);
    }
}
