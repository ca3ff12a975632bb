//! Who owns which row.
//!
//! A row is free, a sequence's, or the prefix cache's under a key. Stored rows that no sequence needs are given away, the
//! least recently used first, when no row is free.

use std::collections::{BTreeMap, HashMap};

use super::Row;
use crate::replay::trace::ChainKey;

/// The rows of a cache.
#[derive(Debug)]
pub(super) struct RowPool {
    free: Vec<Row>,
    stored: HashMap<ChainKey, Stored>,
    /// Stored rows that no sequence needs, by the time of their last use.
    idle: BTreeMap<u64, ChainKey>,
    /// Keys that this step's chunks read, once for each.
    read: Vec<ChainKey>,
    /// Keys stored in this step: their states are there only after it.
    fresh: Vec<ChainKey>,
    uses: u64,
}

#[derive(Debug)]
struct Stored {
    row: Row,
    /// Sequences that go on from it.
    pins: u32,
    /// Its key in `idle` while there are none.
    used: u64,
    /// Whether the state is there: from the step after the one that stored it.
    ready: bool,
}

impl RowPool {
    /// All rows free; the lowest is given out first.
    pub(super) fn new(rows: u32) -> Self {
        Self {
            free: (0..rows).rev().map(Row).collect(),
            stored: HashMap::new(),
            idle: BTreeMap::new(),
            read: Vec::new(),
            fresh: Vec::new(),
            uses: 0,
        }
    }

    /// A row for a sequence: a free one, or the stored one that was not used for longest.
    ///
    /// A running sequence holds one row between steps and at most two within one, and there are two rows for each, so
    /// there always is one.
    pub(super) fn allocate(&mut self) -> Row {
        if let Some(row) = self.free.pop() {
            return row;
        }
        let evicted = self.idle.pop_first().and_then(|(_, key)| self.stored.remove(&key));
        evicted.expect("there are two rows for every sequence").row
    }

    /// Takes a sequence's row back.
    pub(super) fn release(&mut self, row: Row) {
        self.free.push(row);
    }

    /// Makes a sequence's row the prefix cache's, and pins it for that sequence. False when the key is stored already:
    /// the row stays the sequence's.
    pub(super) fn store(&mut self, key: ChainKey, row: Row) -> bool {
        if self.stored.contains_key(&key) {
            return false;
        }
        self.stored.insert(key, Stored { row, pins: 1, used: 0, ready: false });
        self.fresh.push(key);
        true
    }

    /// The row stored under a key, if its state is there.
    pub(super) fn find(&self, key: ChainKey) -> Option<Row> {
        self.stored.get(&key).filter(|stored| stored.ready).map(|stored| stored.row)
    }

    /// Keeps a stored row for one more sequence.
    pub(super) fn pin(&mut self, key: ChainKey) {
        if let Some(stored) = self.stored.get_mut(&key) {
            stored.pins += 1;
            self.idle.remove(&stored.used);
        }
    }

    /// Lets one sequence's hold on a stored row go when the step ends: its chunk reads it in this step.
    pub(super) fn unpin_after_step(&mut self, key: ChainKey) {
        self.read.push(key);
    }

    /// The step's copies are done.
    pub(super) fn end_step(&mut self) {
        for key in self.fresh.drain(..) {
            if let Some(stored) = self.stored.get_mut(&key) {
                stored.ready = true;
            }
        }
        for key in self.read.drain(..) {
            let Some(stored) = self.stored.get_mut(&key) else { continue };
            stored.pins -= 1;
            if stored.pins == 0 {
                self.uses += 1;
                stored.used = self.uses;
                self.idle.insert(self.uses, key);
            }
        }
    }
}
