//! The memory of the one worker: caches and packed buffers, shared with the daemon and copied in process alike.

use std::cell::RefCell;
use std::collections::VecDeque;

use anyhow::{Context, ensure};
use statecopy_kernels::device::Moved;
use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_kernels::reference;

use super::plan::{CachePlan, Case, Kind, Operation};
use super::target::{Shared, Target};
use crate::failure::{EXIT_MISMATCHES, Failure};
use crate::workload::random::{GOLDEN, Random, mix};

/// What packed memory and rows are filled with where the copy must write something else.
const STALE: u8 = 0xa5;

/// Layers of one layout in one region, and what their rows hold.
#[derive(Debug)]
pub(super) struct Cache<T: Target> {
    /// Where they lie.
    pub(super) shared: Shared<T>,
    /// The layout of each.
    pub(super) layout: CacheLayout,
    /// Every layer.
    pub(super) layers: Vec<Placement>,
    /// The same layers without gaps, for the reference: `states` is their memory.
    compact: Vec<Placement>,
    states: Vec<u8>,
}

impl<T: Target> Cache<T> {
    fn allocate(target: &T, plan: CachePlan, seed: u64) -> anyhow::Result<Self> {
        let CachePlan { preset, layers, rows, .. } = plan;
        let layout = preset.layout(rows)?;
        // Layers side by side in a page, as many as fit; then the next pages.
        let per_page = preset.shape().layers_per_page;
        let pages_bytes = preset.page_bytes() * rows;
        let bytes = pages_bytes * layers.div_ceil(per_page) as u64;
        let shared = target.allocate("cache", bytes)?;
        let places = (0..layers).map(|layer| {
            let pages = (layer / per_page) as u64 * pages_bytes;
            layout.place(pages + preset.offset_bytes((layer % per_page) as u64), bytes)
        });
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let [_, heads, values, keys] = *layout.shape();
        let dense = CacheLayout::with_page_stride(
            layout.dtype(),
            [rows, heads, values, keys],
            heads * values * keys,
        )?;
        let layer_bytes = rows * layout.payload_bytes();
        let all_bytes = layer_bytes * layers as u64;
        let compact = (0..layers as u64).map(|layer| dense.place(layer * layer_bytes, all_bytes));
        let cache = Self {
            shared,
            layers: places,
            compact: compact.collect::<Result<Vec<_>, _>>()?,
            states: pattern(seed, all_bytes)?,
            layout,
        };
        for row in cache.rows() {
            cache.restore(row)?;
        }
        Ok(cache)
    }

    /// Every row of every layer: where it lies in the region, and where in `states`.
    fn rows(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let layers = self.layers.iter().zip(&self.compact);
        layers.flat_map(|(placed, dense)| {
            (0..placed.layout().rows()).filter_map(|row| {
                let at = dense.offset() + row * dense.layout().payload_bytes();
                let from = placed.offset() + row * placed.layout().page_stride_bytes();
                Some((from, usize::try_from(at).ok()?))
            })
        })
    }

    fn row_bytes(&self) -> usize {
        usize::try_from(self.layout.payload_bytes()).unwrap_or(usize::MAX)
    }

    fn restore(&self, (at, state): (u64, usize)) -> anyhow::Result<()> {
        let row = &self.states[state..state + self.row_bytes()];
        T::write(&self.shared.region, at, row)
    }
}

/// Everything that copies of the benchmark read and write.
#[derive(Debug)]
pub(super) struct BenchMemory<T: Target> {
    caches: Vec<(&'static str, Cache<T>)>,
    /// One region for all packed buffers.
    pub(super) packed: Shared<T>,
    /// What a scatter writes.
    finals: Vec<u8>,
}

impl<T: Target> BenchMemory<T> {
    /// Allocates and fills what the cases need. `rows` takes the place of the rows that each cache should have.
    ///
    /// # Errors
    /// When there is no memory, or a case selects more rows than there are.
    pub(super) fn allocate(
        target: &T,
        cases: &[Case],
        rows: Option<u64>,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let mut caches: Vec<(&str, Cache<T>)> = Vec::new();
        for case in cases {
            let usual = case.cache();
            let plan = CachePlan { rows: rows.unwrap_or(usual.rows), ..usual };
            if case.selected() > plan.rows {
                let sentence = format!("{} selects more rows than {}", case.name(), plan.rows);
                return Err(Failure::usage(sentence, "Give caches more rows.").into());
            }
            if caches.iter().all(|(label, _)| *label != plan.label) {
                caches.push((plan.label, Cache::allocate(target, plan, mix(seed))?));
            }
        }
        let largest = cases.iter().map(|case| case.packed_bytes()).max().unwrap_or(0).max(4096);
        let pools = cases.iter().map(|case| case.packed_bytes() * case.buffers());
        let packed = target.allocate("packed", pools.max().unwrap_or(0).max(largest))?;
        Ok(Self { caches, packed, finals: pattern(!seed, largest)? })
    }

    /// Every cache, each with a name for its layers.
    pub(super) fn caches(&self) -> impl Iterator<Item = (&'static str, &Cache<T>)> {
        self.caches.iter().map(|(label, cache)| (*label, cache))
    }

    /// The cache of a case, and its place in the order of [`BenchMemory::caches`].
    pub(super) fn cache(&self, case: Case) -> anyhow::Result<(usize, &Cache<T>)> {
        let label = case.cache().label;
        let at = self.caches.iter().position(|(found, _)| *found == label);
        let at = at.context("A case without a cache")?;
        Ok((at, &self.caches[at].1))
    }

    /// The packed buffers of a case.
    pub(super) fn pool(&self, case: Case) -> Pool {
        Pool::new(case.packed_bytes(), case.buffers(), case.kind)
    }

    /// Puts every row of a case's cache back.
    pub(super) fn restore(&self, case: Case) -> anyhow::Result<()> {
        let (_, cache) = self.cache(case)?;
        cache.rows().try_for_each(|row| cache.restore(row))
    }

    /// What every path of a case must leave and answer, by the reference.
    pub(super) fn expect(
        &self,
        case: Case,
        indices: &[i32],
        flags: Option<&[bool]>,
    ) -> anyhow::Result<Expected> {
        let (_, cache) = self.cache(case)?;
        let wide: Vec<i64> = indices.iter().map(|index| i64::from(*index)).collect();
        let flags: Option<Vec<u8>> =
            flags.map(|flags| flags.iter().copied().map(u8::from).collect());
        let mut packed = vec![STALE; usize::try_from(case.packed_bytes())?];
        let mut states = cache.states.clone();
        let moved = match case.operation() {
            Operation::Gather | Operation::Clear => {
                reference::gather(&states, &cache.compact, &wide, flags.as_deref(), &mut packed)
            }
            Operation::Scatter => {
                let bytes = packed.len();
                packed.copy_from_slice(&self.finals[..bytes]);
                reference::scatter(&mut states, &cache.compact, &wide, &packed)
            }
        };
        Ok(Expected { moved, packed, states })
    }

    /// Puts packed buffers, and the rows that the last check found right, into the state in which every path begins.
    pub(super) fn prepare(
        &self,
        case: Case,
        pool: &Pool,
        expected: &Expected,
    ) -> anyhow::Result<()> {
        let (_, cache) = self.cache(case)?;
        let bytes = cache.row_bytes();
        let differing = cache.rows().filter(|(_, state)| {
            let row = *state..*state + bytes;
            expected.states[row.clone()] != cache.states[row]
        });
        differing.collect::<Vec<_>>().into_iter().try_for_each(|row| cache.restore(row))?;
        self.fill_packed(case, pool)
    }

    /// Fills packed buffers with what a scatter writes, or with what a gather must replace.
    pub(super) fn fill_packed(&self, case: Case, pool: &Pool) -> anyhow::Result<()> {
        let bytes = usize::try_from(case.packed_bytes())?;
        let stale = match case.operation() {
            Operation::Scatter => Vec::new(),
            Operation::Gather | Operation::Clear => vec![STALE; bytes],
        };
        let filling = if stale.is_empty() { &self.finals[..bytes] } else { &stale };
        pool.offsets().try_for_each(|offset| T::write(&self.packed.region, offset, filling))
    }

    /// Holds what one copy left, and what it said, against the reference.
    ///
    /// # Errors
    /// A failure with the exit code of mismatches.
    pub(super) fn check(
        &self,
        case: Case,
        expected: &Expected,
        (packed, moved): (u64, Moved),
        path: &'static str,
    ) -> anyhow::Result<()> {
        let (_, cache) = self.cache(case)?;
        let mut found = vec![0; expected.packed.len()];
        T::read(&self.packed.region, packed, &mut found)?;
        let mut right = moved == expected.moved && found == expected.packed;
        let mut row = vec![0; cache.row_bytes()];
        for (at, state) in cache.rows() {
            T::read(&cache.shared.region, at, &mut row)?;
            right &= row == expected.states[state..state + row.len()];
        }
        ensure!(
            right,
            Failure {
                exit: EXIT_MISMATCHES,
                sentence: format!(
                    "{}: the bytes that {path} left are not the reference's",
                    case.name()
                ),
                remedy: "Nothing of it was timed. This is an error of the program.".to_owned(),
            }
        );
        Ok(())
    }
}

/// What a copy must leave and answer.
#[derive(Debug)]
pub(super) struct Expected {
    /// The answer.
    pub(super) moved: Moved,
    packed: Vec<u8>,
    /// Every row of the cache.
    states: Vec<u8>,
}

/// Packed buffers of one size, taken and given back: the allocation of a production call.
#[derive(Debug)]
pub(super) struct Pool {
    free: RefCell<VecDeque<u64>>,
    bytes: u64,
    buffers: u64,
    kind: Kind,
}

impl Pool {
    fn new(bytes: u64, buffers: u64, kind: Kind) -> Self {
        let pool = Self { free: RefCell::default(), bytes, buffers, kind };
        pool.free.borrow_mut().extend(pool.offsets());
        pool
    }

    /// Takes a buffer: on the host the one that was given back last, as an allocator would; on a GPU the one that was not used
    /// for the longest time.
    ///
    /// # Errors
    /// When none is free.
    pub(super) fn take(&self) -> anyhow::Result<Packed<'_>> {
        let mut free = self.free.borrow_mut();
        let offset = match self.kind {
            Kind::Host => free.pop_back(),
            Kind::Cuda => free.pop_front(),
        };
        Ok(Packed { pool: self, offset: offset.context("No packed buffer is free")? })
    }

    fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let bytes = self.bytes.next_multiple_of(16);
        (0..self.buffers).map(move |at| at * bytes)
    }
}

/// A packed buffer in use. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Packed<'a> {
    pool: &'a Pool,
    offset: u64,
}

impl Packed<'_> {
    /// Where it begins in the packed region, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// How long it is.
    pub(super) fn bytes(&self) -> u64 {
        self.pool.bytes
    }
}

impl Drop for Packed<'_> {
    fn drop(&mut self) {
        self.pool.free.borrow_mut().push_back(self.offset);
    }
}

/// Bytes that tell every place from every other.
fn pattern(seed: u64, bytes: u64) -> anyhow::Result<Vec<u8>> {
    let mut random = Random::new(seed ^ GOLDEN);
    let mut filled = Vec::with_capacity(usize::try_from(bytes)?);
    for _ in 0..bytes.div_ceil(8) {
        filled.extend_from_slice(&random.next().to_ne_bytes());
    }
    filled.truncate(usize::try_from(bytes)?);
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use statecopy_kernels::guard::ServingGuard;

    use super::super::plan::Turn;
    use super::super::target::Host;
    use super::*;

    const FIRST: Turn = Turn { trial: 0, place: 0, timed: true };

    fn memory(case: Case) -> BenchMemory<Host> {
        let host = Host::open(NonZeroUsize::MIN, &Arc::new(ServingGuard::new(true))).unwrap();
        BenchMemory::allocate(&host, &[case], None, 3).unwrap()
    }

    fn case(name: &str) -> Case {
        Case::chosen(Kind::Host, &[name.to_owned()])[0]
    }

    #[test]
    fn a_copy_that_moved_nothing_or_one_byte_too_few_is_found() {
        let case = case("24576/s8/gather");
        let memory = memory(case);
        let pool = memory.pool(case);
        memory.restore(case).unwrap();
        memory.fill_packed(case, &pool).unwrap();
        let (_, cache) = memory.cache(case).unwrap();
        let packed = pool.take().unwrap();
        let indices = case.indices(1, FIRST, cache.layout.rows());
        let moved = Moved { copied: 8, masked: 0 };
        let expected = memory.expect(case, &indices, None).unwrap();
        assert_eq!(expected.moved, moved);
        let check = || memory.check(case, &expected, (packed.offset(), moved), "a path");
        let error = check().unwrap_err();
        assert_eq!(Failure::of(&error).exit, EXIT_MISMATCHES);

        let mapping = memory.packed.region.mapping();
        let mut right = vec![0; usize::try_from(packed.bytes()).unwrap()];
        for (place, index) in indices.iter().enumerate() {
            let row = usize::try_from(*index).unwrap() * 24_576;
            right[place * 24_576..][..24_576].copy_from_slice(&cache.states[row..][..24_576]);
        }
        mapping.write(packed.offset(), &right).unwrap();
        check().unwrap();
        let last = packed.offset() + packed.bytes() - 1;
        mapping.fill(last, 1, !right[right.len() - 1]).unwrap();
        assert!(check().is_err());
    }

    #[test]
    fn a_row_that_a_copy_must_not_touch_is_looked_at() {
        let case = case("batch69");
        let memory = memory(case);
        let pool = memory.pool(case);
        memory.restore(case).unwrap();
        memory.fill_packed(case, &pool).unwrap();
        let (_, cache) = memory.cache(case).unwrap();
        let packed = pool.take().unwrap();
        let expected = memory.expect(case, &[5], None).unwrap();
        memory.packed.region.mapping().write(packed.offset(), &expected.packed).unwrap();
        let left = (packed.offset(), expected.moved);
        memory.check(case, &expected, left, "a path").unwrap();
        let (at, _) = cache.rows().last().unwrap();
        cache.shared.region.mapping().fill(at, 1, 0).unwrap();
        cache.shared.region.mapping().fill(at + 1, 1, 1).unwrap();
        assert!(memory.check(case, &expected, left, "a path").is_err());
    }

    #[test]
    fn a_buffer_given_back_is_taken_again() {
        let pool = Pool::new(24_576, 2, Kind::Host);
        let first = pool.take().unwrap().offset();
        let held = [pool.take().unwrap(), pool.take().unwrap()];
        assert_eq!(held[0].offset(), first);
        assert!(pool.take().is_err());
        drop(held);
        assert_eq!(pool.take().unwrap().bytes(), 24_576);
        let pool = Pool::new(24_576, 3, Kind::Cuda);
        let taken: Vec<u64> = (0..4).map(|_| pool.take().unwrap().offset()).collect();
        assert_eq!(taken, [0, 24_576, 2 * 24_576, 0]);
    }
}
