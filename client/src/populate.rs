//! Populating pages from this process, so that the daemon's memory group never pays for a worker's memory.
//!
//! Shared pages are charged to the memory group that touches them first. Before a layer is registered, exactly the
//! pages that its payloads touch are populated; gap pages stay holes.

use std::iter::Peekable;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use statecopy_kernels::layout::CacheLayout;

use crate::error::Error;
use crate::region::RegionRecord;

/// One system call populates at most this much, and one step of work as much again.
const BATCH_BYTES: u64 = 64 << 20;
/// Ranges of one step of work.
const BATCH_RANGES: usize = 1024;

/// Populates these ranges of a region, off the async threads, a bounded batch at a time.
pub(crate) async fn populate(
    region: &Arc<RegionRecord>,
    mut ranges: impl Iterator<Item = Range<u64>>,
) -> Result<(), Error> {
    if memfd(region).is_none() {
        return Ok(());
    }
    loop {
        let batch = next_batch(&mut ranges);
        if batch.is_empty() {
            return Ok(());
        }
        let of = Arc::clone(region);
        let done = tokio::task::spawn_blocking(move || allocate(&of, &batch)).await;
        done.unwrap_or_else(|stopped| Err(std::io::Error::other(stopped))).map_err(|source| {
            Error::Memory {
                name: format!("of region {}", region.key.0),
                what: "populated",
                source: source.into(),
            }
        })?;
    }
}

/// Only a memfd has seals; of anything else the daemon has its own opinion.
fn memfd(region: &RegionRecord) -> Option<BorrowedFd<'_>> {
    region.source.file().filter(|file| rustix::fs::fcntl_get_seals(file).is_ok())
}

fn allocate(region: &RegionRecord, ranges: &[Range<u64>]) -> std::io::Result<()> {
    let Some(file) = memfd(region) else { return Ok(()) };
    for range in ranges {
        let bytes = range.end - range.start;
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, range.start, bytes)
        })?;
    }
    Ok(())
}

fn next_batch(ranges: &mut impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    while bytes < BATCH_BYTES && batch.len() < BATCH_RANGES {
        let Some(range) = ranges.next() else { break };
        bytes += range.end - range.start;
        batch.push(range);
    }
    batch
}

/// The bytes of a whole region, or of a part of it.
pub(crate) fn whole(range: Range<u64>, page: u64, bytes: u64) -> impl Iterator<Item = Range<u64>> {
    merged(std::iter::once(range), page, bytes)
}

/// The pages that the payloads of a cache touch, merged; nothing past the region's `bytes`.
pub(crate) fn payload_pages(
    layout: &CacheLayout,
    offset: u64,
    page: u64,
    bytes: u64,
) -> impl Iterator<Item = Range<u64>> + use<> {
    let (stride, payload) = (layout.page_stride_bytes(), layout.payload_bytes());
    let payloads = (0..layout.rows()).map_while(move |row| {
        let start = row.checked_mul(stride)?.checked_add(offset)?;
        Some(start..start.checked_add(payload)?)
    });
    merged(payloads, page, bytes)
}

/// Ascending ranges rounded out to pages, neighbours made one, cut to the region and to [`BATCH_BYTES`] each.
fn merged(
    ranges: impl Iterator<Item = Range<u64>>,
    page: u64,
    bytes: u64,
) -> impl Iterator<Item = Range<u64>> {
    let rounded = ranges
        .map(move |range| {
            let end = range.end.min(bytes).checked_next_multiple_of(page).unwrap_or(bytes);
            range.start / page * page..end.min(bytes)
        })
        .filter(|range| range.start < range.end);
    Merged { ranges: rounded.peekable(), rest: 0..0 }
}

struct Merged<I: Iterator<Item = Range<u64>>> {
    ranges: Peekable<I>,
    rest: Range<u64>,
}

impl<I: Iterator<Item = Range<u64>>> Iterator for Merged<I> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.rest.is_empty() {
            self.rest = self.ranges.next()?;
        }
        while self.rest.end - self.rest.start < BATCH_BYTES {
            let end = self.rest.end;
            let Some(next) = self.ranges.next_if(|next| next.start <= end) else { break };
            self.rest.end = end.max(next.end);
        }
        let start = self.rest.start;
        let end = self.rest.end.min(start + BATCH_BYTES);
        self.rest.start = end;
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use statecopy_proto::DataType;

    use super::*;
    use crate::memory::Memory;
    use crate::region::{RegionKey, Source};

    fn region(memory: &Memory) -> Arc<RegionRecord> {
        let source = Source::Memory(memory.clone());
        Arc::new(RegionRecord { key: RegionKey(1), bytes: memory.bytes(), source })
    }

    fn wait<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    proptest! {
        #[test]
        fn exactly_the_pages_that_payloads_touch_are_named_once(
            rows in 1_u64..40, values in 1_u64..3000, gap in 0_u64..9000, offset in 0_u64..10_000,
            page in prop_oneof![Just(4096_u64), Just(16_384), Just(65_536)], beyond in 0_u64..5000,
        ) {
            let shape = [rows, 1, 1, values];
            let layout = CacheLayout::with_page_stride(DataType::UInt8, shape, values + gap).unwrap();
            let bytes = offset + layout.span_bytes() + beyond;
            let mut touched = BTreeSet::new();
            for row in 0..rows {
                let start = offset + row * (values + gap);
                touched.extend(start / page..=(start + values - 1) / page);
            }
            let ranges: Vec<Range<u64>> = payload_pages(&layout, offset, page, bytes).collect();
            let mut named = Vec::new();
            for range in &ranges {
                prop_assert!(range.start < range.end && range.end <= bytes);
                prop_assert!(range.start.is_multiple_of(page));
                prop_assert!(range.end.is_multiple_of(page) || range.end == bytes);
                named.extend(range.start / page..range.end.div_ceil(page));
            }
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", ranges);
            prop_assert_eq!(named, touched.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn gap_pages_stay_holes() {
        let page = rustix::param::page_size() as u64;
        // Two pages of payload that begin half-way into a page, then seven pages of gap.
        let shape = [5, 1, 2, page];
        let layout = CacheLayout::with_page_stride(DataType::UInt8, shape, 9 * page).unwrap();
        let offset = page / 2;
        let memory = Memory::allocate("cache", offset + layout.span_bytes() + 20 * page).unwrap();
        memory.write(offset, &[5]).unwrap();
        let pages = payload_pages(&layout, offset, page, memory.bytes());
        wait(populate(&region(&memory), pages)).unwrap();
        // SEEK_DATA shows only pages that were written, so the kernel's count tells.
        let blocks = rustix::fs::fstat(&memory).unwrap().st_blocks;
        assert_eq!(blocks.cast_unsigned() * 512, 5 * 3 * page);
        assert_eq!(memory.data_ranges().unwrap(), std::iter::once(0..page).collect::<Vec<_>>());
        assert_eq!(memory.read_vec(offset, 1).unwrap(), [5], "what was there stays");
    }

    #[test]
    fn a_large_range_is_cut_into_bounded_steps() {
        let bytes = 3 * BATCH_BYTES + 5;
        let ranges: Vec<Range<u64>> = whole(10..bytes, 4096, bytes).collect();
        let ends: Vec<u64> = ranges.iter().map(|range| range.end).collect();
        assert_eq!(ends, [BATCH_BYTES, 2 * BATCH_BYTES, 3 * BATCH_BYTES, bytes]);
        assert!(ranges.iter().all(|range| range.end - range.start <= BATCH_BYTES));
        let mut all = ranges.into_iter();
        assert_eq!(next_batch(&mut all).len(), 1);
        let mut small = (0..3000_u64).map(|at| at * 8192..at * 8192 + 4096);
        assert_eq!(next_batch(&mut small).len(), BATCH_RANGES);
    }

    #[test]
    fn an_empty_range_names_no_page() {
        assert_eq!(whole(4096..4096, 4096, 8192).count(), 0);
    }

    #[test]
    fn what_has_no_seals_is_left_to_the_daemon() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let source = Source::Descriptor(file.into());
        let record = Arc::new(RegionRecord { key: RegionKey(1), bytes: 8192, source });
        wait(populate(&record, whole(0..8192, 4096, 8192))).unwrap();
        let blocks = rustix::fs::fstat(record.source.file().unwrap()).unwrap().st_blocks;
        assert_eq!(blocks, 0);
    }
}
