//! Lanes: what the executor does with requests whose bells ring late, in another order, or never.

use std::thread;

use statecopy_session::lane::LaneWords as _;
use statecopy_session::layout::LANES;
use statecopy_session::{
    Answer, CopyDescriptor, FREED, Fault, LaneNumber, LanePhase, LaneSubmitter, MappedLane,
};

use super::*;
use crate::sync::Ordering;

/// Where the indices lie in the packed region, behind every packed buffer of these tests.
const INDICES_AT: u64 = 512 << 10;
const PATIENCE: Duration = Duration::from_secs(10);
const NEVER: u64 = u64::MAX;

/// A worker with lanes, and the stream of each: the test itself.
struct Worker {
    rig: Rig,
    memory: SessionMemory,
    bell: Doorbell,
    lanes: Vec<LaneSubmitter<MappedLane>>,
}

impl Worker {
    fn new() -> Self {
        let mut rig = Rig::registered();
        let (memory, _submitter, bell) = session_ring(WORKER);
        rig.preparer.open_session(WORKER, &memory, bell.try_clone().unwrap(), false).unwrap();
        let lanes = LaneNumber::all().map(|lane| LaneSubmitter::new(memory.lane(lane))).collect();
        let mut worker = Self { rig, memory, bell, lanes };
        worker.fill();
        worker
    }

    /// Row `r` of the first layer holds `r + 1` in every byte; the indices of slot `i` name row `i mod ROWS`.
    fn fill(&mut self) {
        let placement = registration().layers[0].placement.clone();
        let stride = placement.layout().page_stride_bytes();
        for row in 0..ROWS {
            let byte = u8::try_from(row + 1).unwrap();
            let at = placement.offset() + row * stride;
            self.rig.cache.fill(at, PAYLOAD * 4, byte).unwrap();
        }
        for slot in 0..1024_u64 {
            let row = i32::try_from(slot % ROWS).unwrap();
            self.rig.packed.write(INDICES_AT + slot * 16, &row.to_ne_bytes()).unwrap();
        }
    }

    /// A gather of one row, `slot mod ROWS`, to packed slot `slot`.
    fn gather(&self, slot: u64) -> CopyRequest {
        let mut request = self.rig.gather(1, &[0]);
        request.packed.offset = slot * PAYLOAD * 4;
        let source = IndexSource::Shared { region: PACKED, offset: INDICES_AT + slot * 16 };
        request.indices = Indices { width: IndexWidth::Int32, source };
        request
    }

    /// Tells the executor of a request; gives its number once it was checked, or why it was refused.
    fn order(
        &mut self,
        lane: usize,
        request: &CopyRequest,
        patience: u64,
    ) -> Result<u64, RefusalCode> {
        let deadline = Instant::now() + PATIENCE;
        let submitter = &mut self.lanes[lane];
        let sequence = loop {
            if let Some(sequence) = submitter.place().unwrap() {
                break sequence;
            }
            assert!(Instant::now() < deadline, "There is no place");
            thread::yield_now();
        };
        let descriptor = CopyDescriptor::encode_ordered(sequence, request, patience);
        if submitter.publish(&descriptor.to_words()) {
            self.bell.ring();
        }
        loop {
            match submitter.phase(sequence).unwrap() {
                LanePhase::Told => thread::yield_now(),
                LanePhase::Accepted => return Ok(sequence.get()),
                LanePhase::Settled => {
                    let mut words = [0; layout::ANSWER_WORDS];
                    submitter.read_answer(sequence, &mut words);
                    let answer = Answer::from_words(words).unwrap();
                    return answer.result.map(|_| sequence.get()).map_err(|fault| fault.code);
                }
            }
            assert!(Instant::now() < deadline, "The request is not looked at");
        }
    }

    fn word(&self, at: u64) -> u64 {
        self.memory.mapping().atomic_u64(at).unwrap().load(Ordering::Acquire)
    }

    fn done(&self, lane: usize) -> u64 {
        let lane = LaneNumber::new(u32::try_from(lane).unwrap()).unwrap();
        self.word(self.memory.parameters().done_at(lane.pair()))
    }

    /// What the worker's stream does: it rings.
    fn ring(&self, lane: usize, number: u64) {
        let lane = LaneNumber::new(u32::try_from(lane).unwrap()).unwrap();
        let at = self.memory.parameters().bell_at(lane.pair());
        self.memory.mapping().atomic_u64(at).unwrap().store(number, Ordering::Release);
    }

    /// And waits; gives what the word holds then.
    fn wait(&self, lane: usize, number: u64) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let done = self.done(lane);
            if done >= number {
                return done;
            }
            assert!(
                Instant::now() < deadline,
                "Lane {lane} waits for {number}, and {done} is done"
            );
            thread::yield_now();
        }
    }

    /// Whether the packed slot holds its row.
    fn has_row(&self, slot: u64) -> bool {
        let byte = u32::try_from(slot % ROWS + 1).unwrap();
        self.rig.word(&self.rig.packed, slot * PAYLOAD) == byte * 0x0101_0101
    }

    fn failure(&self, lane: usize) -> Option<Fault> {
        let lane = LaneNumber::new(u32::try_from(lane).unwrap()).unwrap();
        self.memory.failure(lane.pair()).unwrap().and_then(|answer| answer.result.err())
    }
}

#[test]
fn a_copy_runs_when_its_bell_rings_and_not_before() {
    let mut worker = Worker::new();
    let number = worker.order(0, &worker.gather(3), NEVER).unwrap();
    // The executor is busy meanwhile, and looks at the lane again and again.
    for _ in 0..20 {
        worker.rig.run(&worker.rig.gather(1, &[0]), &[0]).unwrap();
    }
    assert!(worker.done(0) == 0 && !worker.has_row(3));
    worker.ring(0, number);
    assert_eq!(worker.wait(0, number), number);
    assert!(worker.has_row(3));
    // A command waits for the copy's end, which comes after the word that its stream waits for.
    worker.rig.preparer.withdraw(WORKER).unwrap();
    let counted = |counter| worker.rig.counters.get(counter);
    assert_eq!(counted(Counter::RowsOrdered(Direction::Gather)), 1);
    assert_eq!(counted(Counter::RowsCopied(Direction::Gather)), 20, "those of the ring alone");
}

#[test]
fn lanes_are_served_in_the_order_of_their_bells_however_many_wait() {
    let mut worker = Worker::new();
    let lanes = usize::try_from(LANES).unwrap();
    for lane in 0..lanes {
        for turn in 0..4 {
            let slot = (lane * 4 + turn) as u64;
            assert_eq!(worker.order(lane, &worker.gather(slot), NEVER), Ok(turn as u64 + 1));
        }
    }
    // The last lane first; of each lane the second bell rings the first request, too.
    for lane in (0..lanes).rev() {
        worker.ring(lane, 2);
        assert_eq!(worker.wait(lane, 2), 2);
        for turn in 0..4 {
            assert_eq!(worker.has_row((lane * 4 + turn) as u64), turn < 2, "{lane} {turn}");
        }
    }
    // Another session comes and goes, and the worker asks for host-completed copies.
    let (_memory, _ring) = open_ring(&mut worker.rig, SessionId(2));
    worker.rig.preparer.close_session(SessionId(2)).unwrap();
    worker.rig.run(&worker.rig.gather(1, &[0]), &[0]).unwrap();
    assert_eq!(worker.rig.counters.get(Counter::LanesFailed), 0);
}

#[test]
fn a_worker_far_ahead_waits_for_a_place() {
    let mut worker = Worker::new();
    for number in 1..=8 {
        assert_eq!(worker.order(0, &worker.gather(number), NEVER), Ok(number));
    }
    assert_eq!(worker.lanes[0].place(), Ok(None), "eight are accepted, which is the bound");
    for number in 9..=200 {
        worker.ring(0, number - 8);
        assert_eq!(worker.order(0, &worker.gather(number), NEVER), Ok(number));
    }
    worker.ring(0, 200);
    worker.wait(0, 200);
    assert!((1..=200).all(|slot| worker.has_row(slot)));
}

#[test]
fn a_bad_request_is_refused_before_it_is_on_the_stream() {
    let mut worker = Worker::new();
    let good = worker.gather(1);
    let unknown = CopyRequest { binding: BindingId(99), ..good };
    let inline = Indices { width: IndexWidth::Int32, source: IndexSource::Inline };
    let inline = CopyRequest { indices: inline, ..good };
    assert_eq!(worker.order(0, &good, NEVER), Ok(1));
    assert_eq!(worker.order(0, &unknown, NEVER), Err(RefusalCode::StalePlan));
    assert_eq!(worker.order(0, &inline, NEVER), Err(RefusalCode::IndexType));
    assert_eq!(worker.order(0, &worker.gather(2), NEVER), Ok(4));
    worker.ring(0, 4);
    assert_eq!(worker.wait(0, 4), 4);
    assert!(worker.has_row(1) && worker.has_row(2));
}

#[test]
fn nothing_moves_at_a_bell_for_what_was_released_meanwhile_and_the_lane_says_why() {
    let mut worker = Worker::new();
    for slot in 1..=2 {
        worker.order(5, &worker.gather(slot), NEVER).unwrap();
    }
    worker.rig.preparer.drop_region(WORKER, CACHE).unwrap();
    worker.ring(5, 1);
    assert_eq!(worker.wait(5, 1), FREED);
    assert!(!worker.has_row(1) && !worker.has_row(2));
    assert_eq!(worker.failure(5).map(|fault| fault.code), Some(RefusalCode::RegionUnknown));
    assert_eq!(worker.memory.pairs_failed(), 1);
    assert_eq!(worker.order(5, &worker.gather(3), NEVER), Err(RefusalCode::DeviceLost));
    assert_eq!(worker.failure(6), None);
}

#[test]
fn a_session_that_ends_never_has_what_was_not_rung_copied() {
    let mut worker = Worker::new();
    worker.order(0, &worker.gather(1), NEVER).unwrap();
    worker.rig.preparer.close_session(WORKER).unwrap();
    worker.ring(0, 1);
    // A registration later the executor has been round often enough.
    let (_memory, _ring) = open_ring(&mut worker.rig, SessionId(2));
    assert!(worker.done(0) == 0 && !worker.has_row(1));
}

#[test]
fn the_next_device_process_finishes_what_was_rung_and_waits_for_the_rest() {
    let mut worker = Worker::new();
    for slot in 1..=3 {
        worker.order(0, &worker.gather(slot), NEVER).unwrap();
    }
    // The executor is gone, as if it had died; its bells ring meanwhile.
    worker.rig.preparer.close_session(WORKER).unwrap();
    worker.ring(0, 2);
    let Worker { memory, bell, lanes, .. } = worker;
    let mut rig = Rig::registered();
    rig.preparer.open_session(WORKER, &memory, bell.try_clone().unwrap(), true).unwrap();
    let mut worker = Worker { rig, memory, bell, lanes };
    worker.fill();
    assert_eq!(worker.wait(0, 2), 2);
    assert_eq!(worker.order(0, &worker.gather(4), NEVER), Ok(4));
    assert!(!worker.has_row(3));
    worker.ring(0, 4);
    assert_eq!(worker.wait(0, 4), 4);
    assert!(worker.has_row(3) && worker.has_row(4));
}

#[test]
fn a_request_of_nothing_still_lets_its_stream_go_on() {
    let mut worker = Worker::new();
    let mut request = worker.gather(0);
    request.selected = 0;
    request.packed.bytes = 0;
    let number = worker.order(9, &request, NEVER).unwrap();
    worker.ring(9, number);
    assert_eq!(worker.wait(9, number), number);
}

#[test]
fn a_drain_serves_what_was_rung_refuses_what_comes_and_waits_for_no_stream() {
    let mut worker = Worker::new();
    worker.order(0, &worker.gather(1), NEVER).unwrap();
    worker.order(1, &worker.gather(2), NEVER).unwrap();
    worker.ring(0, 1);
    worker.rig.preparer.drain().unwrap();
    assert_eq!(worker.done(0), 1);
    assert_eq!(worker.order(0, &worker.gather(2), NEVER), Err(RefusalCode::Draining));
}

#[test]
fn a_lane_that_breaks_while_another_of_its_session_copies_ends_the_session_and_nothing_else() {
    let mut worker = Worker::new();
    // Many launches: the words break in the middle of them.
    let selected = registration().layers[0].max_selected;
    for slot in 0..selected {
        worker.rig.packed.write(INDICES_AT + slot * 4, &1_i32.to_ne_bytes()).unwrap();
    }
    let mut request = worker.gather(0);
    request.selected = selected;
    request.packed.bytes = selected * PAYLOAD * 4;
    for round in 1..=100 {
        worker.order(0, &request, NEVER).unwrap();
        if round == 100 {
            let broken = LaneNumber::new(7).unwrap();
            let at = worker.memory.parameters().bell_at(broken.pair()) + 2 * 128;
            worker.memory.mapping().atomic_u64(at).unwrap().store(NEVER, Ordering::Release);
            worker.ring(0, round);
            let fresh = worker.memory.mapping().atomic_u64(layout::LANES_FRESH).unwrap();
            fresh.store(1 << 7, Ordering::Release);
            worker.bell.ring();
        } else {
            worker.ring(0, round);
            worker.wait(0, round);
        }
    }
    worker.rig.preparer.close_session(WORKER).unwrap();
    let (_memory, _ring) = open_ring(&mut worker.rig, SessionId(2));
}

#[test]
fn words_out_of_range_hurt_their_own_session_alone() {
    for (lane, offset) in [(0, 2), (63, 2)] {
        let mut worker = Worker::new();
        let number = LaneNumber::new(lane).unwrap();
        let submitted = worker.memory.parameters().bell_at(number.pair()) + offset * 128;
        worker.memory.mapping().atomic_u64(submitted).unwrap().store(NEVER, Ordering::Release);
        let fresh = worker.memory.mapping().atomic_u64(layout::LANES_FRESH).unwrap();
        fresh.store(NEVER, Ordering::Release);
        worker.bell.ring();
        let deadline = Instant::now() + PATIENCE;
        while worker.rig.counters.get(Counter::RingsBroken) == 0 {
            assert!(Instant::now() < deadline, "The lane is not seen to be broken");
            thread::yield_now();
        }
        worker.rig.run(&worker.rig.gather(1, &[0]), &[0]).unwrap();
    }
}

#[test]
fn layers_do_not_move_while_a_stream_waits_for_a_copy_of_them() {
    let mut worker = Worker::new();
    let to = |layer: &LayerRecord| RebindRecord {
        binding: layer.binding,
        region: CACHE,
        placement: layer.placement.clone(),
    };
    let moves: Vec<_> = registration().layers.iter().map(to).collect();
    let mut request = worker.gather(0);
    (request.selected, request.packed.bytes) = (16, 16 * PAYLOAD * 4);
    let lanes = 0..usize::try_from(LANES).unwrap();
    let mut last = 0;
    for lane in lanes.clone() {
        for _ in 0..worker.lanes[lane].words().slots() {
            last = worker.order(lane, &request, NEVER).unwrap();
        }
    }
    for lane in lanes.clone() {
        worker.ring(lane, last);
    }
    let refusal = worker.rig.preparer.rebind(WORKER, &moves).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::Overloaded);
    for lane in lanes {
        assert_eq!(worker.wait(lane, last), last, "what was rung is copied");
    }
    worker.rig.preparer.rebind(WORKER, &moves).unwrap();
    let next = worker.order(0, &worker.gather(1), NEVER).unwrap();
    worker.ring(0, next);
    assert_eq!(worker.wait(0, next), next);
}
