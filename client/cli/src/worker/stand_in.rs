//! A stand-in for the daemon, for tests: it copies in this process, row by row, or with one fault.

use statecopy_client::{Direction, Memory, Moved};

use super::copier::{Call, Copier, Target};
use super::memory::WorkerMemory;
use crate::workload::arrangement::Arrangement;

/// What the stand-in does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    GatherIgnoresFlags,
    GatherLeavesClearedRows,
    GatherReadsTheNextRow,
    GatherWritesPastTheEnd,
    ScatterSkipsARow,
    ScatterObeysFlags,
    ScatterWritesOneWordTooFar,
    ScatterTouchesAGap,
    CountsAreWrong,
}

/// Copies as the contract says, but for its fault.
#[derive(Debug)]
pub(crate) struct StandIn {
    arrangement: Arrangement,
    caches: Vec<Memory>,
    packed: Memory,
    fault: Fault,
}

impl StandIn {
    /// Copies between the shared memory of a worker.
    pub(crate) fn new(memory: &WorkerMemory, fault: Fault) -> Self {
        Self {
            arrangement: memory.arrangement().clone(),
            caches: memory.caches().cloned().collect(),
            packed: memory.packed().clone(),
            fault,
        }
    }

    fn rows_of(&self, target: Target) -> Vec<(usize, u64)> {
        let all: Vec<(usize, u64)> = self.arrangement.layers().collect();
        match target {
            Target::All => all,
            Target::Layer(at) => vec![all[at]],
        }
    }

    fn gather_row(&self, cache: &Memory, offset: u64, row: Option<u64>, packed: u64) -> bool {
        let bytes = self.arrangement.layout.payload_bytes();
        let Some(mut row) = row else {
            if self.fault != Fault::GatherLeavesClearedRows {
                self.packed.write(packed, &vec![0; usize::try_from(bytes).unwrap()]).unwrap();
            }
            return false;
        };
        if self.fault == Fault::GatherReadsTheNextRow {
            row = (row + 1) % self.arrangement.layout.rows();
        }
        let at = self.arrangement.payload(offset, row).start;
        let mut state = cache.read_vec(at, usize::try_from(bytes).unwrap()).unwrap();
        if self.fault == Fault::GatherWritesPastTheEnd {
            state.extend([1; 8]);
        }
        self.packed.write(packed, &state).unwrap();
        true
    }

    fn scatter_row(&self, cache: &Memory, offset: u64, row: Option<u64>, packed: u64) -> bool {
        let Some(row) = row else { return false };
        let at = self.arrangement.payload(offset, row).start;
        let bytes = usize::try_from(self.arrangement.layout.payload_bytes()).unwrap();
        let mut state = self.packed.read_vec(packed, bytes).unwrap();
        match self.fault {
            Fault::ScatterSkipsARow if row == 5 => return true,
            Fault::ScatterWritesOneWordTooFar => state.extend([1; 8]),
            Fault::ScatterTouchesAGap => {
                // The third state of each tiny page.
                let page = row * self.arrangement.layout.page_stride_bytes();
                cache.write(page + 60_000, &[1]).unwrap();
            }
            _ => {}
        }
        cache.write(at, &state).unwrap();
        true
    }
}

impl Copier for StandIn {
    fn copy(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        let bytes = self.arrangement.layout.payload_bytes();
        let mut moved = Moved::default();
        let mut packed = 0;
        for (region, offset) in self.rows_of(call.target) {
            for (place, index) in call.indices.iter().enumerate() {
                let valid =
                    u64::try_from(*index).ok().filter(|row| *row < self.arrangement.layout.rows());
                let flag = call.flags.is_none_or(|flags| flags[place] != 0);
                let cache = &self.caches[region];
                let copied = match call.direction {
                    Direction::Gather => {
                        let wanted = flag || self.fault == Fault::GatherIgnoresFlags;
                        self.gather_row(cache, offset, valid.filter(|_| wanted), packed)
                    }
                    Direction::Scatter => {
                        let wanted = flag || self.fault != Fault::ScatterObeysFlags;
                        self.scatter_row(cache, offset, valid.filter(|_| wanted), packed)
                    }
                };
                moved.copied += u64::from(copied);
                moved.masked += u64::from(!copied);
                packed += bytes;
            }
        }
        if self.fault == Fault::CountsAreWrong {
            moved.copied += 1;
        }
        Ok(moved)
    }
}
