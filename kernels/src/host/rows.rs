//! The loops over the rows of one launch: index and flag of each row, then its bytes.
//!
//! Indices and flags may lie in memory that a worker writes at this very moment: each is loaded once, volatile, and the
//! value loaded is both checked and used for the address. Private ones take the same way. All addresses are computed in 64
//! bits; that none leaves its region follows from the layout's checks and from `row < rows`.

use std::ops::Range;
use std::ptr;

use statecopy_proto::{Direction, IndexWidth};

use super::caches::Layer;
use super::stores::{ORDINARY, Stores};
use crate::device::Moved;

const _: () = assert!(usize::BITS == 64, "rows lie further apart than 32 bits can say");

/// Launch arguments, in the one order that prepare and serving share.
#[derive(Debug)]
pub(super) struct Job<'a> {
    /// Row 0 of each layer, in the order of packed.
    pub(super) layers: &'a [Layer],
    /// `N`.
    pub(super) rows: u64,
    /// Bytes from one row of a layer to the next.
    pub(super) page_stride: usize,
    /// Bytes of one row.
    pub(super) payload: usize,
    /// Rows of each layer in packed.
    pub(super) selected: u64,
    /// `selected` of them, of the width that the variant serves, aligned to it.
    pub(super) indices: *const u8,
    /// `selected` of them, or null. Null for every scatter: flags describe the initial state only.
    pub(super) flags: *const u8,
    /// `[L, selected, H, V, K]`.
    pub(super) packed: *mut u8,
    /// Which way; read by the byte copy alone.
    pub(super) direction: Direction,
    /// How wide the indices are; read by the byte copy alone.
    pub(super) width: IndexWidth,
    /// How the rows are stored.
    pub(super) stores: Stores,
}

// SAFETY: its pointers lead to memory that is shared with other processes anyway and is accessed accordingly, or to
// the caller's indices and flags, which nobody writes while the job is borrowed.
unsafe impl Sync for Job<'_> {}

/// The bytes of one row: from where, and to where.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowMove {
    /// Null for a row that is cleared.
    from: *const u8,
    to: *mut u8,
}

/// How many rows a [`Block`] holds.
pub(super) const BLOCK_ROWS: usize = 64;

/// A few rows whose indices were read, so that several threads can share the bytes of one row.
#[derive(Debug)]
pub(super) struct Block {
    rows: [RowMove; BLOCK_ROWS],
    len: usize,
}

// SAFETY: as for `Job`: the pointers lead to shared memory.
unsafe impl Sync for Block {}

impl Block {
    /// A block without rows.
    pub(super) fn new() -> Self {
        let nothing = RowMove { from: ptr::null(), to: ptr::null_mut() };
        Self { rows: [nothing; BLOCK_ROWS], len: 0 }
    }

    /// The rows in it.
    pub(super) fn rows(&self) -> &[RowMove] {
        &self.rows[..self.len]
    }

    fn push(&mut self, row: RowMove) {
        self.rows[self.len] = row;
        self.len += 1;
    }
}

/// Moves part of a row.
///
/// # Safety
/// The row belongs to a job whose memory is live, and the range lies inside its payload.
pub(super) unsafe fn move_bytes(stores: &Stores, row: RowMove, bytes: &Range<usize>) {
    let (to, len) = (row.to.wrapping_add(bytes.start), bytes.end - bytes.start);
    if row.from.is_null() {
        // SAFETY: the range lies in the destination row.
        unsafe { (stores.clear)(to, len) }
    } else {
        // SAFETY: the range lies in both rows.
        unsafe { (stores.copy)(row.from.wrapping_add(bytes.start), to, len) }
    }
}

/// One compiled variant.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowKernel {
    /// Moves a part of the job's `L * selected` rows.
    pub(super) move_rows: unsafe fn(&Job<'_>, Range<u64>) -> Moved,
    /// Reads the indices of at most [`BLOCK_ROWS`] rows into an empty block, and moves nothing.
    pub(super) resolve_rows: unsafe fn(&Job<'_>, Range<u64>, &mut Block) -> Moved,
}

/// The kernel of a direction and a width, for rows that may go around the cache or never do.
pub(super) fn fused(direction: Direction, width: IndexWidth, streams: bool) -> RowKernel {
    match (direction, width) {
        (Direction::Gather, IndexWidth::Int32) => specialised::<Gather, i32>(streams),
        (Direction::Gather, IndexWidth::Int64) => specialised::<Gather, i64>(streams),
        (Direction::Scatter, IndexWidth::Int32) => specialised::<Scatter, i32>(streams),
        (Direction::Scatter, IndexWidth::Int64) => specialised::<Scatter, i64>(streams),
    }
}

/// The masked fallback: direction, width and flags are launch arguments.
pub(super) fn byte_copy() -> RowKernel {
    RowKernel { move_rows: move_any, resolve_rows: resolve_any }
}

fn specialised<W: Way, I: Index>(streams: bool) -> RowKernel {
    let move_rows = if streams { move_rows::<W, I> } else { move_small_rows::<W, I> };
    RowKernel { move_rows, resolve_rows: resolve_rows::<W, I> }
}

/// # Safety
/// The job's memory is live, holds what the job says, and the range lies inside `L * selected`.
unsafe fn move_rows<W: Way, I: Index>(job: &Job<'_>, part: Range<u64>) -> Moved {
    let move_row = |row| {
        // SAFETY: the row comes from the job; its whole payload is moved.
        unsafe { move_bytes(&job.stores, row, &(0..job.payload)) }
    };
    // SAFETY: the caller's own promise.
    unsafe { each_row::<W, I>(job, part, move_row) }
}

/// Rows too small to go around the cache: the copy is called directly.
///
/// # Safety
/// As [`move_rows`].
unsafe fn move_small_rows<W: Way, I: Index>(job: &Job<'_>, part: Range<u64>) -> Moved {
    let move_row = |row| {
        // SAFETY: the row comes from the job; its whole payload is moved.
        unsafe { move_bytes(&ORDINARY, row, &(0..job.payload)) }
    };
    // SAFETY: the caller's own promise.
    unsafe { each_row::<W, I>(job, part, move_row) }
}

/// # Safety
/// As [`move_rows`].
unsafe fn resolve_rows<W: Way, I: Index>(
    job: &Job<'_>,
    part: Range<u64>,
    block: &mut Block,
) -> Moved {
    // SAFETY: the caller's own promise.
    unsafe { each_row::<W, I>(job, part, |row| block.push(row)) }
}

/// # Safety
/// As [`move_rows`].
unsafe fn move_any(job: &Job<'_>, part: Range<u64>) -> Moved {
    let kernel = fused(job.direction, job.width, true);
    // SAFETY: the caller's own promise; the kernel is the one for the job's direction and width.
    unsafe { (kernel.move_rows)(job, part) }
}

/// # Safety
/// As [`move_rows`].
unsafe fn resolve_any(job: &Job<'_>, part: Range<u64>, block: &mut Block) -> Moved {
    let kernel = fused(job.direction, job.width, true);
    // SAFETY: the caller's own promise; the kernel is the one for the job's direction and width.
    unsafe { (kernel.resolve_rows)(job, part, block) }
}

/// Reads index and flag of each row of the part, once, and hands on what is to be moved.
///
/// # Safety
/// As [`move_rows`].
unsafe fn each_row<W: Way, I: Index>(
    job: &Job<'_>,
    part: Range<u64>,
    mut act: impl FnMut(RowMove),
) -> Moved {
    let mut moved = Moved::default();
    if part.is_empty() {
        return moved;
    }
    let mut layer = address(part.start / job.selected);
    let mut s = address(part.start % job.selected);
    let mut packed = job.packed.wrapping_add(address(part.start) * job.payload);
    for _ in part {
        // SAFETY: `s < selected`, and there are `selected` indices.
        let index = unsafe { I::load(job.indices, s) };
        let row = index
            .filter(|row| *row < job.rows)
            .map(|row| job.layers[layer].start().wrapping_add(address(row) * job.page_stride));
        // SAFETY: `s < selected`, and there are `selected` flags or none.
        let wanted = unsafe { flag(job.flags, s) };
        let row = row.filter(|_| wanted);
        if row.is_some() {
            moved.copied += 1;
        } else {
            moved.masked += 1;
        }
        if let Some(bytes) = W::bytes(row, packed) {
            act(bytes);
        }
        packed = packed.wrapping_add(job.payload);
        s += 1;
        if s as u64 == job.selected {
            (s, layer) = (0, layer + 1);
        }
    }
    moved
}

/// A direction, as a type: its kernels are compiled apart.
trait Way {
    /// What is to be moved between a row of the cache, or none, and its place in packed.
    fn bytes(row: Option<*mut u8>, packed: *mut u8) -> Option<RowMove>;
}

struct Gather;

impl Way for Gather {
    fn bytes(row: Option<*mut u8>, packed: *mut u8) -> Option<RowMove> {
        let from = row.map_or(ptr::null(), |row| row.cast_const());
        Some(RowMove { from, to: packed })
    }
}

struct Scatter;

impl Way for Scatter {
    fn bytes(row: Option<*mut u8>, packed: *mut u8) -> Option<RowMove> {
        row.map(|row| RowMove { from: packed.cast_const(), to: row })
    }
}

/// A width, as a type. INT32 indices are read as they are, never widened to another buffer.
trait Index {
    /// Loads one index, once. `None` when it is negative.
    ///
    /// # Safety
    /// `indices` is aligned for the type and valid for reads of `s + 1` of them.
    unsafe fn load(indices: *const u8, s: usize) -> Option<u64>;
}

impl Index for i32 {
    unsafe fn load(indices: *const u8, s: usize) -> Option<u64> {
        let index = indices.cast::<Self>().wrapping_add(s);
        // SAFETY: the caller's own promise.
        u64::try_from(unsafe { index.read_volatile() }).ok()
    }
}

impl Index for i64 {
    unsafe fn load(indices: *const u8, s: usize) -> Option<u64> {
        let index = indices.cast::<Self>().wrapping_add(s);
        // SAFETY: the caller's own promise.
        u64::try_from(unsafe { index.read_volatile() }).ok()
    }
}

/// Loads one flag, once. Every value but zero is true, and so is a flag that is not there.
///
/// # Safety
/// `flags` is null or valid for reads of `s + 1` bytes.
unsafe fn flag(flags: *const u8, s: usize) -> bool {
    if flags.is_null() {
        return true;
    }
    // SAFETY: the caller's own promise.
    unsafe { flags.wrapping_add(s).read_volatile() != 0 }
}

/// A number of rows or bytes of mapped memory as an address. Nothing mapped is longer than the address space.
#[expect(clippy::cast_possible_truncation, reason = "addresses have 64 bits, asserted above")]
pub(super) fn address(number: u64) -> usize {
    number as usize
}
