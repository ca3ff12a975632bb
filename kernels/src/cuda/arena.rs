//! Device memory for tables of base addresses, allocated once when the device is opened.
//!
//! A binding set of many layers has a table on the device that its kernels read. Binding happens while others are served, so
//! it must not allocate device memory: tables are cut from one arena.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::context::Context;
use super::driver::DriverError;
use super::memory::DeviceMemory;

/// Bytes of the arena: tables of a million layers together.
pub(super) const ARENA_BYTES: u64 = 8 << 20;
/// Tables begin and end at multiples of it.
const CUT_BYTES: u64 = 64;

/// Why a table was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum TableError {
    /// The arena has no hole of that size.
    #[error("The tables of base addresses have no room left for {bytes} bytes, of {ARENA_BYTES}")]
    Full {
        /// Bytes of the table.
        bytes: u64,
    },
    /// The table could not be written.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The memory of all tables.
#[derive(Debug)]
pub(super) struct Arena {
    memory: DeviceMemory,
    holes: Mutex<Holes>,
}

impl Arena {
    pub(super) fn allocate(context: &Arc<Context>) -> Result<Self, DriverError> {
        let memory = DeviceMemory::zeroed(context, ARENA_BYTES)?;
        Ok(Self { memory, holes: Mutex::new(Holes::of(ARENA_BYTES)) })
    }

    /// Writes a table.
    pub(super) fn table(self: &Arc<Self>, addresses: &[u64]) -> Result<Table, TableError> {
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_ne_bytes()).collect();
        let asked = (bytes.len() as u64).next_multiple_of(CUT_BYTES);
        let at = self.holes().cut(asked).ok_or(TableError::Full { bytes: asked })?;
        let table = Table { arena: Arc::clone(self), at, bytes: asked };
        let current = self.memory.context().enter()?;
        // SAFETY: the cut lies in the arena.
        unsafe { current.write(table.address(), &bytes) }?;
        Ok(table)
    }

    fn holes(&self) -> std::sync::MutexGuard<'_, Holes> {
        self.holes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A table, until it is dropped. No kernel reads it any more then.
#[derive(Debug)]
pub(super) struct Table {
    arena: Arc<Arena>,
    at: u64,
    bytes: u64,
}

impl Table {
    pub(super) fn address(&self) -> u64 {
        self.arena.memory.range().start + self.at
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.arena.holes().fill(self.at, self.bytes);
    }
}

/// The unused ranges of an arena: bytes by start. No two touch.
#[derive(Debug, PartialEq, Eq)]
struct Holes(BTreeMap<u64, u64>);

impl Holes {
    fn of(bytes: u64) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    /// Takes that many bytes from the first hole that has them.
    fn cut(&mut self, bytes: u64) -> Option<u64> {
        let (at, size) =
            self.0.iter().map(|(at, size)| (*at, *size)).find(|(_, size)| *size >= bytes)?;
        self.0.remove(&at);
        if size > bytes {
            self.0.insert(at + bytes, size - bytes);
        }
        Some(at)
    }

    /// Gives a cut back.
    fn fill(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, size)) = self.0.range(..at).next_back()
            && before + size == at
        {
            at = *before;
            bytes += size;
        }
        if let Some(size) = self.0.remove(&(at + bytes)) {
            bytes += size;
        }
        self.0.insert(at, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_disjoint_and_what_is_given_back_is_whole_again() {
        // Every order of giving four cuts back.
        for order in 0..24_usize {
            let mut holes = Holes::of(1024);
            let mut cuts: Vec<(u64, u64)> = [128, 256, 64, 576]
                .into_iter()
                .map(|bytes| (holes.cut(bytes).unwrap(), bytes))
                .collect();
            assert_eq!(cuts, [(0, 128), (128, 256), (384, 64), (448, 576)]);
            assert_eq!(holes.cut(1), None);
            let mut left = order;
            for choices in (1..=4).rev() {
                let (at, bytes) = cuts.remove(left % choices);
                left /= choices;
                holes.fill(at, bytes);
                let mut again = Holes(holes.0.clone());
                assert!(again.cut(bytes).is_some(), "what was given back can be cut again");
            }
            assert_eq!(holes, Holes::of(1024));
        }
    }

    #[test]
    fn a_hole_that_is_too_small_is_passed_over() {
        let mut holes = Holes::of(1024);
        let first = holes.cut(64).unwrap();
        let _second = holes.cut(64).unwrap();
        holes.fill(first, 64);
        assert_eq!(holes.cut(128), Some(128));
        assert_eq!(holes.cut(64), Some(0));
        assert_eq!(holes.cut(1024), None);
    }
}
