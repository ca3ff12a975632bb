use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use statecopy_proto::{BindingId, Direction, IndexWidth, Lane, RegionId, SignatureHash};

use super::*;
use crate::answer::{Answer, Moved};
use crate::clock::MonotonicNs;
use crate::descriptor::{CopyRequest, FlagSource, IndexSource, Indices, Packed};
use crate::executor::{Taken, Waker};
use crate::fault::Subject;
use crate::layout::{
    COMPLETIONS, INLINE_BYTES_MAX, LANE_SLOTS_MAX, LANES, PAIRS, SLOTS_MAX, TIMELINE,
};
use crate::ring::{RingBroken, RingFull, StateBroken};
use crate::submitter::{PollError, Progress, SubmitError, WaitError};
use crate::watch::{Looked, Spin};
use crate::{AnswerError, Sequence};

mod opening;

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(60);

fn identity() -> Identity {
    Identity { incarnation: Incarnation::new([7; 16]), session: SessionId(11) }
}

fn parameters(slots: u32, inline_bytes: u32) -> Parameters {
    Parameters::new(slots, inline_bytes).unwrap()
}

/// A request with inline INT32 indices and inline flags.
fn request(selected: u64) -> CopyRequest {
    CopyRequest {
        session: SessionId(11),
        binding: BindingId(5),
        signature: SignatureHash(0xfeed),
        direction: Direction::Gather,
        selected,
        packed: Packed { region: RegionId(3), offset: 4096, bytes: 64 * selected, dtype: 1 },
        indices: Indices { width: IndexWidth::Int32, source: IndexSource::Inline },
        flags: FlagSource::Inline,
        lane: Lane(0),
        deadline: MonotonicNs::NEVER,
        submitted_at: MonotonicNs(1),
    }
}

/// Both ends of a fresh memory, and the doorbells that they ring.
struct Ends {
    sealed: SealedMemory,
    /// The peer's mapping of the same memory: the hand that scribbles.
    peer: SessionMemory,
    submitter: Submitter,
    executor: Executor,
    executor_bell: Doorbell,
    submitter_bell: Doorbell,
}

fn ends(parameters: Parameters) -> Ends {
    let (sealed, memory) = SessionMemory::create(parameters, identity()).unwrap();
    let peer = SessionMemory::open(sealed.try_clone_fd().unwrap()).unwrap();
    let executor_bell = Doorbell::create().unwrap();
    let submitter_bell = Doorbell::create().unwrap();
    let submitter = peer.submitter(executor_bell.try_clone().unwrap());
    let executor = memory.executor(Waker::Doorbell(submitter_bell.try_clone().unwrap()));
    Ends { sealed, peer, submitter, executor, executor_bell, submitter_bell }
}

impl Ends {
    /// Submits a request without inline bytes.
    fn submit(&mut self) -> Sequence {
        self.submitter.try_submit(&plain(), &[], &[]).unwrap()
    }

    fn take(&mut self) -> Taken {
        self.executor.take().unwrap().unwrap()
    }

    /// Writes over a word of the memory.
    fn scribble(&self, offset: u64, value: u64) {
        self.peer.mapping().atomic_u64(offset).unwrap().store(value, Ordering::Relaxed);
    }
}

/// A request without inline bytes.
fn plain() -> CopyRequest {
    let mut request = request(0);
    request.flags = FlagSource::None;
    request
}

fn moved(rows_copied: u64) -> Answer {
    Answer { result: Ok(Moved { rows_copied, rows_masked: 1 }), executor_ns: 9 }
}

#[test]
fn a_request_reaches_the_executor_whole_and_its_answer_comes_back() {
    let Ends { mut submitter, mut executor, .. } = ends(parameters(4, 4096));
    let request = request(3);
    let indices = [1_u8, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255];
    let sequence = submitter.try_submit(&request, &indices, &[1, 0, 2]).unwrap();
    assert_eq!(submitter.poll(sequence), Ok(Progress::Pending));

    let taken = executor.take().unwrap().unwrap();
    assert_eq!(taken.sequence, sequence);
    assert_eq!(taken.descriptor.parse(), Ok(request));
    let ranges = request.inline_ranges(4096).unwrap();
    assert_eq!((ranges.indices, ranges.flags), (Some(0..12), Some(16..19)));
    let (mut seen, mut flags) = ([0; 12], [0; 3]);
    executor.copy_inline(sequence, 0, &mut seen);
    executor.copy_inline(sequence, 16, &mut flags);
    assert_eq!((seen, flags), (indices, [1, 0, 2]));
    assert_eq!(executor.take(), Ok(None));

    executor.accept(sequence);
    assert_eq!(submitter.poll(sequence), Ok(Progress::Accepted));
    executor.answer(sequence, &moved(2));
    assert_eq!(submitter.poll(sequence), Ok(Progress::Answered(moved(2))));
    assert_eq!(submitter.poll(sequence), Err(PollError::NotOutstanding(sequence.get())));
    assert_eq!((submitter.outstanding(), executor.outstanding()), (0, 0));
}

#[test]
fn inline_bytes_that_do_not_fit_or_are_not_as_many_as_said_are_not_submitted() {
    let mut ends = ends(parameters(4, 4096));
    let long = ends.submitter.try_submit(&request(1000), &[0; 4000], &[0; 1000]);
    assert_eq!(long, Err(SubmitError::Inline(Subject::FlagRange.fault(5000, 4096))));
    let short = ends.submitter.try_submit(&request(3), &[0; 8], &[0; 3]);
    assert_eq!(short, Err(SubmitError::InlineLength { what: "indices", given: 8, wanted: 12 }));
    let unasked = ends.submitter.try_submit(&plain(), &[], &[0; 3]);
    assert_eq!(unasked, Err(SubmitError::InlineLength { what: "flags", given: 3, wanted: 0 }));
    assert_eq!(ends.executor.take(), Ok(None));
    assert_eq!(ends.submitter.outstanding(), 0);
}

#[test]
fn what_is_submitted_and_not_answered_is_pending_whatever_is_read() {
    let mut ends = ends(parameters(4, 4096));
    assert_eq!(ends.peer.pending(), 0);
    for _ in 0..9 {
        let [first, second] = [ends.submit(), ends.submit()];
        ends.take();
        assert_eq!(ends.peer.pending(), 2);
        ends.executor.answer(first, &moved(1));
        assert_eq!(ends.peer.pending(), 1, "its answer need not be read");
        ends.take();
        ends.executor.answer(second, &moved(1));
        assert_eq!(ends.peer.pending(), 0);
        assert!(
            [first, second].map(|sequence| ends.submitter.poll(sequence)).iter().all(Result::is_ok)
        );
    }
    for claim in [0, 1, 1 << 62, u64::MAX] {
        ends.scribble(SUBMITTED, claim);
        assert!(ends.peer.pending() <= 4, "a claim has its limit");
    }
}

#[test]
fn a_taken_request_is_a_private_copy() {
    let mut ends = ends(parameters(2, 0));
    ends.submit();
    let at = ends.peer.parameters().descriptor_at(0);
    let taken = ends.take();
    ends.scribble(at, 99);
    ends.scribble(at + 32, 99);
    assert_eq!(taken.descriptor.parse(), Ok(plain()));
}

#[test]
fn answers_that_nobody_reads_stop_only_their_submitter() {
    let mut ends = ends(parameters(4, 0));
    let sequences: Vec<Sequence> = (0..4).map(|_| ends.submit()).collect();
    for sequence in &sequences {
        assert_eq!(ends.take().sequence, *sequence);
        ends.executor.answer(*sequence, &moved(sequence.get()));
    }
    let full = Err(SubmitError::Full(RingFull { slots: 4 }));
    assert_eq!(ends.submitter.try_submit(&plain(), &[], &[]), full);
    assert!(
        ends.executor.prepare_sleep(),
        "the executor has nothing to do and nothing to wait for"
    );
    ends.executor.cancel_sleep();
    // Reading a later answer does not free the next slot; reading the oldest does, for one request.
    assert_eq!(ends.submitter.poll(sequences[3]), Ok(Progress::Answered(moved(4))));
    assert_eq!(ends.submitter.try_submit(&plain(), &[], &[]), full);
    assert_eq!(ends.submitter.poll(sequences[0]), Ok(Progress::Answered(moved(1))));
    assert_eq!(ends.submit().get(), 5);
    assert_eq!(ends.submitter.try_submit(&plain(), &[], &[]), full);
    assert_eq!(ends.take().sequence.get(), 5);
}

#[test]
fn a_count_that_goes_backwards_ends_the_ring_for_good() {
    let mut ends = ends(parameters(4, 0));
    ends.submit();
    let taken = ends.take();
    ends.scribble(SUBMITTED, 0);
    let broken = Err(RingBroken::Backwards { taken: 1, submitted: 0 });
    assert_eq!(ends.executor.take(), broken);
    ends.scribble(SUBMITTED, 2);
    assert_eq!(ends.executor.take(), broken, "a dead ring does not come back");
    assert!(ends.executor.prepare_sleep(), "a dead ring keeps nobody awake");
    // What was taken before is still answered.
    ends.executor.answer(taken.sequence, &moved(1));
    assert_eq!(ends.submitter.poll(taken.sequence), Ok(Progress::Answered(moved(1))));
}

#[test]
fn a_count_that_jumps_past_the_slots_ends_the_ring() {
    for submitted in [6, 1 << 40, 1 << 63, u64::MAX] {
        let mut ends = ends(parameters(4, 0));
        ends.submit();
        ends.take();
        ends.scribble(SUBMITTED, submitted);
        let broken = RingBroken::Jumped { taken: 1, submitted, slots: 4 };
        assert_eq!(ends.executor.take(), Err(broken));
    }
}

#[test]
fn a_descriptor_in_another_ones_place_ends_the_ring() {
    let mut ends = ends(parameters(4, 0));
    ends.submit();
    ends.scribble(ends.peer.parameters().descriptor_at(0), 2);
    let broken = RingBroken::SequenceDiffers { expected: 1, found: 2 };
    assert_eq!(ends.executor.take(), Err(broken));
    // A count without a descriptor behind it is the same.
    let mut ends = self::ends(parameters(4, 0));
    ends.scribble(SUBMITTED, 1);
    let broken = RingBroken::SequenceDiffers { expected: 1, found: 0 };
    assert_eq!(ends.executor.take(), Err(broken));
}

#[test]
fn a_slot_that_is_submitted_again_before_its_answer_ends_the_ring() {
    let mut ends = ends(parameters(2, 0));
    let first = ends.submit();
    ends.submit();
    assert_eq!(ends.take().sequence, first);
    ends.take();
    // The submitter claims in the shared words that its first request was answered.
    ends.scribble(COMPLETIONS, first.get() << 2 | 2);
    ends.scribble(ends.peer.parameters().descriptor_at(0), 3);
    ends.scribble(SUBMITTED, 3);
    let broken = RingBroken::Unanswered { sequence: 3, occupant: 1 };
    assert_eq!(ends.executor.take(), Err(broken));
    assert_eq!(ends.executor.outstanding(), 2);
}

#[test]
fn whatever_is_read_back_is_parsed() {
    let mut ends = ends(parameters(2, 0));
    let first = ends.submit();
    for found in [1_u64, 3, 2 << 2 | 2, 1 << 2, u64::MAX] {
        ends.scribble(COMPLETIONS, found);
        let broken = PollError::State(StateBroken { sequence: 1, found });
        assert_eq!(ends.submitter.poll(first), Err(broken));
    }
    ends.scribble(COMPLETIONS, 0);
    assert_eq!(ends.submitter.poll(first), Ok(Progress::Pending));
    ends.take();
    ends.executor.answer(first, &moved(1));
    ends.scribble(COMPLETIONS + COMPLETION_ANSWER, 77);
    let broken = PollError::Answer(AnswerError::Outcome(77));
    assert_eq!(ends.submitter.poll(first), Err(broken));
}

#[test]
fn the_other_side_is_rung_only_while_it_says_that_it_sleeps() {
    let mut ends = ends(parameters(4, 0));
    let first = ends.submit();
    assert!(!ends.executor_bell.clear().unwrap(), "the executor is awake");
    assert!(!ends.executor.prepare_sleep(), "there is a request to take first");
    assert_eq!(ends.take().sequence, first);
    assert!(ends.executor.prepare_sleep());
    let second = ends.submit();
    assert!(ends.executor_bell.clear().unwrap());
    ends.executor.cancel_sleep();

    ends.executor.answer(first, &moved(1));
    assert!(!ends.submitter_bell.clear().unwrap(), "the submitter is awake");
    ends.submitter.prepare_sleep();
    assert_eq!(ends.take().sequence, second);
    ends.executor.answer(second, &moved(2));
    assert!(ends.submitter_bell.clear().unwrap());
    ends.submitter.cancel_sleep();
    let third = ends.submit();
    ends.take();
    ends.executor.answer(third, &moved(3));
    assert!(!ends.submitter_bell.clear().unwrap());
}

#[test]
fn the_next_executor_takes_again_what_was_not_answered_and_nothing_else() {
    let mut ends = ends(parameters(4, 0));
    let sequences: Vec<Sequence> = (0..4).map(|_| ends.submit()).collect();
    for _ in 0..3 {
        ends.take();
    }
    ends.executor.accept(sequences[0]);
    ends.executor.answer(sequences[1], &moved(2));
    drop(ends.executor);

    let fd = ends.sealed.try_clone_fd().unwrap();
    let memory = SessionMemory::attach(fd, ends.peer.parameters(), identity()).unwrap();
    let mut executor = memory.resume_executor(Waker::Futex);
    assert!(!executor.prepare_sleep());
    let again: Vec<u64> =
        (0..3).map(|_| executor.take().unwrap().unwrap().sequence.get()).collect();
    assert_eq!(again, [1, 3, 4]);
    assert_eq!(executor.take(), Ok(None));
    for sequence in [sequences[3], sequences[0], sequences[2]] {
        executor.answer(sequence, &moved(sequence.get()));
    }
    for sequence in sequences {
        let answered = Progress::Answered(moved(sequence.get()));
        assert_eq!(ends.submitter.poll(sequence), Ok(answered));
    }
    // And the one after it finds nothing to do, then goes on where the ring is.
    let mut executor = memory.resume_executor(Waker::Futex);
    assert_eq!(executor.take(), Ok(None));
    let fifth = ends.submitter.try_submit(&plain(), &[], &[]).unwrap();
    assert_eq!(executor.take().unwrap().unwrap().sequence, fifth);
    let jumped = ends.peer.mapping().atomic_u64(SUBMITTED).unwrap();
    jumped.store(u64::MAX, Ordering::Relaxed);
    // Broken from the start, and it stays so.
    let mut executor = memory.resume_executor(Waker::Futex);
    jumped.store(5, Ordering::Relaxed);
    assert!(matches!(executor.take(), Err(RingBroken::Jumped { submitted: u64::MAX, .. })));
}

#[test]
fn the_next_executors_know_how_many_died_under_a_request() {
    let mut ends = ends(parameters(4, 0));
    let (begun, never) = (ends.submit(), ends.submit());
    for died in 0..4 {
        let mut executor = match died {
            0 => ends.peer.executor(Waker::Futex),
            _ => ends.peer.resume_executor(Waker::Futex),
        };
        assert_eq!(executor.take().unwrap().unwrap().sequence, begun);
        assert_eq!(executor.deaths(begun), died.min(2));
        executor.accept(begun);
        assert_eq!(ends.submitter.poll(begun), Ok(Progress::Accepted));
        // Taken, and not accepted: whatever killed the executor, it was not this one.
        assert_eq!(executor.take().unwrap().unwrap().sequence, never);
        assert_eq!(executor.deaths(never), 0);
    }
    let mut executor = ends.peer.resume_executor(Waker::Futex);
    for sequence in [begun, never] {
        executor.take().unwrap().unwrap();
        executor.answer(sequence, &moved(1));
        assert_eq!(ends.submitter.poll(sequence), Ok(Progress::Answered(moved(1))));
    }
    // The same slots, next time round.
    ends.submit();
    ends.submit();
    let fifth = ends.submit();
    let taken = std::iter::from_fn(|| executor.take().unwrap());
    assert_eq!(taken.map(|taken| taken.sequence).last(), Some(fifth));
    assert_eq!(executor.deaths(fifth), 0);
}

#[test]
fn a_submitter_sleeps_on_the_futex_until_its_answer_comes() {
    let mut ends = ends(parameters(4, 0));
    let sequence = ends.submit();
    assert_eq!(ends.submitter.wait(sequence, Spin::NONE, Duration::ZERO).unwrap(), None);
    let slice = ends.submitter.wait(sequence, Spin::NONE, Duration::from_millis(1));
    assert_eq!(slice.unwrap(), None, "nobody answers yet");

    let mut executor = ends.peer.resume_executor(Waker::Futex);
    let sleeping = ends.peer.mapping().atomic_u32(SUBMITTER_SLEEPING).unwrap();
    assert_eq!(sleeping.load(Ordering::Relaxed), 0, "whoever gave up is awake");
    let mut submitter = ends.submitter;
    let waiter = thread::spawn(move || submitter.wait(sequence, Spin::NONE, PATIENCE));
    let began = Instant::now();
    while sleeping.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < PATIENCE, "the waiter never sleeps");
        thread::yield_now();
    }
    executor.take().unwrap().unwrap();
    executor.answer(sequence, &moved(7));
    assert_eq!(waiter.join().unwrap().unwrap(), Some(moved(7)));
    assert!(began.elapsed() < PATIENCE, "the waiter was woken by nobody");
    assert_eq!(ends.peer.mapping().atomic_u32(WAKE).unwrap().load(Ordering::Relaxed), 1);
}

#[test]
fn whoever_waits_may_not_spin_where_one_cpu_is_all_there_is() {
    let one = NonZeroUsize::MIN;
    assert_eq!(Spin::new(PATIENCE, one), Spin::NONE);
    assert_ne!(Spin::new(PATIENCE, one.saturating_add(1)), Spin::NONE);
    let mut ends = ends(parameters(4, 0));
    let sequence = ends.submit();
    let watch = ends.submitter.watch();
    assert_ne!(watch.spin(sequence, Spin::NONE), Looked::Answered);
    ends.take();
    ends.executor.answer(sequence, &moved(1));
    assert_eq!(watch.spin(sequence, Spin::NONE), Looked::Answered);
    let waited = ends.submitter.wait(sequence, Spin::new(PATIENCE, one), Duration::ZERO);
    assert_eq!(waited.unwrap(), Some(moved(1)));
    let again = ends.submitter.wait(sequence, Spin::NONE, Duration::ZERO);
    assert!(matches!(again, Err(WaitError::Poll(PollError::NotOutstanding(1)))));
}

#[test]
fn a_waiter_stays_awake_for_as_long_as_its_copy_may_take_and_no_longer() {
    let mut ends = ends(parameters(4, 0));
    let sequence = ends.submit();
    let watch = ends.submitter.watch();
    let spin = Spin::new(Duration::from_micros(1), NonZeroUsize::MAX);
    let looked = |bytes| {
        let began = Instant::now();
        let Looked::InVain(since) = watch.spin(sequence, spin.while_copying(bytes)) else {
            panic!("nobody answered");
        };
        assert!(since >= began && since <= Instant::now());
        began.elapsed()
    };
    // Whoever else wants the CPU ends it early: not every time.
    let looked_for = |bytes, time| {
        let began = Instant::now();
        while looked(bytes) < time {
            assert!(began.elapsed() < PATIENCE, "it never stays awake for {time:?}");
        }
    };
    looked_for(1 << 20, Duration::from_micros(131));
    looked_for(u64::MAX, Duration::from_millis(1));
    // Nor is it kept from the CPU every time.
    let most = (0..10).map(|_| looked(u64::MAX)).min();
    assert!(most < Some(Duration::from_millis(10)), "{most:?}");
    assert_eq!(Spin::NONE.while_copying(u64::MAX), Spin::NONE);
}

/// Requests and answers of two threads that sleep whenever they can, round and round the ring.
#[test]
fn thousands_of_rounds_lose_and_mix_nothing() {
    const REQUESTS: u64 = 20_000;
    let Ends { mut submitter, mut executor, executor_bell, submitter_bell, .. } =
        ends(parameters(4, 4096));
    let taker = thread::spawn(move || {
        let mut answered = 0;
        while answered < REQUESTS {
            let Some(Taken { sequence, descriptor }) = executor.take().unwrap() else {
                if executor.prepare_sleep() {
                    assert!(executor_bell.wait(Some(PATIENCE)).unwrap(), "a request was lost");
                    executor.cancel_sleep();
                }
                continue;
            };
            let request = descriptor.parse().unwrap();
            let selected = usize::try_from(request.selected).unwrap();
            let mut indices = vec![0; 4 * selected];
            executor.copy_inline(sequence, 0, &mut indices);
            let expected = sequence.get().to_le_bytes()[0];
            assert!(indices.iter().all(|byte| *byte == expected), "inline bytes were mixed");
            executor.answer(sequence, &moved(sequence.get()));
            answered += 1;
        }
    });
    let mut flying: Vec<Sequence> = Vec::new();
    let (mut submitted, mut read) = (0, 0);
    while read < REQUESTS {
        let byte = (submitted + 1_u64).to_le_bytes()[0];
        let selected = submitted % 7;
        let count = usize::try_from(selected).unwrap();
        if submitted < REQUESTS
            && let Ok(sequence) = submitter.try_submit(
                &CopyRequest { flags: FlagSource::None, ..request(selected) },
                &vec![byte; 4 * count],
                &[],
            )
        {
            flying.push(sequence);
            submitted += 1;
            continue;
        }
        submitter.prepare_sleep();
        let before = flying.len();
        flying.retain(|sequence| match submitter.poll(*sequence).unwrap() {
            Progress::Answered(answer) => {
                assert_eq!(answer, moved(sequence.get()));
                false
            }
            Progress::Pending | Progress::Accepted => true,
        });
        read += u64::try_from(before - flying.len()).unwrap();
        if before == flying.len() {
            assert!(submitter_bell.wait(Some(PATIENCE)).unwrap(), "an answer was lost");
        }
        submitter.cancel_sleep();
    }
    taker.join().unwrap();
}

proptest! {
    /// The peer writes anything anywhere at any time: the executor takes a request of the right sequence, or the ring is dead.
    #[test]
    fn scribbled_memory_gives_typed_refusals_and_nothing_worse(
        steps in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0_u8..6), 1..60)
    ) {
        let mut ends = ends(parameters(2, 4096));
        let words = ends.peer.parameters().total_bytes() / 8;
        let (mut last, mut owed) = (0, Vec::new());
        for (at, value, action) in steps {
            let value = if action % 2 == 0 { value } else { value % 8 };
            match action {
                0 | 1 => {
                    let word = u64::try_from(at.index(usize::try_from(words).unwrap())).unwrap();
                    ends.scribble(word * 8, value);
                }
                2 => ends.scribble(SUBMITTED, value % 16),
                3 => ends.scribble(ends.peer.parameters().descriptor_at(value % 2), last + 1),
                4 => drop(ends.submitter.try_submit(&request(2), &[0; 8], &[0; 2])),
                _ => {
                    if let Some(sequence) = owed.pop() {
                        ends.executor.answer(sequence, &moved(1));
                    }
                }
            }
            if let Ok(Some(taken)) = ends.executor.take() {
                prop_assert_eq!(taken.sequence.get(), last + 1);
                last += 1;
                owed.push(taken.sequence);
                prop_assert!(owed.len() <= 2);
                if let Ok(request) = taken.descriptor.parse()
                    && let Ok(ranges) = request.inline_ranges(4096)
                    && let Some(range) = ranges.indices
                {
                    let len = usize::try_from(range.end - range.start).unwrap();
                    ends.executor.copy_inline(taken.sequence, range.start, &mut vec![0; len]);
                }
            }
            prop_assert_eq!(ends.executor.outstanding(), owed.len());
        }
    }

    #[test]
    fn areas_follow_each_other_and_end_with_the_memory(
        slots in (0_u32..=10).prop_map(|power| 1 << power), pages in 0..=INLINE_BYTES_MAX / 4096
    ) {
        let parameters = parameters(slots, pages * 4096);
        let last = u64::from(slots) - 1;
        prop_assert!(parameters.completion_at(last) + 128 <= parameters.descriptors());
        prop_assert!(parameters.descriptor_at(last) + 128 <= parameters.inline());
        let end = parameters.inline_at(last) + u64::from(parameters.inline_bytes());
        prop_assert_eq!(end, parameters.total_bytes());
        let lanes = parameters.with_lanes(16).unwrap();
        prop_assert_eq!(lanes.pair_words().start, end);
        let last_pair = PairNumber::of_graph(PAIRS - 1).unwrap();
        prop_assert_eq!(lanes.failure_at(last_pair) + 128, lanes.pair_words().end);
        prop_assert_eq!(lanes.pair_words().end, lanes.lane_states());
        let last_lane = LaneNumber::new(LANES - 1).unwrap();
        prop_assert!(lanes.lane_state_at(last_lane, 15) + 64 <= lanes.lane_descriptors());
        prop_assert_eq!(lanes.lane_descriptor_at(last_lane, 15) + 128, lanes.total_bytes());
        for area in [SUBMITTED, EXECUTOR_SLEEPING, TIMELINE, COMPLETIONS, parameters.descriptors(), parameters.inline()] {
            prop_assert_eq!(area % 4096, 0);
        }
    }
}

#[test]
fn sizes_that_no_session_memory_has_are_refused() {
    for slots in [0, 3, 100, SLOTS_MAX * 2, u32::MAX] {
        assert_eq!(Parameters::new(slots, 0), Err(LayoutError::Slots(slots)));
    }
    for bytes in [1, 4095, INLINE_BYTES_MAX + 4096, u32::MAX] {
        assert_eq!(Parameters::new(1, bytes), Err(LayoutError::InlineBytes(bytes)));
    }
    for lane_slots in [3, LANE_SLOTS_MAX * 2, u32::MAX] {
        let refused = Parameters::new(1, 0).unwrap().with_lanes(lane_slots);
        assert_eq!(refused, Err(LayoutError::LaneSlots(lane_slots)));
    }
    let rows = Parameters::for_rows(8, 4096).unwrap();
    let mut request = request(4096);
    request.indices.width = IndexWidth::Int64;
    assert!(request.inline_ranges(rows.inline_bytes()).is_ok());
    assert_eq!(rows.inline_bytes(), 10 * 4096);
    assert!(Parameters::for_rows(8, u32::MAX).is_err());
}
