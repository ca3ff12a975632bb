//! The hand-shake, step by step, in one thread.

use crate::sync::AtomicU64Cell;

use super::*;

#[derive(Default)]
struct Plain {
    bell: AtomicU64Cell,
    done: AtomicU64Cell,
}

impl PairWords for &Plain {
    fn bell(&self) -> Word64<'_> {
        Word64::new(&self.bell)
    }
    fn done(&self) -> Word64<'_> {
        Word64::new(&self.done)
    }
}

impl Plain {
    fn ring(&self, slot: u64) {
        Word64::new(&self.bell).store_relaxed(slot);
    }
    fn says(&self, bit: u64) -> bool {
        Word64::new(&self.done).load_relaxed() & bit != 0
    }
    /// What the executor's stream does.
    fn write_done(&self) {
        Word64::new(&self.done).store_relaxed(DONE);
    }
}

fn copy(slot: u64, deaths: u8) -> Wanted {
    Wanted::Copy { slot, deaths }
}

#[test]
fn replays_shake_hands_slot_by_slot() {
    let words = Plain::default();
    let mut taker = PairTaker::new(&words);
    for slot in [1, 2, 2, 1, 9] {
        assert_eq!(taker.look(), Wanted::Nothing);
        assert!(words.says(IDLE) && !words.says(DONE));
        words.ring(slot);
        assert_eq!(taker.look(), copy(slot, 0));
        taker.begin();
        assert!(!words.says(IDLE | DONE) && taker.is_rung());
        assert_eq!(taker.look(), Wanted::Nothing);
        words.write_done();
        taker.finish();
        assert_eq!(taker.look(), Wanted::Nothing);
        assert!(words.says(DONE) && !words.says(IDLE), "the graph has not seen it yet");
        assert!(!taker.is_rung(), "there is nothing to do for it");
        words.ring(0);
        assert_eq!(taker.look(), Wanted::Nothing);
    }
}

#[test]
fn a_pair_never_wears_out() {
    let words = Plain::default();
    let mut taker = PairTaker::new(&words);
    for ring in 0..(1 << 20) + 10_u64 {
        let slot = ring % 65_535 + 1;
        words.ring(slot);
        assert_eq!(taker.look(), copy(slot, 0));
        taker.begin();
        words.write_done();
        taker.finish();
        words.ring(0);
        assert!(taker.look() == Wanted::Nothing && words.says(IDLE));
    }
}

#[test]
fn a_copy_of_nothing_is_settled_by_hand() {
    let words = Plain::default();
    let mut taker = PairTaker::new(&words);
    words.ring(1);
    assert!(taker.is_rung() && taker.look() == copy(1, 0));
    taker.begin();
    taker.settle_by_hand();
    taker.finish();
    assert!(words.says(DONE) && !words.says(IDLE));
    words.ring(0);
    assert_eq!(taker.look(), Wanted::Nothing);
    assert!(words.says(IDLE));
}

#[test]
fn a_failed_pair_lets_every_wait_go_on() {
    let words = Plain::default();
    let mut taker = PairTaker::new(&words);
    words.ring(3);
    taker.fail();
    assert!(words.says(IDLE) && words.says(DONE) && taker.is_failed() && !taker.is_rung());
    for slot in [3, 0, 4] {
        words.ring(slot);
        assert_eq!(taker.look(), Wanted::Nothing);
    }
    assert!(PairTaker::resume(&words).is_failed());
}

#[test]
fn the_next_executor_knows_where_the_dead_one_stood() {
    let words = Plain::default();
    PairTaker::new(&words);
    assert_eq!(PairTaker::resume(&words).look(), Wanted::Nothing, "idle");
    words.ring(5);
    assert_eq!(PairTaker::resume(&words).look(), copy(5, 0), "rung");
    for deaths in 0..4_u8 {
        let mut next = PairTaker::resume(&words);
        assert_eq!(next.look(), copy(5, deaths.min(2)), "begun, and dead before it was done");
        next.begin();
        assert!(!words.says(IDLE | DONE));
    }
    words.write_done();
    let mut next = PairTaker::resume(&words);
    assert_eq!(next.look(), Wanted::Nothing, "done");
    words.ring(0);
    let mut next_but_one = PairTaker::resume(&words);
    for taker in [&mut next, &mut next_but_one] {
        assert_eq!(taker.look(), Wanted::Nothing);
        assert!(words.says(IDLE), "the graph has seen it");
    }
}

#[test]
fn what_a_hostile_worker_writes_asks_for_copies_and_nothing_else() {
    for done in [0, 1, 2, 3, 4, 7, FREED, u64::MAX] {
        for bell in [0, 1, u64::MAX] {
            let words = Plain::default();
            Word64::new(&words.done).store_relaxed(done);
            words.ring(bell);
            let mut taker = PairTaker::resume(&words);
            if let Wanted::Copy { slot, .. } = taker.look() {
                assert_eq!(slot, bell);
                taker.begin();
                taker.finish();
            }
            taker.fail();
        }
    }
}
