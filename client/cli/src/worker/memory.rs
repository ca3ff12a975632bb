//! The memory that a worker shares: caches, their surroundings, and the packed buffer.

use std::ops::Range;

use anyhow::Context;
use rustix::fd::AsFd;
use statecopy_client::Memory;
use statecopy_descriptors::{Mapping, SealedMemory};

use crate::workload::arrangement::{Arrangement, Surroundings};
use crate::workload::pattern::{Difference, Patterns, State};

/// What every byte of a canary is.
const CANARY: u8 = 0xc5;

/// Canary bytes behind the part of the packed buffer that a gather writes.
const PACKED_CANARY_BYTES: usize = 64;

/// Bytes that are filled or checked at a time: they stay in the nearest cache. A multiple of 8.
const PIECE_BYTES: usize = 16 << 10;

/// Caches and packed buffer of one worker, mapped here.
#[derive(Debug)]
pub(crate) struct WorkerMemory {
    arrangement: Arrangement,
    patterns: Vec<Patterns>,
    layers: Vec<(usize, u64)>,
    caches: Vec<Shared>,
    packed: Shared,
    around: Vec<Surroundings>,
    payload_bytes: usize,
    piece: Vec<u8>,
}

/// Bytes that a worker with such an arrangement touches: payloads and the packed buffer. Gaps cost nothing.
pub(crate) fn touched_bytes(arrangement: &Arrangement, selected_max: u64) -> u64 {
    let rows = arrangement.layout.rows().saturating_add(selected_max);
    let layers = arrangement.layers().count() as u64;
    rows.saturating_mul(layers).saturating_mul(arrangement.layout.payload_bytes())
}

/// What a check of a state found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Words that are not the state's.
    pub(crate) mismatches: u64,
    /// The first byte of the first of them.
    pub(crate) first: Option<Difference>,
}

/// Shared memory, as the worker reaches it.
#[derive(Debug)]
struct Shared {
    memory: Memory,
    sealed: SealedMemory,
    mapping: Mapping,
}

impl Shared {
    fn allocate(name: &str, bytes: u64) -> anyhow::Result<Self> {
        let memory = Memory::allocate(name, bytes)?;
        let descriptor = memory.as_fd().try_clone_to_owned().context("Another descriptor")?;
        let sealed = SealedMemory::adopt(descriptor, bytes)?;
        let mapping = sealed.map()?;
        Ok(Self { memory, sealed, mapping })
    }
}

impl WorkerMemory {
    /// Allocates the caches of an arrangement and a packed buffer for `selected_max` rows of each layer, and plants the
    /// canaries. `page` is the size of a memory page.
    ///
    /// # Errors
    /// When the operating system gives no memory.
    pub(crate) fn allocate(
        arrangement: Arrangement,
        selected_max: u64,
        seed: u64,
        page: u64,
    ) -> anyhow::Result<Self> {
        let payload_bytes = usize::try_from(arrangement.layout.payload_bytes())?;
        let layers: Vec<(usize, u64)> = arrangement.layers().collect();
        let caches = arrangement.regions.iter().map(|plan| Shared::allocate("cache", plan.bytes));
        let caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let states = (layers.len() as u64).checked_mul(selected_max);
        let packed_bytes = states
            .and_then(|states| states.checked_mul(arrangement.layout.payload_bytes()))
            .and_then(|bytes| bytes.checked_add(PACKED_CANARY_BYTES as u64))
            .context("The packed buffer does not fit 64 bits")?;
        let around = arrangement.regions.iter().map(|plan| arrangement.surroundings(plan, page));
        let memory = Self {
            patterns: (0..layers.len()).map(|layer| Patterns::new(seed, layer)).collect(),
            around: around.collect(),
            packed: Shared::allocate("packed", packed_bytes)?,
            arrangement,
            layers,
            caches,
            payload_bytes,
            piece: vec![0; PIECE_BYTES],
        };
        memory.plant_canaries()?;
        Ok(memory)
    }

    /// How the layers lie.
    pub(crate) fn arrangement(&self) -> &Arrangement {
        &self.arrangement
    }

    /// How many layers there are.
    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The memory of every region, in order.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &Memory> {
        self.caches.iter().map(|shared| &shared.memory)
    }

    /// The memory of the packed buffer.
    pub(crate) fn packed(&self) -> &Memory {
        &self.packed.memory
    }

    /// Writes a state into a row of one layer's cache: what a worker's own kernel does in decoding.
    pub(crate) fn write_row(
        &mut self,
        layer: usize,
        row: usize,
        state: State,
    ) -> anyhow::Result<()> {
        let (region, offset) = self.layers[layer];
        let at = self.arrangement.payload(offset, row as u64).start;
        let place = Place { mapping: &self.caches[region].mapping, at, bytes: self.payload_bytes };
        place.fill(self.patterns[layer], state, &mut self.piece)
    }

    /// Counts the words in which a row of one layer's cache is not that state.
    pub(crate) fn check_row(
        &mut self,
        layer: usize,
        row: usize,
        state: State,
    ) -> anyhow::Result<Checked> {
        let (region, offset) = self.layers[layer];
        let at = self.arrangement.payload(offset, row as u64).start;
        let place = Place { mapping: &self.caches[region].mapping, at, bytes: self.payload_bytes };
        place.check(self.patterns[layer], state, &mut self.piece)
    }

    /// Writes a layer's state into one place of the packed buffer: what the chunk maths does.
    pub(crate) fn write_packed(
        &mut self,
        layer: usize,
        place: usize,
        state: State,
    ) -> anyhow::Result<()> {
        let at = (place * self.payload_bytes) as u64;
        let place = Place { mapping: &self.packed.mapping, at, bytes: self.payload_bytes };
        place.fill(self.patterns[layer], state, &mut self.piece)
    }

    /// Counts the words in which one place of the packed buffer is not that layer's state.
    pub(crate) fn check_packed(
        &mut self,
        layer: usize,
        place: usize,
        state: State,
    ) -> anyhow::Result<Checked> {
        let at = (place * self.payload_bytes) as u64;
        let place = Place { mapping: &self.packed.mapping, at, bytes: self.payload_bytes };
        place.check(self.patterns[layer], state, &mut self.piece)
    }

    /// Marks the bytes right behind the first `places` places of the packed buffer, which a gather must not reach.
    pub(crate) fn mark_packed_end(&self, places: usize) -> anyhow::Result<()> {
        let at = (places * self.payload_bytes) as u64;
        Ok(self.packed.mapping.write(at, &[CANARY; PACKED_CANARY_BYTES])?)
    }

    /// Counts the bytes of that mark that were overwritten.
    pub(crate) fn check_packed_end(&self, places: usize) -> anyhow::Result<u64> {
        let mut mark = [0; PACKED_CANARY_BYTES];
        self.packed.mapping.read((places * self.payload_bytes) as u64, &mut mark)?;
        Ok(overwritten(&mark))
    }

    /// Counts canary bytes around the payloads that were overwritten, and pages of gaps that are no holes any more.
    pub(crate) fn check_surroundings(&self) -> anyhow::Result<u64> {
        let mut found = 0;
        for (shared, around) in self.caches.iter().zip(&self.around) {
            for range in &around.canaries {
                let mut bytes = vec![0; usize::try_from(range.end - range.start)?];
                shared.mapping.read(range.start, &mut bytes)?;
                found += overwritten(&bytes);
            }
            let touched = shared.sealed.data_ranges()?;
            found += overlaps(&touched, &around.gaps);
        }
        Ok(found)
    }

    /// Flips one byte of the first layer's first row behind the model's back, to show that the checks see it.
    pub(crate) fn flip_byte(&self) -> anyhow::Result<()> {
        let (region, offset) = self.layers[0];
        let mut byte = [0];
        self.caches[region].mapping.read(offset, &mut byte)?;
        Ok(self.caches[region].mapping.write(offset, &[!byte[0]])?)
    }

    fn plant_canaries(&self) -> anyhow::Result<()> {
        for (shared, around) in self.caches.iter().zip(&self.around) {
            for range in &around.canaries {
                let bytes = vec![CANARY; usize::try_from(range.end - range.start)?];
                shared.mapping.write(range.start, &bytes)?;
            }
        }
        Ok(())
    }
}

/// One state's bytes in shared memory.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    mapping: &'a Mapping,
    at: u64,
    bytes: usize,
}

impl Place<'_> {
    fn fill(self, patterns: Patterns, state: State, piece: &mut [u8]) -> anyhow::Result<()> {
        for start in (0..self.bytes).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(self.bytes - start)];
            patterns.fill(state, start, piece);
            self.mapping.write(self.at + start as u64, piece)?;
        }
        Ok(())
    }

    fn check(self, patterns: Patterns, state: State, piece: &mut [u8]) -> anyhow::Result<Checked> {
        let mut found = Checked::default();
        for start in (0..self.bytes).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(self.bytes - start)];
            self.mapping.read(self.at + start as u64, piece)?;
            let mismatches = patterns.mismatches(state, start, piece);
            if mismatches > 0 && found.first.is_none() {
                found.first = patterns.first_difference(state, start, piece);
            }
            found.mismatches += mismatches;
        }
        Ok(found)
    }
}

fn overwritten(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte != CANARY).count() as u64
}

/// How many of the ranges `touched` reach into one of `gaps`; both are in order.
fn overlaps(touched: &[Range<u64>], gaps: &[Range<u64>]) -> u64 {
    let mut gaps = gaps.iter().peekable();
    let mut found = 0;
    for range in touched {
        while gaps.next_if(|gap| gap.end <= range.start).is_some() {}
        found += u64::from(gaps.peek().is_some_and(|gap| gap.start < range.end));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::preset::Preset;

    fn memory() -> WorkerMemory {
        let arrangement = Arrangement::new(Preset::Tiny, 3, 4).unwrap();
        WorkerMemory::allocate(arrangement, 2, 9, 4096).unwrap()
    }

    #[test]
    fn what_is_written_is_found_and_nothing_around_it_changes() {
        let mut memory = memory();
        for layer in 0..3 {
            for row in 0..4 {
                memory.write_row(layer, row, State::Numbered(row as u64)).unwrap();
            }
        }
        assert_eq!(memory.check_row(2, 3, State::Numbered(3)).unwrap(), Checked::default());
        assert_eq!(memory.check_row(2, 3, State::Numbered(2)).unwrap().mismatches, 24_576 / 8);
        assert_eq!(memory.check_surroundings().unwrap(), 0);
    }

    #[test]
    fn a_flipped_byte_an_overwritten_canary_and_a_touched_gap_are_seen() {
        let mut memory = memory();
        assert_eq!(memory.check_row(0, 0, State::Zero).unwrap(), Checked::default());
        memory.flip_byte().unwrap();
        let first = Some(Difference { byte: 0, is: 0xff, must_be: 0 });
        let found = Checked { mismatches: 1, first };
        assert_eq!(memory.check_row(0, 0, State::Zero).unwrap(), found);
        let canary = memory.around[0].canaries[0].start;
        memory.caches[0].mapping.write(canary, &[0]).unwrap();
        assert_eq!(memory.check_surroundings().unwrap(), 1);
        let gap = memory.around[1].gaps[0].start;
        memory.caches[1].mapping.write(gap, &[0]).unwrap();
        assert_eq!(memory.check_surroundings().unwrap(), 2);
    }

    #[test]
    fn a_write_past_the_packed_rows_is_seen() {
        let mut memory = memory();
        memory.mark_packed_end(2).unwrap();
        memory.write_packed(0, 1, State::Numbered(1)).unwrap();
        assert_eq!(memory.check_packed_end(2).unwrap(), 0);
        memory.write_packed(0, 2, State::Zero).unwrap();
        assert_eq!(memory.check_packed_end(2).unwrap(), 64);
    }

    #[test]
    fn overlaps_are_counted_once_for_each_touched_range() {
        let touched = [0..10, 20..30, 40..50];
        assert_eq!(overlaps(&touched, &[10..20, 30..40, 50..60]), 0);
        assert_eq!(overlaps(&touched, &[9..20, 30..40]), 1);
        assert_eq!(overlaps(&touched, &[0..100, 100..200]), 3);
        assert_eq!(overlaps(&[], &[0..100, 100..200]), 0);
    }
}
