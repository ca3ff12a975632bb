//! Every interleaving, and every value that a weak machine may load, of the very ring code.
//!
//! A descriptor and an answer have two words here: enough to be seen torn.

use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex, Notify};
use loom::thread;

use super::*;

const SLOTS: u64 = 2;

/// The words of a ring as loom's atomics.
struct Modelled {
    submitted: AtomicU64,
    submitter_sleeping: AtomicU32,
    executor_sleeping: AtomicU32,
    wake: AtomicU32,
    slots: Vec<ModelledSlot>,
    futex: Futex,
}

/// The kernel's part of a futex: it compares the word, and wakes sleepers, under one lock.
#[derive(Default)]
struct Futex {
    queue: Mutex<()>,
    sleepers: Condvar,
}

impl Futex {
    fn wait(&self, word: &AtomicU32, expected: WakeCount) {
        let queue = self.queue.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected.0 {
            // Never woken: loom reports a deadlock.
            drop(self.sleepers.wait(queue).unwrap());
        }
    }

    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.sleepers.notify_all();
    }
}

#[derive(Default)]
struct ModelledSlot {
    state: AtomicU64,
    descriptor: [AtomicU64; 2],
    answer: [AtomicU64; 2],
}

fn modelled() -> Arc<Modelled> {
    Arc::new(Modelled {
        submitted: AtomicU64::new(0),
        submitter_sleeping: AtomicU32::new(0),
        executor_sleeping: AtomicU32::new(0),
        wake: AtomicU32::new(0),
        futex: Futex::default(),
        slots: (0..SLOTS).map(|_| ModelledSlot::default()).collect(),
    })
}

fn write(words: &[AtomicU64], from: &[u64]) {
    words.iter().zip(from).for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
}

fn read(words: &[AtomicU64], into: &mut [u64]) {
    words.iter().zip(into).for_each(|(word, value)| *value = word.load(Ordering::Relaxed));
}

impl Words for Arc<Modelled> {
    fn slots(&self) -> u64 {
        SLOTS
    }

    fn submitted(&self) -> Word64<'_> {
        Word64::new(&self.submitted)
    }

    fn submitter_sleeping(&self) -> Word32<'_> {
        Word32::new(&self.submitter_sleeping)
    }

    fn executor_sleeping(&self) -> Word32<'_> {
        Word32::new(&self.executor_sleeping)
    }

    fn wake(&self) -> Word32<'_> {
        Word32::new(&self.wake)
    }

    fn state(&self, slot: u64) -> Word64<'_> {
        Word64::new(&self.slots[index(slot)].state)
    }

    fn write_descriptor(&self, slot: u64, words: &[u64]) {
        write(&self.slots[index(slot)].descriptor, words);
    }

    fn read_descriptor(&self, slot: u64, words: &mut [u64]) {
        read(&self.slots[index(slot)].descriptor, words);
    }

    /// Moves lines and no values, of which a model has none.
    fn touch_request(&self, _slot: u64) {}

    fn write_answer(&self, slot: u64, words: &[u64]) {
        write(&self.slots[index(slot)].answer, words);
    }

    fn read_answer(&self, slot: u64, words: &mut [u64]) {
        read(&self.slots[index(slot)].answer, words);
    }
}

/// What request `sequence` carries, and what its answer carries.
fn payload(sequence: u64) -> u64 {
    100 + sequence
}

fn publish(submitter: &mut SubmitterRing<Arc<Modelled>>) -> (Sequence, bool) {
    let (sequence, _) = submitter.next().unwrap();
    let rings = submitter.publish(&[sequence.get(), payload(sequence.get())]);
    (sequence, rings)
}

/// Explores all schedules with at most three forced preemptions: enough for every pair of racing words here.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn a_taken_descriptor_is_the_published_one() {
    explore(|| {
        let words = modelled();
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words);
        let producer = thread::spawn(move || {
            publish(&mut submitter);
            publish(&mut submitter);
            assert!(submitter.next().is_err(), "two slots, two requests");
        });
        let mut seen = 0;
        while seen < 2 {
            let mut descriptor = [0; 2];
            match taker.take(&mut descriptor).unwrap() {
                Some(sequence) => {
                    seen += 1;
                    assert_eq!(sequence.get(), seen);
                    assert_eq!(descriptor, [seen, payload(seen)]);
                }
                None => thread::yield_now(),
            }
        }
        producer.join().unwrap();
    });
}

#[test]
fn a_polled_answer_is_the_given_one_and_its_slot_can_be_used_again() {
    explore(|| {
        let words = modelled();
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words);
        let (first, _) = publish(&mut submitter);
        publish(&mut submitter);
        let executor = thread::spawn(move || {
            let mut descriptor = [0; 2];
            for _ in 0..3 {
                let sequence = loop {
                    match taker.take(&mut descriptor).unwrap() {
                        Some(sequence) => break sequence,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(descriptor, [sequence.get(), payload(sequence.get())]);
                taker.answer(sequence, &[sequence.get(), payload(sequence.get())]);
            }
        });
        let mut answer = [0; 2];
        while submitter.poll(first, &mut answer).unwrap() != Some(Phase::Answered) {
            thread::yield_now();
        }
        assert_eq!(answer, [1, payload(1)]);
        let (third, _) = publish(&mut submitter);
        while submitter.poll(third, &mut answer).unwrap() != Some(Phase::Answered) {
            thread::yield_now();
        }
        assert_eq!(answer, [3, payload(3)]);
        executor.join().unwrap();
    });
}

#[test]
fn an_executor_that_sleeps_is_woken_by_every_request() {
    explore(|| {
        let words = modelled();
        let bell = Arc::new(Notify::new());
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words);
        let rung = bell.clone();
        let producer = thread::spawn(move || {
            for _ in 0..2 {
                if publish(&mut submitter).1 {
                    rung.notify();
                }
            }
        });
        let mut seen = 0;
        while seen < 2 {
            let mut descriptor = [0; 2];
            if taker.take(&mut descriptor).unwrap().is_some() {
                seen += 1;
            } else if taker.prepare_sleep() {
                // A lost wake-up leaves this thread here for ever, which loom reports as a deadlock.
                bell.wait();
                taker.cancel_sleep();
            }
        }
        producer.join().unwrap();
    });
}

#[test]
fn a_submitter_that_sleeps_is_woken_by_every_answer() {
    explore(|| {
        let words = modelled();
        let bell = Arc::new(Notify::new());
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words);
        let (sequence, _) = publish(&mut submitter);
        let rung = bell.clone();
        let executor = thread::spawn(move || {
            let mut descriptor = [0; 2];
            let sequence = taker.take(&mut descriptor).unwrap().unwrap();
            taker.accept(sequence);
            if taker.answer(sequence, &[1, payload(1)]) {
                rung.notify();
            }
        });
        let mut answer = [0; 2];
        loop {
            submitter.prepare_sleep();
            if submitter.poll(sequence, &mut answer).unwrap() == Some(Phase::Answered) {
                break;
            }
            bell.wait();
            submitter.cancel_sleep();
        }
        assert_eq!(answer, [1, payload(1)]);
        executor.join().unwrap();
    });
}

/// Takes one request and answers it; wakes the futex if somebody sleeps.
fn take_and_answer(taker: &mut TakerRing<Arc<Modelled>>, words: &Modelled) {
    let mut descriptor = [0; 2];
    let sequence = taker.take(&mut descriptor).unwrap().unwrap();
    if taker.answer(sequence, &[sequence.get(), payload(sequence.get())]) {
        taker.raise_wake();
        words.futex.wake();
    }
}

#[test]
fn a_submitter_that_sleeps_on_the_futex_is_woken_by_every_answer() {
    explore(|| {
        let words = modelled();
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words.clone());
        let sequences = [publish(&mut submitter).0, publish(&mut submitter).0];
        let executors = words.clone();
        let executor = thread::spawn(move || {
            take_and_answer(&mut taker, &executors);
            take_and_answer(&mut taker, &executors);
        });
        for sequence in sequences {
            let mut answer = [0; 2];
            loop {
                let seen = submitter.prepare_sleep();
                let phase = submitter.poll(sequence, &mut answer).unwrap();
                if phase != Some(Phase::Answered) {
                    words.futex.wait(&words.wake, seen);
                }
                submitter.cancel_sleep();
                if phase == Some(Phase::Answered) {
                    break;
                }
            }
            assert_eq!(answer, [sequence.get(), payload(sequence.get())]);
        }
        executor.join().unwrap();
    });
}

/// One thread of a submitter that several share: it sleeps without the lock.
fn await_answer(shared: &Mutex<SubmitterRing<Arc<Modelled>>>, words: &Modelled, awaited: Sequence) {
    let mut answer = [0; 2];
    let mut look = |submitter: &mut SubmitterRing<Arc<Modelled>>| {
        submitter.poll(awaited, &mut answer).unwrap() == Some(Phase::Answered)
    };
    loop {
        let seen = {
            let mut submitter = shared.lock().unwrap();
            let seen = submitter.prepare_sleep();
            if look(&mut submitter) {
                submitter.cancel_sleep();
                return;
            }
            seen
        };
        words.futex.wait(&words.wake, seen);
        shared.lock().unwrap().cancel_sleep();
    }
}

#[test]
fn threads_that_sleep_on_one_futex_are_all_woken() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let words = modelled();
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words.clone());
        let (first, second) = (publish(&mut submitter).0, publish(&mut submitter).0);
        let shared = Arc::new(Mutex::new(submitter));
        let executors = words.clone();
        let executor = thread::spawn(move || {
            take_and_answer(&mut taker, &executors);
            take_and_answer(&mut taker, &executors);
        });
        let (others, theirs) = (shared.clone(), words.clone());
        let other = thread::spawn(move || await_answer(&others, &theirs, second));
        await_answer(&shared, &words, first);
        other.join().unwrap();
        executor.join().unwrap();
    });
}

/// A submitter that looks once and would then sleep, with the wake word as it was before that look or after it.
fn look_and_sleep(loaded_before: bool) {
    explore(move || {
        let words = modelled();
        let mut submitter = SubmitterRing::new(words.clone());
        let mut taker = TakerRing::new(words.clone());
        let (sequence, _) = publish(&mut submitter);
        let executors = words.clone();
        let executor = thread::spawn(move || take_and_answer(&mut taker, &executors));
        let before = submitter.prepare_sleep();
        let seen = submitter.poll(sequence, &mut [0; 2]).unwrap() == Some(Phase::Answered);
        let after = WakeCount(words.wake.load(Ordering::Acquire));
        executor.join().unwrap();
        let expected = if loaded_before { before } else { after };
        let raised = words.wake.load(Ordering::Relaxed) != expected.0;
        assert!(seen || raised, "the submitter sleeps on an answered request");
    });
}

#[test]
fn a_wake_word_that_is_loaded_before_the_look_loses_no_wake_up() {
    look_and_sleep(true);
}

#[test]
#[should_panic(expected = "the submitter sleeps on an answered request")]
fn a_wake_word_that_is_loaded_after_the_look_loses_one() {
    look_and_sleep(false);
}

/// The hand-shake of [`SubmitterRing::publish`] and [`TakerRing::prepare_sleep`] with its fences of a given strength.
fn handshake(order: Ordering) {
    explore(move || {
        let submitted = Arc::new(AtomicU64::new(0));
        let sleeping = Arc::new(AtomicU32::new(0));
        let (published, sleeps) = (submitted.clone(), sleeping.clone());
        let producer = thread::spawn(move || {
            published.store(1, Ordering::Release);
            fence(order);
            sleeps.load(Ordering::Relaxed) != 0
        });
        sleeping.store(1, Ordering::Relaxed);
        fence(order);
        let seen = submitted.load(Ordering::Relaxed) != 0;
        let rings = producer.join().unwrap();
        assert!(seen || rings, "the executor sleeps on a published request");
    });
}

#[test]
fn the_hand_shake_holds_with_sequentially_consistent_fences() {
    handshake(Ordering::SeqCst);
}

#[test]
#[should_panic(expected = "the executor sleeps on a published request")]
fn the_hand_shake_loses_a_wake_up_with_acquire_and_release_fences() {
    handshake(Ordering::AcqRel);
}
