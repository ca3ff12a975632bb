//! Populating pages from this process, so that the daemon's memory group never pays for a worker's memory.
//!
//! Shared pages are charged to the memory group that touches them first. Before a layer is registered, exactly the
//! pages that its payloads touch are populated; gap pages stay holes.

use std::iter::Peekable;
use std::ops::Range;
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
    if !is_memfd(region) {
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
fn is_memfd(region: &RegionRecord) -> bool {
    rustix::fs::fcntl_get_seals(&region.source).is_ok()
}

fn allocate(region: &RegionRecord, ranges: &[Range<u64>]) -> std::io::Result<()> {
    for range in ranges {
        let bytes = range.end - range.start;
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&region.source, FallocateFlags::KEEP_SIZE, range.start, bytes)
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
