//! Every interleaving of a replayed graph and its executor.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::*;

#[derive(Default)]
struct Modelled {
    bell: AtomicU64,
    done: AtomicU64,
    bytes: AtomicU64,
}

impl PairWords for Arc<Modelled> {
    fn bell(&self) -> Word64<'_> {
        Word64::new(&self.bell)
    }
    fn done(&self) -> Word64<'_> {
        Word64::new(&self.done)
    }
}

/// Threads that look again and again have endless interleavings: as many as two switches against a thread's will make.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        thread::yield_now();
    }
}

/// The four nodes of one copy in a graph; `None` when they were freed.
fn replay(words: &Modelled, slot: u64) -> Option<u64> {
    let wait =
        |bit| until(|| Some(words.done.load(Ordering::Acquire)).filter(|done| done & bit != 0));
    wait(IDLE);
    words.bell.store(slot, Ordering::Release);
    let done = wait(DONE);
    let bytes = words.bytes.load(Ordering::Relaxed);
    words.bell.store(0, Ordering::Release);
    (done != FREED).then_some(bytes)
}

/// What the executor's stream does.
fn write(words: &Modelled, slot: u64) {
    words.bytes.store(slot * 10, Ordering::Relaxed);
    words.done.store(DONE, Ordering::Release);
}

fn serve(taker: &mut PairTaker<Arc<Modelled>>) -> u64 {
    let slot = until(|| match taker.look() {
        Wanted::Copy { slot, .. } => Some(slot),
        Wanted::Nothing => None,
    });
    taker.begin();
    write(taker.words(), slot);
    taker.finish();
    slot
}

#[test]
fn each_replay_gets_its_own_copy() {
    check(|| {
        let words = Arc::<Modelled>::default();
        let mut taker = PairTaker::new(Arc::clone(&words));
        let executor = thread::spawn(move || {
            assert_eq!((serve(&mut taker), serve(&mut taker)), (1, 2));
        });
        assert_eq!((replay(&words, 1), replay(&words, 2)), (Some(10), Some(20)));
        executor.join().unwrap();
    });
}

#[test]
fn a_copy_of_nothing_comes_between_two_others() {
    check(|| {
        let words = Arc::<Modelled>::default();
        let mut taker = PairTaker::new(Arc::clone(&words));
        let executor = thread::spawn(move || {
            serve(&mut taker);
            until(|| (taker.look() == Wanted::Copy { slot: 2, deaths: 0 }).then_some(()));
            taker.begin();
            taker.settle_by_hand();
            taker.finish();
            assert!(!taker.is_rung(), "nothing is left to do, whatever the graph has seen");
            serve(&mut taker);
        });
        let replayed = [1, 2, 3].map(|slot| replay(&words, slot));
        assert_eq!(replayed, [Some(10), Some(10), Some(30)]);
        executor.join().unwrap();
    });
}

#[test]
fn a_failed_pair_frees_its_graph() {
    check(|| {
        let words = Arc::<Modelled>::default();
        let mut taker = PairTaker::new(Arc::clone(&words));
        let executor = thread::spawn(move || {
            taker.fail();
            assert_eq!(taker.look(), Wanted::Nothing);
        });
        replay(&words, 1);
        assert_eq!(replay(&words, 2), None, "the second copy was certainly freed");
        executor.join().unwrap();
    });
}

#[test]
fn the_next_executor_goes_on_in_the_hand_shake() {
    for steps in 0..4 {
        check(move || {
            let words = Arc::<Modelled>::default();
            let mut taker = PairTaker::new(Arc::clone(&words));
            let dying = thread::spawn(move || {
                if steps == 0 {
                    return;
                }
                until(|| (taker.look() != Wanted::Nothing).then_some(()));
                taker.begin();
                if steps == 1 {
                    return;
                }
                write(taker.words(), 1);
                if steps == 2 {
                    return;
                }
                taker.finish();
                taker.look();
            });
            let other = Arc::clone(&words);
            let executor = thread::spawn(move || {
                dying.join().unwrap();
                let mut taker = PairTaker::resume(other);
                while serve(&mut taker) == 1 {}
            });
            assert_eq!((replay(&words, 1), replay(&words, 2)), (Some(10), Some(20)));
            executor.join().unwrap();
        });
    }
}
