//! What the device process counts, in memory that the supervisor reads at each scrape.
//!
//! The memory belongs to the supervisor and outlives device processes, so that counters never fall.

use crate::sync::Ordering;

use statecopy_descriptors::{Mapping, MemoryError, SealedMemory};
use statecopy_kernels::guard::Door;
use statecopy_kernels::plan::Variant;
use statecopy_proto::{Direction, RefusalCode};

/// One counter: a 64-bit word of the counter memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Requests completed.
    Copies(Direction),
    /// Rows whose payload was copied.
    RowsCopied(Direction),
    /// Rows cleared (gather) or skipped (scatter).
    RowsMasked(Direction),
    /// Rows of stream-ordered copies: which of them are copied only the device knows.
    RowsOrdered(Direction),
    /// Payload bytes written.
    BytesCopied(Direction),
    /// Time from take to answer, in nanoseconds.
    ExecutorNanoseconds(Direction),
    /// Requests refused by the executor.
    Refusals(RefusalCode),
    /// Launches of a variant.
    Launches(Variant),
    /// Entries of a door.
    Entries(Door),
    /// Entries of a door while serving: zero, or something is wrong.
    EntriesWhileServing(Door),
    /// Rings that made no sense any more: their sessions were ended.
    RingsBroken,
    /// Lanes whose waits were let go because a copy could not be made.
    LanesFailed,
    /// Pairs of captured graphs whose waits were let go because a copy could not be made.
    GraphsFailed,
    /// Short sleeps between two looks at the bells of lanes.
    BellLooks,
}

const DIRECTIONS: usize = Direction::ALL.len();
const BY_DIRECTION: usize = 6;
const REFUSALS_AT: usize = BY_DIRECTION * DIRECTIONS;
const LAUNCHES_AT: usize = REFUSALS_AT + RefusalCode::ALL.len();
const ENTRIES_AT: usize = LAUNCHES_AT + Variant::ALL.len();
const SERVING_AT: usize = ENTRIES_AT + Door::ALL.len();
const RINGS_BROKEN_AT: usize = SERVING_AT + Door::ALL.len();
const LANES_FAILED_AT: usize = RINGS_BROKEN_AT + 1;
const GRAPHS_FAILED_AT: usize = LANES_FAILED_AT + 1;
const BELL_LOOKS_AT: usize = GRAPHS_FAILED_AT + 1;
const WORDS: usize = BELL_LOOKS_AT + 1;

impl Counter {
    /// Every counter.
    pub fn all() -> impl Iterator<Item = Self> {
        let by_direction = Direction::ALL.into_iter().flat_map(|direction| {
            [
                Self::Copies(direction),
                Self::RowsCopied(direction),
                Self::RowsMasked(direction),
                Self::RowsOrdered(direction),
                Self::BytesCopied(direction),
                Self::ExecutorNanoseconds(direction),
            ]
        });
        by_direction
            .chain(RefusalCode::ALL.into_iter().map(Self::Refusals))
            .chain(Variant::ALL.into_iter().map(Self::Launches))
            .chain(Door::ALL.into_iter().map(Self::Entries))
            .chain(Door::ALL.into_iter().map(Self::EntriesWhileServing))
            .chain([Self::RingsBroken, Self::LanesFailed, Self::GraphsFailed, Self::BellLooks])
    }

    /// The name in metrics and in `statecopy status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Copies(_) => "statecopy_copies_total",
            Self::RowsCopied(_) => "statecopy_rows_copied_total",
            Self::RowsMasked(_) => "statecopy_rows_masked_total",
            Self::RowsOrdered(_) => "statecopy_rows_ordered_total",
            Self::BytesCopied(_) => "statecopy_bytes_copied_total",
            Self::ExecutorNanoseconds(_) => "statecopy_executor_nanoseconds_total",
            Self::Refusals(_) => "statecopy_executor_refusals_total",
            Self::Launches(_) => "statecopy_launches_total",
            Self::Entries(_) => "statecopy_entries_total",
            Self::EntriesWhileServing(_) => "statecopy_entries_while_serving_total",
            Self::RingsBroken => "statecopy_rings_broken_total",
            Self::LanesFailed => "statecopy_lanes_failed_total",
            Self::GraphsFailed => "statecopy_graphs_failed_total",
            Self::BellLooks => "statecopy_bell_looks_total",
        }
    }

    /// The label's name and value; `None` for a counter without one.
    #[must_use]
    pub fn label(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Copies(direction)
            | Self::RowsCopied(direction)
            | Self::RowsMasked(direction)
            | Self::RowsOrdered(direction)
            | Self::BytesCopied(direction)
            | Self::ExecutorNanoseconds(direction) => ("direction", direction.label()),
            Self::Refusals(code) => ("code", code.label()),
            Self::Launches(variant) => ("variant", variant.label()),
            Self::Entries(door) | Self::EntriesWhileServing(door) => ("door", door.label()),
            Self::RingsBroken | Self::LanesFailed | Self::GraphsFailed | Self::BellLooks => {
                return None;
            }
        })
    }

    fn offset(self) -> u64 {
        self.word() as u64 * 8
    }

    fn word(self) -> usize {
        let by_direction = |at: usize, direction: Direction| match direction {
            Direction::Gather => at * DIRECTIONS,
            Direction::Scatter => at * DIRECTIONS + 1,
        };
        match self {
            Self::Copies(direction) => by_direction(0, direction),
            Self::RowsCopied(direction) => by_direction(1, direction),
            Self::RowsMasked(direction) => by_direction(2, direction),
            Self::RowsOrdered(direction) => by_direction(3, direction),
            Self::BytesCopied(direction) => by_direction(4, direction),
            Self::ExecutorNanoseconds(direction) => by_direction(5, direction),
            Self::Refusals(code) => REFUSALS_AT + usize::from(code.number()) - 1,
            Self::Launches(variant) => LAUNCHES_AT + variant.ordinal(),
            Self::Entries(door) => ENTRIES_AT + door_ordinal(door),
            Self::EntriesWhileServing(door) => SERVING_AT + door_ordinal(door),
            Self::RingsBroken => RINGS_BROKEN_AT,
            Self::LanesFailed => LANES_FAILED_AT,
            Self::GraphsFailed => GRAPHS_FAILED_AT,
            Self::BellLooks => BELL_LOOKS_AT,
        }
    }
}

fn door_ordinal(door: Door) -> usize {
    match door {
        Door::Compiler => 0,
        Door::Environment => 1,
        Door::DeviceAllocator => 2,
    }
}

/// The counter memory. One thread of one process writes, any reads.
#[derive(Debug)]
pub struct Counters {
    memory: Mapping,
}

impl Counters {
    /// New counter memory, all zero.
    ///
    /// # Errors
    /// When the kernel gives no memory.
    pub fn create() -> Result<(SealedMemory, Self), MemoryError> {
        let memory = SealedMemory::create("statecopy-counters", Self::bytes())?;
        let counters = Self { memory: memory.map()? };
        Ok((memory, counters))
    }

    /// Counter memory that another process made.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn open(memory: &SealedMemory) -> Result<Self, MemoryError> {
        Ok(Self { memory: memory.map()? })
    }

    /// Bytes of the counter memory.
    #[must_use]
    pub fn bytes() -> u64 {
        (WORDS as u64 * 8).next_multiple_of(4096)
    }

    /// Adds to a counter. Only one thread ever does, the device process's executor: so a load and a store will do, which cost
    /// a request less than one step that nobody could come between.
    pub fn add(&self, counter: Counter, amount: u64) {
        if amount == 0 {
            return;
        }
        if let Ok(word) = self.memory.atomic_u64(counter.offset()) {
            let count = word.load(Ordering::Relaxed).wrapping_add(amount);
            word.store(count, Ordering::Relaxed);
        }
    }

    /// The value of a counter.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.memory.atomic_u64(counter.offset()).map_or(0, |word| word.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_its_own_word_and_its_own_name() {
        let mut words: Vec<usize> = Counter::all().map(Counter::word).collect();
        words.sort_unstable();
        assert_eq!(words, (0..WORDS).collect::<Vec<_>>());
        let mut names: Vec<_> =
            Counter::all().map(|counter| (counter.name(), counter.label())).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), WORDS);
    }

    #[test]
    fn one_process_counts_and_another_reads() {
        let (memory, writer) = Counters::create().unwrap();
        let reader = Counters::open(&memory).unwrap();
        for (at, counter) in Counter::all().enumerate() {
            writer.add(counter, at as u64);
            writer.add(counter, 1);
        }
        for (at, counter) in Counter::all().enumerate() {
            assert_eq!(reader.get(counter), at as u64 + 1);
        }
    }
}
