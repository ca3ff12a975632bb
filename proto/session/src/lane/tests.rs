//! The lane's two ends, step by step, in one thread.

use crate::sync::{AtomicU32Cell, AtomicU64Cell};

use super::*;

const SLOTS: u64 = 4;

#[derive(Default)]
struct Slot {
    state: AtomicU64Cell,
    descriptor: [AtomicU64Cell; 2],
    answer: [AtomicU64Cell; 1],
}

#[derive(Default)]
struct Plain {
    bell: AtomicU64Cell,
    done: AtomicU64Cell,
    submitted: AtomicU64Cell,
    fresh: AtomicU64Cell,
    sleeping: AtomicU32Cell,
    slots: [Slot; 4],
}

impl LaneWords for &Plain {
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
        Word64::new(&self.slots[index(slot)].state)
    }
    fn write_descriptor(&self, slot: u64, words: &[u64]) {
        write(&self.slots[index(slot)].descriptor, words);
    }
    fn read_descriptor(&self, slot: u64, words: &mut [u64]) {
        read(&self.slots[index(slot)].descriptor, words);
    }
    fn write_answer(&self, slot: u64, words: &[u64]) {
        write(&self.slots[index(slot)].answer, words);
    }
    fn read_answer(&self, slot: u64, words: &mut [u64]) {
        read(&self.slots[index(slot)].answer, words);
    }
}

fn write(words: &[AtomicU64Cell], from: &[u64]) {
    words.iter().zip(from).for_each(|(word, value)| Word64::new(word).store_relaxed(*value));
}

fn read(words: &[AtomicU64Cell], into: &mut [u64]) {
    words.iter().zip(into).for_each(|(word, value)| *value = Word64::new(word).load_relaxed());
}

/// Publishes the next request; its payload is ten times its number.
fn publish(submitter: &mut LaneSubmitter<&Plain>) -> Sequence {
    let place = submitter.place().expect("states that the executor writes");
    let sequence = place.expect("a free slot");
    submitter.publish(&[sequence.get(), sequence.get() * 10]);
    sequence
}

/// Takes and accepts everything.
fn accept_all(taker: &mut LaneTaker<&Plain>) -> u64 {
    let mut accepted = 0;
    while let Some(sequence) = taker.take(&mut [0; 2]).expect("a sound lane") {
        taker.accept(sequence);
        accepted += 1;
    }
    accepted
}

fn answer_of(submitter: &LaneSubmitter<&Plain>, sequence: Sequence) -> u64 {
    let mut answer = [0];
    submitter.read_answer(sequence, &mut answer);
    answer[0]
}

#[test]
fn an_accepted_request_is_run_once_its_bell_rang_and_not_before() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    let first = publish(&mut submitter);
    assert_eq!(submitter.phase(first), Ok(LanePhase::Told));
    assert_eq!((accept_all(&mut taker), taker.is_waiting()), (1, true));
    assert_eq!(submitter.phase(first), Ok(LanePhase::Accepted));
    assert_eq!(taker.rung(), None);
    Word64::new(&words.bell).store_relaxed(1);
    assert_eq!(taker.rung(), Some(first));
    let mut descriptor = [0; 2];
    assert_eq!((taker.begin(&mut descriptor), descriptor), (Ok(0), [1, 10]));
    taker.finish(&[77]);
    assert_eq!(submitter.phase(first), Ok(LanePhase::Settled));
    assert_eq!((answer_of(&submitter, first), taker.is_waiting()), (77, false));
}

#[test]
fn a_refused_request_is_passed_over_however_late_the_bell() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    let requests = [(); 3].map(|()| publish(&mut submitter));
    for sequence in requests {
        assert_eq!(taker.take(&mut [0; 2]), Ok(Some(sequence)));
        if sequence == requests[1] {
            taker.refuse(sequence, &[13]);
        } else {
            taker.accept(sequence);
        }
    }
    assert_eq!(submitter.phase(requests[1]), Ok(LanePhase::Settled));
    assert_eq!(answer_of(&submitter, requests[1]), 13);
    Word64::new(&words.bell).store_relaxed(3);
    for sequence in [requests[0], requests[2]] {
        assert_eq!(taker.rung(), Some(sequence));
        taker.begin(&mut [0; 2]).unwrap();
        taker.finish(&[0]);
    }
    assert_eq!(taker.rung(), None);
}

#[test]
fn a_full_lane_has_no_place_until_its_oldest_request_is_settled() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    for round in 0..50 {
        while submitter.place().unwrap().is_some() {
            publish(&mut submitter);
        }
        accept_all(&mut taker);
        assert_eq!(taker.outstanding(), SLOTS);
        assert_eq!(submitter.place(), Ok(None), "round {round}");
        Word64::new(&words.bell).store_relaxed(submitter.published() - SLOTS + 1);
        let rung = taker.rung().unwrap();
        taker.begin(&mut [0; 2]).unwrap();
        taker.finish(&[rung.get()]);
        assert_eq!((taker.rung(), answer_of(&submitter, rung)), (None, rung.get()));
    }
}

#[test]
fn a_failed_lane_frees_its_waits_and_runs_nothing_more() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    let requests = [(); 3].map(|()| publish(&mut submitter));
    accept_all(&mut taker);
    Word64::new(&words.bell).store_relaxed(1);
    taker.begin(&mut [0; 2]).unwrap();
    taker.fail(&[5]);
    assert_eq!(Word64::new(&words.done).load_relaxed(), FREED);
    for sequence in requests {
        assert_eq!(submitter.phase(sequence), Ok(LanePhase::Settled));
        assert_eq!(answer_of(&submitter, sequence), 5);
    }
    Word64::new(&words.bell).store_relaxed(3);
    assert!(taker.rung().is_none() && taker.is_failed() && !taker.is_waiting());
}

#[test]
fn the_next_executor_finds_what_was_accepted_started_done_and_told() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    let requests = [(); 4].map(|()| publish(&mut submitter));
    for sequence in &requests[..3] {
        taker.take(&mut [0; 2]).unwrap();
        taker.accept(*sequence);
    }
    Word64::new(&words.bell).store_relaxed(2);
    taker.begin(&mut [0; 2]).unwrap();
    // Its stream wrote the word; it died before it could say so.
    Word64::new(&words.done).store_relaxed(1);
    let mut next = LaneTaker::resume(&words, &[9]);
    assert_eq!(submitter.phase(requests[0]), Ok(LanePhase::Settled));
    assert_eq!(answer_of(&submitter, requests[0]), 9);
    assert_eq!(next.rung(), Some(requests[1]));
    assert_eq!(next.begin(&mut [0; 2]), Ok(0), "it had not begun");
    for deaths in 1..=3_u8 {
        let mut later = LaneTaker::resume(&words, &[9]);
        assert_eq!(later.rung(), Some(requests[1]));
        assert_eq!(later.begin(&mut [0; 2]), Ok(deaths.min(2)));
        next = later;
    }
    next.finish(&[1]);
    assert_eq!(next.rung(), None, "accepted and not rung");
    let mut descriptor = [0; 2];
    assert_eq!(next.take(&mut descriptor), Ok(Some(requests[3])));
    assert_eq!(descriptor, [4, 40]);
}

#[test]
fn a_refusal_outlives_the_executor_that_gave_it() {
    let words = Plain::default();
    let (mut submitter, mut taker) = (LaneSubmitter::new(&words), LaneTaker::new(&words));
    let requests = [(); 2].map(|()| publish(&mut submitter));
    taker.take(&mut [0; 2]).unwrap();
    taker.refuse(requests[0], &[13]);
    taker.take(&mut [0; 2]).unwrap();
    taker.accept(requests[1]);
    Word64::new(&words.bell).store_relaxed(2);
    let next = LaneTaker::resume(&words, &[9]);
    assert_eq!(next.rung(), Some(requests[1]));
    assert_eq!(answer_of(&submitter, requests[0]), 13);
}

#[test]
fn a_lane_that_was_freed_stays_failed_for_the_next_executor() {
    let words = Plain::default();
    let mut submitter = LaneSubmitter::new(&words);
    publish(&mut submitter);
    Word64::new(&words.done).store_relaxed(FREED);
    assert!(LaneTaker::resume(&words, &[9]).is_failed());
}

#[test]
fn what_a_hostile_submitter_writes_breaks_the_lane_or_nothing() {
    for (submitted, descriptor) in [(5, 1), (u64::MAX, 1), (1, 2), (1, 0)] {
        let words = Plain::default();
        let mut taker = LaneTaker::new(&words);
        Word64::new(&words.slots[0].descriptor[0]).store_relaxed(descriptor);
        Word64::new(&words.submitted).store_relaxed(submitted);
        let broken = taker.take(&mut [0; 2]).unwrap_err();
        assert_eq!(taker.take(&mut [0; 2]), Err(broken), "{submitted} {descriptor}");
    }
    for word in [0, 1, 7, u64::MAX, FREED, 1 << 63] {
        for submitted in [0, 1, 4, 5, NUMBER_MAX, u64::MAX] {
            let words = Plain::default();
            Word64::new(&words.submitted).store_relaxed(submitted);
            Word64::new(&words.done).store_relaxed(word);
            Word64::new(&words.bell).store_relaxed(word);
            words.slots.iter().for_each(|slot| Word64::new(&slot.state).store_relaxed(word));
            let mut taker = LaneTaker::resume(&words, &[9]);
            while let Ok(Some(sequence)) = taker.take(&mut [0; 2]) {
                taker.accept(sequence);
            }
            assert!(taker.outstanding() <= SLOTS);
            while taker.rung().is_some() && taker.begin(&mut [0; 2]).is_ok() {
                taker.finish(&[0]);
            }
            taker.fail(&[5]);
        }
    }
}

#[test]
fn a_state_word_that_nobody_writes_is_an_error_of_the_submitter() {
    let words = Plain::default();
    let mut submitter = LaneSubmitter::new(&words);
    let first = publish(&mut submitter);
    for found in [1 << PHASE_BITS | 7, 2 << PHASE_BITS | PHASE_SETTLED, 1, u64::MAX] {
        Word64::new(&words.slots[0].state).store_relaxed(found);
        assert_eq!(submitter.phase(first), Err(StateBroken { sequence: 1, found }));
    }
}

#[test]
fn the_lane_says_what_is_fresh_and_who_sleeps() {
    let words = Plain::default();
    let mut submitter = LaneSubmitter::new(&words);
    assert_eq!(submitter.place().unwrap().map(Sequence::get), Some(1));
    assert!(!submitter.publish(&[1, 10]));
    assert_eq!(Word64::new(&words.fresh).take_bits_acquire(), 1);
    assert_eq!(Word64::new(&words.fresh).take_bits_acquire(), 0);
    Word32::new(&words.sleeping).store_relaxed(1);
    submitter.place().unwrap();
    assert!(submitter.publish(&[2, 20]));
}
