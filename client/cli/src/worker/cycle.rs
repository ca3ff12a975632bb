//! One step of a worker: gather, check, change, scatter, and a model of the cache that says what must be there.

use std::time::Instant;

use anyhow::Context;
use statecopy_client::{Direction, Moved};

use super::copier::{Call, Copier, Target};
use super::memory::{Checked, WorkerMemory};
use crate::workload::latency::Latencies;
use crate::workload::pattern::{State, States};
use crate::workload::selection::Selection;

/// A worker with its memory, its copier and its model: one state a row, in every layer its own pattern.
#[derive(Debug)]
pub(crate) struct Worker<C> {
    memory: WorkerMemory,
    copier: C,
    model: Vec<State>,
    states: States,
    tally: Tally,
}

/// What a worker counted.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Rows that gathers copied, over all layers.
    pub(crate) rows_gathered: u64,
    /// Rows that gathers cleared.
    pub(crate) rows_cleared: u64,
    /// Rows that scatters copied.
    pub(crate) rows_scattered: u64,
    /// Rows that scatters skipped.
    pub(crate) rows_skipped: u64,
    /// Words, canary bytes, gap pages and row counts that are not what they must be.
    pub(crate) mismatches: u64,
    /// Where the first of them are.
    pub(crate) first_mismatches: Vec<String>,
    /// Gather calls.
    pub(crate) gather: Latencies,
    /// Scatter calls.
    pub(crate) scatter: Latencies,
}

/// Mismatches whose place is told.
pub(crate) const PLACES_MAX: usize = 8;

impl Tally {
    /// Counts mismatches. `place` names where they are.
    fn count(&mut self, mismatches: u64, place: impl FnOnce() -> String) {
        self.mismatches += mismatches;
        if mismatches > 0 && self.first_mismatches.len() < PLACES_MAX {
            self.first_mismatches.push(place());
        }
    }

    fn count_checked(&mut self, checked: Checked, place: impl FnOnce() -> String) {
        self.count(checked.mismatches, || match checked.first {
            Some(first) => format!("{}, {first}", place()),
            None => place(),
        });
    }
}

impl<C: Copier> Worker<C> {
    /// A worker whose cache was never written.
    pub(crate) fn new(memory: WorkerMemory, copier: C) -> Self {
        let rows = usize::try_from(memory.arrangement().layout.rows()).unwrap_or(usize::MAX);
        Self {
            memory,
            copier,
            model: vec![State::Zero; rows],
            states: States::default(),
            tally: Tally::default(),
        }
    }

    /// The memory.
    pub(crate) fn memory(&self) -> &WorkerMemory {
        &self.memory
    }

    /// Ends the work.
    pub(crate) fn into_parts(self) -> (Tally, C) {
        (self.tally, self.copier)
    }

    /// Gathers the selected rows of every layer, checks them, gives each place a new state, and scatters it. With
    /// `batch` all layers are one request, otherwise each is its own.
    ///
    /// # Errors
    /// When a copy is refused or its outcome is unknown.
    pub(crate) fn step(&mut self, selection: &Selection, batch: bool) -> anyhow::Result<()> {
        let places = selection.sources.len();
        let initial = (0..places).map(|place| self.initial(selection, place)).collect::<Vec<_>>();
        let after: Vec<State> = (0..places).map(|_| self.states.fresh()).collect();
        let cycle = Cycle { selection, initial: &initial, after: &after };
        if batch {
            self.copy_layers(Target::All, 0..self.memory.layers(), &cycle)?;
        } else {
            for layer in 0..self.memory.layers() {
                self.copy_layers(Target::Layer(layer), layer..layer + 1, &cycle)?;
            }
        }
        for (place, state) in after.into_iter().enumerate() {
            if let Some(row) = selection.destination(place, self.rows()) {
                self.model[row] = state;
            }
        }
        Ok(())
    }

    /// Rewrites a row of every layer in place, as decoding does, without the daemon.
    ///
    /// # Errors
    /// When the row is none.
    pub(crate) fn decode(&mut self, row: usize) -> anyhow::Result<()> {
        let state = self.states.fresh();
        for layer in 0..self.memory.layers() {
            self.memory.write_row(layer, row, state)?;
        }
        *self.model.get_mut(row).context("No such row")? = state;
        Ok(())
    }

    /// Checks every byte of a row in every layer.
    ///
    /// # Errors
    /// When the row is none.
    pub(crate) fn check_row(&mut self, row: usize) -> anyhow::Result<()> {
        let state = *self.model.get(row).context("No such row")?;
        for layer in 0..self.memory.layers() {
            let checked = self.memory.check_row(layer, row, state)?;
            self.tally.count_checked(checked, || format!("layer {layer}, row {row}"));
        }
        Ok(())
    }

    /// Checks every byte of every row, the canaries, and that gaps are still holes.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub(crate) fn check_everything(&mut self) -> anyhow::Result<()> {
        // Gaps first: reading a hole is not what touches it, but nothing here should have to rely on that.
        let found = self.memory.check_surroundings()?;
        self.tally.count(found, || "bytes of the caches that belong to no row".to_owned());
        (0..self.model.len()).try_for_each(|row| self.check_row(row))
    }

    fn rows(&self) -> u64 {
        self.model.len() as u64
    }

    fn initial(&self, selection: &Selection, place: usize) -> State {
        selection.source(place, self.rows()).map_or(State::Zero, |row| self.model[row])
    }

    fn copy_layers(
        &mut self,
        target: Target,
        layers: std::ops::Range<usize>,
        cycle: &Cycle<'_>,
    ) -> anyhow::Result<()> {
        let selection = cycle.selection;
        let places = selection.sources.len();
        let per_layer = layers.len() as u64;
        self.memory.mark_packed_end(layers.len() * places)?;
        let gather = self.copy(Direction::Gather, target, selection)?;
        self.tally.rows_gathered += gather.copied;
        self.tally.rows_cleared += gather.masked;
        let read = (0..places).filter(|place| selection.source(*place, self.rows()).is_some());
        self.check_counts(gather, read.count() as u64 * per_layer, places as u64 * per_layer);
        let found = self.memory.check_packed_end(layers.len() * places)?;
        self.tally.count(found, || "bytes behind the gathered rows".to_owned());
        for (at, layer) in layers.enumerate() {
            for place in 0..places {
                let packed = at * places + place;
                let initial = cycle.initial[place];
                let checked = self.memory.check_packed(layer, packed, initial)?;
                self.tally.count_checked(checked, || {
                    format!("layer {layer}, gathered row {}", selection.sources[place])
                });
                self.memory.write_packed(layer, packed, cycle.after[place])?;
            }
        }
        let scatter = self.copy(Direction::Scatter, target, selection)?;
        self.tally.rows_scattered += scatter.copied;
        self.tally.rows_skipped += scatter.masked;
        let written =
            (0..places).filter(|place| selection.destination(*place, self.rows()).is_some());
        self.check_counts(scatter, written.count() as u64 * per_layer, places as u64 * per_layer);
        Ok(())
    }

    fn copy(
        &mut self,
        direction: Direction,
        target: Target,
        selection: &Selection,
    ) -> anyhow::Result<Moved> {
        let flags = selection.flags.as_deref();
        let (indices, flags) = match direction {
            Direction::Gather => (&selection.sources, flags),
            Direction::Scatter => {
                (&selection.destinations, flags.filter(|_| selection.scatter_with_flags))
            }
        };
        let call = Call { direction, target, width: selection.width, indices, flags };
        let start = Instant::now();
        let moved = self.copier.copy(&call)?;
        let took = start.elapsed();
        match direction {
            Direction::Gather => self.tally.gather.record(took),
            Direction::Scatter => self.tally.scatter.record(took),
        }
        Ok(moved)
    }

    /// The daemon's own count of rows must be the model's.
    fn check_counts(&mut self, moved: Moved, copied: u64, all: u64) {
        let masked = all - copied;
        let right = moved.copied == copied && moved.masked == masked;
        self.tally.count(u64::from(!right), || {
            let (said, left) = (moved.copied, moved.masked);
            format!("the daemon counts {said} rows and {left} masked, not {copied} and {masked}")
        });
    }
}

/// One step's rows, and the states before and after it at each place.
#[derive(Debug, Clone, Copy)]
struct Cycle<'a> {
    selection: &'a Selection,
    initial: &'a [State],
    after: &'a [State],
}

#[cfg(test)]
mod tests;
