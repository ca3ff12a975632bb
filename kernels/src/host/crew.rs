//! The threads that help with a copy.
//!
//! The launching thread offers a [`Task`] to each helper and works on it itself; whoever is awake takes the next unit from a
//! common counter. When no unit is left the launching thread withdraws the offer from helpers that never woke up, and
//! waits for those at work. So a helper that sleeps soundly costs nothing but its wake-up call.
//!
//! ```text
//!            offer                 take               finish
//!   Idle ------------> Offered ------------> Busy ------------> Idle
//!   Idle <------------ Offered               Busy --> Awaited -> Idle
//!          withdraw                           the launcher sleeps
//!   Idle --> Parked --> Offered               any --> Stopped
//!    the helper sleeps    (and is woken)
//! ```
//! - *offer*, *withdraw*, *stop*, and Busy to Awaited are the launching thread's; *take*, *finish*, and Idle to Parked the helper's.
//! - Both sides spin for a while ([`Sharing::spin`]) before they sleep on the word.

use std::fmt;
use std::io;
use std::mem;
use std::ops::Range;
use std::process;
use std::ptr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::rows::{BLOCK_ROWS, Block, Job, RowKernel, address, move_bytes};
use crate::device::Moved;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// When a copy is shared, and how long the threads that share it stay awake.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharing {
    /// How long a helper stays awake after its last unit, and how long the launching thread waits awake for a helper's.
    pub(super) spin: Duration,
    /// From how many bytes on a launch is shared.
    pub(super) bytes_min: u64,
}

impl Sharing {
    /// A helper that sleeps is at work after about 85 us, in which one thread alone copies 1 MiB; a copy of 4 MiB gains.
    pub(super) const MEASURED: Self = Self { spin: Duration::from_micros(50), bytes_min: 4 << 20 };
}

/// What one thread takes at a time: enough to hide the counter, little enough that nobody waits long at the end.
const UNIT_BYTES: usize = 256 << 10;

const IDLE: u32 = 0;
const PARKED: u32 = 1;
const OFFERED: u32 = 2;
const BUSY: u32 = 3;
const AWAITED: u32 = 4;
const STOPPED: u32 = 5;

/// Helper threads, owned by one launcher.
pub(super) struct Crew {
    helpers: Vec<Helper>,
    sharing: Sharing,
}

struct Helper {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// Where the launching thread and one helper meet. Alone on its cache lines.
#[repr(align(128))]
struct Desk {
    state: AtomicU32,
    /// Valid from *offer* until *finish* or *withdraw*.
    task: AtomicPtr<()>,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("helpers", &self.helpers.len()).finish_non_exhaustive()
    }
}

impl Crew {
    /// Starts that many helpers; they sleep until there is something to share.
    pub(super) fn start(helpers: usize, sharing: Sharing) -> io::Result<Self> {
        let mut crew = Self { helpers: Vec::with_capacity(helpers), sharing };
        for number in 1..=helpers {
            let desk = Arc::new(Desk {
                state: AtomicU32::new(IDLE),
                task: AtomicPtr::new(ptr::null_mut()),
            });
            let own = Arc::clone(&desk);
            let thread = thread::Builder::new()
                .name(format!("copy-{number}"))
                .spawn(move || own.serve(sharing.spin))?;
            crew.helpers.push(Helper { desk, thread: Some(thread) });
        }
        Ok(crew)
    }

    /// Moves a part of a job. Everything has been moved, and is visible, when it returns.
    ///
    /// # Safety
    /// The job's memory is live and holds what the job says; the part lies inside `L * selected`; the kernel serves the job's
    /// direction and index width.
    pub(super) unsafe fn run(&self, job: &Job<'_>, kernel: RowKernel, part: Range<u64>) -> Moved {
        let count = part.end - part.start;
        let bytes = count.saturating_mul(job.payload as u64);
        if self.helpers.is_empty() || bytes < self.sharing.bytes_min {
            // SAFETY: the caller's own promise.
            let moved = unsafe { (kernel.move_rows)(job, part) };
            (job.stores.publish)();
            return moved;
        }
        let mut block = Block::new();
        if count > BLOCK_ROWS as u64 || job.payload < 2 * UNIT_BYTES {
            let rows_per_unit = (UNIT_BYTES / job.payload).max(1) as u64;
            return self.share(&Task::new(job, Work::Rows { kernel, part, rows_per_unit }));
        }
        // SAFETY: the caller's own promise; the block is empty and holds that many rows.
        let moved = unsafe { (kernel.resolve_rows)(job, part, &mut block) };
        self.share(&Task::new(job, Work::Pieces { block: &block }));
        moved
    }

    fn share(&self, task: &Task<'_>) -> Moved {
        let address = erased(task);
        // Joins even when this thread unwinds: no helper outlives the task.
        let joined = Joined(self);
        for helper in &self.helpers {
            helper.desk.offer(address);
        }
        task.work();
        drop(joined);
        // Every helper's additions happened before its `finish`, which `join` has seen.
        Moved {
            copied: task.copied.load(Ordering::Relaxed),
            masked: task.masked.load(Ordering::Relaxed),
        }
    }
}

struct Joined<'a>(&'a Crew);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        for helper in &self.0.helpers {
            helper.desk.join(self.0.sharing.spin);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for helper in &self.helpers {
            helper.desk.state.store(STOPPED, Ordering::Release);
            wake(&helper.desk.state);
        }
        for thread in self.helpers.iter_mut().filter_map(|helper| helper.thread.take()) {
            // A helper that panicked has ended the process.
            let _ended = thread.join();
        }
    }
}

impl Desk {
    fn offer(&self, task: *mut ()) {
        self.task.store(task, Ordering::Relaxed);
        // SYNC: release; pairs with the acquire of `take`, which then sees the task.
        if self.state.swap(OFFERED, Ordering::Release) == PARKED {
            wake(&self.state);
        }
    }

    /// Withdraws the offer, or waits until the helper has finished.
    fn join(&self, spin: Duration) {
        let swap = |from, to| {
            self.state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if swap(OFFERED, IDLE) {
            return;
        }
        // SYNC: acquire; pairs with the release of `finish`: the helper's bytes and counts are visible.
        let busy = || matches!(self.state.load(Ordering::Acquire), BUSY | AWAITED);
        if spin_while(spin, busy) {
            return;
        }
        let _awaited = swap(BUSY, AWAITED);
        while busy() {
            wait(&self.state, AWAITED);
        }
    }

    /// The helper's life.
    fn serve(&self, spin: Duration) {
        // The launching thread waits for this one and could not go on without it.
        let abort = AbortOnUnwind;
        loop {
            let resting = || matches!(self.state.load(Ordering::Relaxed), IDLE);
            if !spin_while(spin, resting)
                && self
                    .state
                    .compare_exchange(IDLE, PARKED, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                while self.state.load(Ordering::Relaxed) == PARKED {
                    wait(&self.state, PARKED);
                }
            }
            // SYNC: acquire; pairs with the release of `offer`.
            match self.state.compare_exchange(OFFERED, BUSY, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => self.work(),
                Err(STOPPED) => break,
                // The offer was withdrawn before this thread was awake.
                Err(_) => {}
            }
        }
        mem::forget(abort);
    }

    fn work(&self) {
        let task = self.task.load(Ordering::Relaxed).cast::<Task<'_>>();
        // SAFETY: the pointer was made from a `&Task` that the launching thread keeps alive until it sees this desk idle.
        let task = unsafe { &*task };
        task.work();
        // SYNC: release; pairs with the acquire in `join`. The task is not touched after this.
        if self.state.swap(IDLE, Ordering::Release) == AWAITED {
            wake(&self.state);
        }
    }
}

/// A part of a job that several threads work on.
struct Task<'a> {
    job: &'a Job<'a>,
    work: Work<'a>,
    units: u64,
    next: AtomicU64,
    copied: AtomicU64,
    masked: AtomicU64,
}

enum Work<'a> {
    /// A unit is some rows.
    Rows { kernel: RowKernel, part: Range<u64>, rows_per_unit: u64 },
    /// A unit is a piece of one row: few rows, and large.
    Pieces { block: &'a Block },
}

impl<'a> Task<'a> {
    fn new(job: &'a Job<'a>, work: Work<'a>) -> Self {
        let units = match &work {
            Work::Rows { part, rows_per_unit, .. } => {
                (part.end - part.start).div_ceil(*rows_per_unit)
            }
            Work::Pieces { block } => (block.rows().len() * pieces_per_row(job)) as u64,
        };
        let zero = || AtomicU64::new(0);
        Self { job, work, units, next: zero(), copied: zero(), masked: zero() }
    }

    /// Takes units until none is left, and makes what it stored visible to whoever sees it finished.
    fn work(&self) {
        let mut moved = Moved::default();
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            if unit >= self.units {
                break;
            }
            let more = self.unit(unit);
            moved.copied += more.copied;
            moved.masked += more.masked;
        }
        (self.job.stores.publish)();
        self.copied.fetch_add(moved.copied, Ordering::Relaxed);
        self.masked.fetch_add(moved.masked, Ordering::Relaxed);
    }

    fn unit(&self, unit: u64) -> Moved {
        match &self.work {
            Work::Rows { kernel, part, rows_per_unit } => {
                let start = part.start + unit * rows_per_unit;
                let rows = start..part.end.min(start + rows_per_unit);
                // SAFETY: the promise made to `Crew::run`; the rows are some of its part.
                unsafe { (kernel.move_rows)(self.job, rows) }
            }
            Work::Pieces { block } => {
                let pieces = pieces_per_row(self.job);
                let (row, piece) = (address(unit) / pieces, address(unit) % pieces);
                let start = piece * UNIT_BYTES;
                let bytes = start..self.job.payload.min(start + UNIT_BYTES);
                // SAFETY: the promise made to `Crew::run`; the row is one of its part, the piece lies inside the payload.
                unsafe { move_bytes(&self.job.stores, block.rows()[row], &bytes) };
                Moved::default()
            }
        }
    }
}

/// The task as a desk holds it. Only what threads may share becomes one.
fn erased<T: Sync>(task: &T) -> *mut () {
    ptr::from_ref(task).cast_mut().cast()
}

fn pieces_per_row(job: &Job<'_>) -> usize {
    job.payload.div_ceil(UNIT_BYTES)
}

/// Spins while the condition holds; `false` when time ran out first.
fn spin_while(limit: Duration, holds: impl Fn() -> bool) -> bool {
    let mut since = None;
    while holds() {
        let since = since.get_or_insert_with(Instant::now);
        if since.elapsed() >= limit {
            return false;
        }
        for _ in 0..32 {
            std::hint::spin_loop();
        }
    }
    true
}

fn wait(word: &AtomicU32, while_it_is: u32) {
    // Woken, interrupted, or the word was another one already: the caller looks again.
    let _reason = futex::wait(word, futex::Flags::PRIVATE, while_it_is, None);
}

fn wake(word: &AtomicU32) {
    // Waking a word of this process cannot fail.
    let _woken = futex::wake(word, futex::Flags::PRIVATE, 1);
}

struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        process::abort();
    }
}
