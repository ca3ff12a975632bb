//! A worker that writes over its session memory at full speed while the executor reads it.

use std::thread;

use statecopy_session::{PairNumber, SlotNumber};

use super::*;
use crate::record::SlotRecord;

const HOSTILE: SessionId = SessionId(2);
const ROUNDS: u64 = 20;
/// Words that are written in each half of a round.
const STORES: u64 = 40_000;

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Writes a word: often a small one, as sensible fields hold.
fn store(memory: &SessionMemory, at: u64, word: u64) {
    let word = if word & 1 == 0 { word >> 1 & 7 } else { word };
    let there = memory.mapping().atomic_u64(at).unwrap();
    there.store(word, crate::sync::Ordering::Relaxed);
}

/// Writes over all that a request is read from, but for the sequences, which keep the ring alive.
fn scribble_requests(memory: &SessionMemory, seed: u64) {
    let (parameters, mut state) = (memory.parameters(), seed);
    let (from, end) = (parameters.descriptors(), parameters.total_bytes());
    for _ in 0..STORES {
        // As often in the descriptors as in the whole rest.
        let end = if random(&mut state) & 1 == 0 { parameters.inline() } else { end };
        let at = from + random(&mut state) % (end - from) / 8 * 8;
        let sequence = at < parameters.inline() && (at - from).is_multiple_of(128);
        if !sequence {
            store(memory, at, random(&mut state));
        }
    }
}

fn scribble_everywhere(memory: &SessionMemory, seed: u64) {
    let mut state = seed;
    for _ in 0..STORES {
        let at = random(&mut state) % memory.parameters().total_bytes() / 8 * 8;
        store(memory, at, random(&mut state));
    }
    // Whatever stands there by now: this is no count.
    store(memory, layout::SUBMITTED, u64::MAX);
}

/// Every slot that small words ring, of graphs that lie all over the words of the session.
fn slots(request: &CopyRequest) -> Vec<SlotRecord> {
    let source = IndexSource::Shared { region: PACKED, offset: REGION_BYTES / 2 };
    let indices = Indices { width: IndexWidth::Int32, source };
    let request = CopyRequest { indices, ..*request };
    let pairs = (layout::LANES..layout::PAIRS).step_by(3).filter_map(PairNumber::of_graph);
    let slots = |pair| {
        let record = move |slot| SlotRecord { pair, slot, request, patience_ns: 0 };
        (1..8).filter_map(SlotNumber::new).map(record)
    };
    pairs.flat_map(slots).collect()
}

/// Submits while another thread scribbles. Every request gets its one answer, whatever was read.
fn ride(memory: &SessionMemory, ring: &mut Submitter, request: &CopyRequest, seed: u64) -> u64 {
    let indices: Vec<u8> =
        (0..request.selected).flat_map(|row| u32::try_from(row).unwrap().to_ne_bytes()).collect();
    let mut answers = 0;
    thread::scope(|scope| {
        let storm = scope.spawn(|| scribble_requests(memory, seed));
        // Once at least, however soon the storm is over.
        let mut over = false;
        while !over {
            over = storm.is_finished();
            let sequences = [(); 4].map(|()| ring.try_submit(request, &indices, &[]).unwrap());
            for sequence in sequences {
                let answer = ring.wait(sequence, Spin::NONE, Duration::from_secs(10)).unwrap();
                assert!(answer.is_some(), "no answer to request {sequence}");
                answers += 1;
            }
        }
    });
    answers
}

/// A copy of the session beside, byte for byte.
fn copy_is_right(rig: &mut Rig) {
    let indices = [4, -1, 0, 2];
    rig.packed.fill(0, 4096, 0xee).unwrap();
    assert_eq!(rig.run(&rig.gather(3, &indices), &indices).unwrap().rows_copied, 6);
    for (layer, slot) in (0..2).flat_map(|layer| (0..4).map(move |slot| (layer, slot))) {
        let row = u64::try_from(indices[usize::try_from(slot).unwrap()]).ok();
        for at in 0..PAYLOAD {
            let got = rig.word(&rig.packed, (layer * 4 + slot) * PAYLOAD + at);
            let from = |row| rig.word(&rig.cache, row * 3 * PAYLOAD + layer * PAYLOAD + at);
            assert_eq!(got, row.map_or(0, from), "layer {layer}, slot {slot}, element {at}");
        }
    }
    assert_eq!(rig.word(&rig.packed, 8 * PAYLOAD), 0xeeee_eeee, "behind the packed buffer");
}

#[test]
fn a_storm_over_one_session_memory_leaves_every_other_copy_right() {
    let mut rig = Rig::registered();
    rig.fill_cache();
    for round in 1..=ROUNDS {
        for region in [CACHE, PACKED] {
            import(&mut rig.preparer, HOSTILE, region, memory().0);
        }
        rig.preparer.register(HOSTILE, registration(), &mut |_| {}).unwrap();
        let (memory, mut ring) = open_ring(&mut rig, HOSTILE);
        let request = rig.gather(3, &[0, 1, 2]);
        rig.preparer.arm(HOSTILE, slots(&request), false).unwrap();
        thread::scope(|scope| {
            let storm = scope.spawn(|| {
                assert!(ride(&memory, &mut ring, &request, round) > 0);
                scribble_everywhere(&memory, round << 32);
            });
            while !storm.is_finished() {
                copy_is_right(&mut rig);
            }
        });
        let until = Instant::now() + Duration::from_secs(10);
        while rig.counters.get(Counter::RingsBroken) < round {
            copy_is_right(&mut rig);
            assert!(Instant::now() < until, "random words are taken for a ring");
        }
        rig.preparer.close_session(HOSTILE).unwrap();
    }
    assert!(rig.counters.get(Counter::RingsBroken) == ROUNDS, "each is told once");
}
