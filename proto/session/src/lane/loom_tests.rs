//! Every interleaving, and every value that a weak machine may load, of a lane: the worker's thread and its stream on one side, the
//! executor and its stream on the other. A descriptor and an answer have one word beside the number.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

use super::*;

const SLOTS: u64 = 2;

struct Modelled {
    bell: AtomicU64,
    done: AtomicU64,
    submitted: AtomicU64,
    fresh: AtomicU64,
    sleeping: AtomicU32,
    /// The rows of the copies: what the executor's stream writes, and the worker's stream reads once it went on.
    bytes: [AtomicU64; 2],
    slots: Vec<(AtomicU64, [AtomicU64; 2], AtomicU64)>,
}

fn modelled() -> Arc<Modelled> {
    Arc::new(Modelled {
        bell: AtomicU64::new(0),
        done: AtomicU64::new(0),
        submitted: AtomicU64::new(0),
        fresh: AtomicU64::new(0),
        sleeping: AtomicU32::new(0),
        bytes: Default::default(),
        slots: (0..SLOTS).map(|_| Default::default()).collect(),
    })
}

impl LaneWords for Arc<Modelled> {
    fn slots(&self) -> u64 {
        SLOTS
    }
    fn bell(&self) -> Word64<'_> {
        Word64::new(&self.bell)
    }
    fn done(&self) -> Word64<'_> {
        Word64::new(&self.done)
    }
    fn submitted(&self) -> Word64<'_> {
        Word64::new(&self.submitted)
    }
    fn fresh(&self) -> Word64<'_> {
        Word64::new(&self.fresh)
    }
    fn fresh_bit(&self) -> u64 {
        1
    }
    fn executor_sleeping(&self) -> Word32<'_> {
        Word32::new(&self.sleeping)
    }
    fn state(&self, slot: u64) -> Word64<'_> {
        Word64::new(&self.slots[index(slot)].0)
    }
    fn write_descriptor(&self, slot: u64, words: &[u64]) {
        let descriptor = &self.slots[index(slot)].1;
        descriptor
            .iter()
            .zip(words)
            .for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
    }
    fn read_descriptor(&self, slot: u64, words: &mut [u64]) {
        let descriptor = &self.slots[index(slot)].1;
        descriptor
            .iter()
            .zip(words)
            .for_each(|(word, value)| *value = word.load(Ordering::Relaxed));
    }
    fn write_answer(&self, slot: u64, words: &[u64]) {
        self.slots[index(slot)].2.store(words[0], Ordering::Relaxed);
    }
    fn read_answer(&self, slot: u64, words: &mut [u64]) {
        words[0] = self.slots[index(slot)].2.load(Ordering::Relaxed);
    }
}

/// Looks until something is there.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        thread::yield_now();
    }
}

fn publish(submitter: &mut LaneSubmitter<Arc<Modelled>>) -> Sequence {
    let sequence = submitter.place().unwrap().unwrap();
    submitter.publish(&[sequence.get(), sequence.get() * 10]);
    sequence
}

fn wait_accepted(submitter: &LaneSubmitter<Arc<Modelled>>, sequence: Sequence) {
    until(|| (submitter.phase(sequence).unwrap() != LanePhase::Told).then_some(()));
}

/// The worker's stream: rings, waits, and reads what the copy wrote. `None` when it was freed.
fn stream(words: &Modelled, number: u64) -> Option<u64> {
    words.bell.store(number, Ordering::Release);
    let done = until(|| {
        let done = words.done.load(Ordering::Acquire);
        (done >= number).then_some(done)
    });
    (done != FREED).then(|| words.bytes[index(number - 1)].load(Ordering::Relaxed))
}

/// The executor serves one request from its bell to its end, as long as it is allowed to.
fn copy(taker: &mut LaneTaker<Arc<Modelled>>, sequence: Sequence) {
    let mut descriptor = [0; 2];
    taker.begin(&mut descriptor).unwrap();
    assert_eq!(descriptor, [sequence.get(), sequence.get() * 10]);
    let words = Arc::clone(taker.words());
    words.bytes[index(sequence.get() - 1)].store(descriptor[1], Ordering::Relaxed);
    words.done.store(sequence.get(), Ordering::Release);
    taker.finish(&[descriptor[1]]);
}

#[test]
fn a_stream_goes_on_when_its_bytes_are_there() {
    loom::model(|| {
        let words = modelled();
        let mut submitter = LaneSubmitter::new(Arc::clone(&words));
        let mut taker = LaneTaker::new(Arc::clone(&words));
        let executor = thread::spawn(move || {
            let taken = until(|| taker.take(&mut [0; 2]).unwrap());
            taker.accept(taken);
            let rung = until(|| taker.rung());
            copy(&mut taker, rung);
        });
        let first = publish(&mut submitter);
        wait_accepted(&submitter, first);
        assert_eq!(stream(&words, 1), Some(10));
        until(|| (submitter.phase(first).unwrap() == LanePhase::Settled).then_some(()));
        let mut answer = [0];
        submitter.read_answer(first, &mut answer);
        assert_eq!(answer, [10]);
        executor.join().unwrap();
    });
}

#[test]
fn the_executor_never_sleeps_on_a_fresh_lane() {
    loom::model(|| {
        let words = modelled();
        let mut submitter = LaneSubmitter::new(Arc::clone(&words));
        let other = Arc::clone(&words);
        let executor = thread::spawn(move || {
            // As `TakerRing::prepare_sleep`, then a look at the lanes.
            Word32::new(&other.sleeping).store_relaxed(1);
            fence_seq_cst();
            Word64::new(&other.fresh).load_relaxed() == 0
        });
        submitter.place().unwrap();
        let rang = submitter.publish(&[1, 10]);
        let sleeps = executor.join().unwrap();
        assert!(rang || !sleeps, "it sleeps, and nobody rang");
    });
}

#[test]
fn a_failed_lane_frees_its_stream_and_runs_nothing() {
    loom::model(|| {
        let words = modelled();
        let mut submitter = LaneSubmitter::new(Arc::clone(&words));
        let mut taker = LaneTaker::new(Arc::clone(&words));
        let executor = thread::spawn(move || {
            let taken = until(|| taker.take(&mut [0; 2]).unwrap());
            taker.accept(taken);
            // The bell may have rung or not.
            taker.fail(&[5]);
            assert_eq!(taker.rung(), None);
        });
        let first = publish(&mut submitter);
        wait_accepted(&submitter, first);
        assert_eq!(stream(&words, 1), None);
        // Whoever sees the lane freed can read why.
        assert_eq!(submitter.phase(first), Ok(LanePhase::Settled));
        let mut answer = [0];
        submitter.read_answer(first, &mut answer);
        assert_eq!(answer, [5]);
        executor.join().unwrap();
    });
}

/// The executor dies at each of its steps; the next one takes over once it is gone.
#[test]
fn the_next_executor_finishes_what_was_rung_whenever_the_first_died() {
    for steps in 0..5 {
        loom::model(move || {
            let words = modelled();
            let mut submitter = LaneSubmitter::new(Arc::clone(&words));
            let mut taker = LaneTaker::new(Arc::clone(&words));
            let dying = thread::spawn(move || {
                let taken = until(|| taker.take(&mut [0; 2]).unwrap());
                if steps == 0 {
                    return;
                }
                taker.accept(taken);
                if steps == 1 {
                    return;
                }
                until(|| taker.rung());
                taker.begin(&mut [0; 2]).unwrap();
                if steps == 2 {
                    return;
                }
                let words = Arc::clone(taker.words());
                words.bytes[0].store(10, Ordering::Relaxed);
                words.done.store(1, Ordering::Release);
                if steps == 3 {
                    return;
                }
                taker.finish(&[10]);
            });
            let other = Arc::clone(&words);
            let executor = thread::spawn(move || {
                dying.join().unwrap();
                let mut taker = LaneTaker::resume(other, &[10]);
                if let Some(taken) = taker.take(&mut [0; 2]).unwrap() {
                    taker.accept(taken);
                }
                if taker.is_waiting() {
                    let rung = until(|| taker.rung());
                    copy(&mut taker, rung);
                }
            });
            let first = publish(&mut submitter);
            wait_accepted(&submitter, first);
            assert_eq!(stream(&words, 1), Some(10));
            executor.join().unwrap();
            assert_eq!(submitter.phase(first), Ok(LanePhase::Settled));
        });
    }
}

/// The last write of a dying executor's stream may land after the worker has freed the lane: it is freed again once that is dead.
#[test]
fn a_survivor_frees_a_lane_for_good() {
    loom::model(|| {
        let words = modelled();
        let other = Arc::clone(&words);
        let dying = thread::spawn(move || other.done.store(0, Ordering::Release));
        Word64::new(&words.done).store_release(FREED);
        dying.join().unwrap();
        Word64::new(&words.done).store_release(FREED);
        assert_eq!(stream(&words, 1), None);
    });
}
