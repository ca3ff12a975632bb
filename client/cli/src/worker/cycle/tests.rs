//! A worker against a stand-in for the daemon that copies as the contract says, or with one fault.

use super::*;
use crate::workload::arrangement::Arrangement;
use crate::workload::preset::Preset;
use crate::workload::random::Random;

use crate::worker::stand_in::{Fault, StandIn};

const LAYERS: usize = 3;
const ROWS: u64 = 12;
const SELECTED_MAX: u64 = 6;

fn worker(fault: Fault) -> Worker<StandIn> {
    let arrangement = Arrangement::new(Preset::Tiny, LAYERS, ROWS).unwrap();
    let memory = WorkerMemory::allocate(arrangement, SELECTED_MAX, 4, 4096).unwrap();
    let stand_in = StandIn::new(&memory, fault);
    Worker::new(memory, stand_in)
}

fn mismatches(fault: Fault) -> u64 {
    let mut worker = worker(fault);
    let mut random = Random::new(8);
    for row in 0..8 {
        worker.decode(row).unwrap();
    }
    for step in 0..24 {
        let selection = Selection::choose(&mut random, step, ROWS, SELECTED_MAX);
        worker.step(&selection, step % 4 == 3).unwrap();
    }
    worker.check_everything().unwrap();
    worker.into_parts().0.mismatches
}

#[test]
fn right_copies_have_no_mismatches() {
    assert_eq!(mismatches(Fault::None), 0);
}

#[test]
fn a_mismatch_is_placed_by_layer_row_and_byte() {
    let mut worker = worker(Fault::None);
    worker.memory().flip_byte().unwrap();
    worker.check_everything().unwrap();
    let tally = worker.into_parts().0;
    assert_eq!(tally.first_mismatches, ["layer 0, row 0, byte 0 is 0xff, not 0x00"]);
}

#[test]
fn every_fault_is_seen() {
    for fault in [
        Fault::GatherIgnoresFlags,
        Fault::GatherLeavesClearedRows,
        Fault::GatherReadsTheNextRow,
        Fault::GatherWritesPastTheEnd,
        Fault::ScatterSkipsARow,
        Fault::ScatterObeysFlags,
        Fault::ScatterWritesOneWordTooFar,
        Fault::ScatterTouchesAGap,
        Fault::CountsAreWrong,
    ] {
        assert!(mismatches(fault) > 0, "{fault:?}");
    }
}

#[test]
fn rows_are_counted_over_all_layers() {
    let mut worker = worker(Fault::None);
    let selection = Selection {
        width: statecopy_client::IndexWidth::Int32,
        sources: vec![1, 2, 2, -1],
        flags: Some(vec![0, 1, 255, 1]),
        destinations: vec![1, 2, 3, 12],
        scatter_with_flags: true,
    };
    worker.step(&selection, true).unwrap();
    worker.step(&selection, false).unwrap();
    let (tally, _) = worker.into_parts();
    let layers = 2 * LAYERS as u64;
    assert_eq!((tally.rows_gathered, tally.rows_cleared), (2 * layers, 2 * layers));
    assert_eq!((tally.rows_scattered, tally.rows_skipped), (3 * layers, layers));
    assert_eq!(tally.mismatches, 0);
}
