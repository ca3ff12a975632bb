//! Captured graphs: what the executor does with slots that ring again and again, with pairs that go, and at its own end.

use std::thread;

use statecopy_session::pair::{DONE, IDLE};
use statecopy_session::{FREED, Fault, PairNumber, SlotNumber};

use super::*;
use crate::record::SlotRecord;
use crate::sync::Ordering;

/// Where the indices lie in the packed region, behind every packed buffer of these tests.
const INDICES_AT: u64 = 512 << 10;
const PATIENCE: Duration = Duration::from_secs(10);
const PAIR: u32 = 64;

/// A worker with session memory, whose graphs are the test itself.
struct Worker {
    rig: Rig,
    memory: SessionMemory,
    bell: Doorbell,
}

impl Worker {
    fn new() -> Self {
        let mut rig = Rig::registered();
        let (memory, _submitter, bell) = session_ring(WORKER);
        rig.preparer.open_session(WORKER, &memory, bell.try_clone().unwrap(), false).unwrap();
        rig.fill_cache();
        Self { rig, memory, bell }
    }

    /// The same worker when the device process of before has died and another one serves.
    fn after_a_death(self) -> Self {
        let Self { memory, bell, .. } = self;
        let mut rig = Rig::registered();
        rig.preparer.open_session(WORKER, &memory, bell.try_clone().unwrap(), true).unwrap();
        rig.fill_cache();
        Self { rig, memory, bell }
    }

    /// A gather of so many rows of the set: row 1, each.
    fn slot(&self, pair: u32, slot: u64, selected: u64) -> SlotRecord {
        for at in 0..selected {
            self.rig.packed.write(INDICES_AT + at * 4, &1_i32.to_ne_bytes()).unwrap();
        }
        let mut request = self.rig.gather(3, &[0]);
        request.selected = selected;
        request.packed.bytes = 2 * selected * PAYLOAD * 4;
        let source = IndexSource::Shared { region: PACKED, offset: INDICES_AT };
        request.indices = Indices { width: IndexWidth::Int32, source };
        let (pair, slot) = (PairNumber::of_graph(pair).unwrap(), SlotNumber::new(slot).unwrap());
        SlotRecord { pair, slot, request, patience_ns: u64::MAX }
    }

    fn arm(&mut self, slot: SlotRecord) -> Result<(), RefusalCode> {
        let armed = self.rig.preparer.arm(WORKER, vec![slot], false);
        armed.map_err(|refusal| refusal.code())
    }

    fn pair(pair: u32) -> PairNumber {
        PairNumber::of_graph(pair).unwrap()
    }

    fn done(&self, pair: u32) -> u64 {
        let at = self.memory.parameters().done_at(Self::pair(pair));
        self.memory.mapping().atomic_u64(at).unwrap().load(Ordering::Acquire)
    }

    fn set_done(&self, pair: u32, value: u64) {
        let at = self.memory.parameters().done_at(Self::pair(pair));
        self.memory.mapping().atomic_u64(at).unwrap().store(value, Ordering::Release);
    }

    fn ring(&self, pair: u32, slot: u64) {
        let at = self.memory.parameters().bell_at(Self::pair(pair));
        self.memory.mapping().atomic_u64(at).unwrap().store(slot, Ordering::Release);
    }

    /// Waits as a graph does; gives what the word holds then.
    fn wait(&self, pair: u32, bits: u64) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let done = self.done(pair);
            if done & bits != 0 {
                return done;
            }
            assert!(Instant::now() < deadline, "Pair {pair} waits for {bits}, and has {done}");
            thread::yield_now();
        }
    }

    fn replay(&self, pair: u32, slot: u64) -> u64 {
        self.wait(pair, IDLE);
        self.ring(pair, slot);
        let done = self.wait(pair, DONE);
        self.ring(pair, 0);
        done
    }

    /// Whether so many packed rows are row 1 of the first layer.
    fn has_rows(&self, selected: u64) -> bool {
        let from = self.rig.word(&self.rig.cache, 3 * PAYLOAD);
        (0..selected).all(|row| self.rig.word(&self.rig.packed, row * PAYLOAD) == from)
    }

    fn spoil(&self) {
        self.rig.packed.fill(0, 4096, 0xee).unwrap();
    }

    fn failure(&self, pair: u32) -> Option<RefusalCode> {
        let failure: Option<Fault> =
            self.memory.failure(Self::pair(pair)).unwrap().and_then(|it| it.result.err());
        failure.map(|fault| fault.code)
    }
}

#[test]
fn a_slot_is_copied_whenever_it_rings_and_not_before() {
    let mut worker = Worker::new();
    worker.arm(worker.slot(PAIR, 7, 3)).unwrap();
    worker.spoil();
    // The executor is busy meanwhile, and looks at the pair again and again.
    for _ in 0..20 {
        worker.rig.run(&worker.rig.gather(1, &[]), &[]).unwrap();
    }
    assert!(worker.done(PAIR) == IDLE && !worker.has_rows(1));
    for round in 0..200 {
        worker.spoil();
        assert_eq!(worker.replay(PAIR, 7), DONE);
        assert!(worker.has_rows(3), "round {round}");
    }
    assert_eq!(worker.rig.counters.get(Counter::Copies(Direction::Gather)), 220);
}

#[test]
fn a_slot_of_nothing_lets_its_graph_go_on() {
    let mut worker = Worker::new();
    worker.arm(worker.slot(PAIR, 1, 0)).unwrap();
    for _ in 0..3 {
        assert_eq!(worker.replay(PAIR, 1), DONE);
    }
}

#[test]
fn what_breaks_a_rule_is_not_armed() {
    let mut worker = Worker::new();
    let good = worker.slot(PAIR, 1, 2);
    let unknown = CopyRequest { binding: BindingId(99), ..good.request };
    let refused = worker.arm(SlotRecord { request: unknown, ..good });
    assert_eq!(refused, Err(RefusalCode::StalePlan));
    worker.ring(PAIR, 1);
    worker.rig.run(&worker.rig.gather(1, &[]), &[]).unwrap();
    assert_eq!(worker.done(PAIR), 0, "nobody looks at it");
    let nobody = worker.rig.preparer.arm(SessionId(9), vec![good], false).unwrap_err();
    assert_eq!(nobody.code(), RefusalCode::VersionMismatch);
}

#[test]
fn a_pair_that_is_disarmed_lets_its_graph_go_on_and_serves_another_one_later() {
    let mut worker = Worker::new();
    for round in 0..40 {
        worker.arm(worker.slot(PAIR, 1, 16)).unwrap();
        worker.arm(worker.slot(PAIR + 1, 1, 16)).unwrap();
        assert_eq!((worker.failure(PAIR), worker.failure(PAIR + 1)), (None, None));
        assert_eq!(worker.replay(PAIR, 1), DONE);
        worker.spoil();
        worker.wait(PAIR, IDLE);
        worker.ring(PAIR, 1);
        // Before the copy or in the middle of it.
        while round % 2 == 0 && worker.done(PAIR) == IDLE {}
        worker.rig.preparer.disarm(WORKER, Worker::pair(PAIR)).unwrap();
        assert_eq!(worker.done(PAIR), FREED, "round {round}");
        worker.ring(PAIR, 0);
        // What the copy held is nobody's now, and is not written to.
        worker.spoil();
        assert_eq!(worker.replay(PAIR, 1), FREED);
        assert!(!worker.has_rows(1), "round {round}");
        assert_eq!(worker.replay(PAIR + 1, 1), DONE, "the other goes on");
        worker.wait(PAIR + 1, IDLE);
        worker.ring(PAIR + 1, 9);
        assert_eq!(worker.wait(PAIR + 1, DONE), FREED);
        assert_eq!(worker.failure(PAIR + 1), Some(RefusalCode::StalePlan));
        worker.ring(PAIR + 1, 0);
        worker.rig.preparer.disarm(WORKER, Worker::pair(PAIR + 1)).unwrap();
    }
    assert_eq!(worker.rig.counters.get(Counter::GraphsFailed), 40);
    assert_eq!(worker.memory.pairs_failed(), 40);
}

#[test]
fn a_session_that_ends_has_what_runs_finished_and_what_was_not_rung_never_copied() {
    for round in 0..20 {
        let mut worker = Worker::new();
        worker.arm(worker.slot(PAIR, 1, 16)).unwrap();
        worker.wait(PAIR, IDLE);
        worker.spoil();
        if round % 2 == 0 {
            worker.ring(PAIR, 1);
        }
        worker.rig.preparer.close_session(WORKER).unwrap();
        let done = worker.done(PAIR);
        let (begun, moved) = (done != IDLE, worker.rig.word(&worker.rig.packed, 0) != 0xeeee_eeee);
        assert!(!begun || done == DONE, "a copy that was begun is done: {done}");
        assert_eq!(begun, moved);
        worker.ring(PAIR, 1);
        // A registration later the executor has been round often enough.
        let (_memory, _ring) = open_ring(&mut worker.rig, SessionId(2));
        assert_eq!(worker.done(PAIR), done);
        assert_eq!(worker.rig.word(&worker.rig.packed, 0) != 0xeeee_eeee, moved);
    }
}

#[test]
fn a_drain_serves_what_was_rung_frees_what_rings_later_and_waits_for_no_graph() {
    let mut worker = Worker::new();
    for pair in PAIR..PAIR + 3 {
        worker.arm(worker.slot(pair, 1, 16)).unwrap();
        worker.wait(pair, IDLE);
    }
    worker.ring(PAIR, 1);
    worker.ring(PAIR + 1, 1);
    worker.rig.preparer.drain().unwrap();
    assert_eq!((worker.done(PAIR), worker.done(PAIR + 1)), (DONE, DONE));
    assert!(worker.has_rows(16));
    worker.ring(PAIR, 0);
    for pair in [PAIR, PAIR + 2] {
        assert_eq!(worker.replay(pair, 1), FREED);
        assert_eq!(worker.failure(pair), Some(RefusalCode::Draining));
    }
}

#[test]
fn the_next_device_process_goes_on_with_every_pair_where_it_stood() {
    // What `done` holds and the bell says when the executor dies, and how the replay goes on.
    for (done, bell, then) in [
        (IDLE, 0, IDLE),
        (IDLE, 1, DONE),
        (0, 1, DONE),
        (4, 1, FREED),
        (DONE, 1, DONE),
        (DONE, 0, IDLE),
        (FREED, 1, FREED),
    ] {
        let mut worker = Worker::new();
        worker.arm(worker.slot(PAIR, 1, 3)).unwrap();
        worker.rig.preparer.close_session(WORKER).unwrap();
        worker.set_done(PAIR, done);
        worker.ring(PAIR, bell);
        let mut worker = worker.after_a_death();
        worker.spoil();
        let slot = worker.slot(PAIR, 1, 3);
        worker.rig.preparer.arm(WORKER, vec![slot], true).unwrap();
        assert_eq!(worker.wait(PAIR, if bell == 0 { IDLE } else { DONE }), then, "{done} {bell}");
        assert_eq!(worker.has_rows(3), matches!((done, bell), (IDLE | 0, 1)), "{done} {bell}");
        let lost = (done == 4).then_some(RefusalCode::DeviceLost);
        assert_eq!(worker.failure(PAIR), lost);
        worker.ring(PAIR, 0);
        assert_eq!(worker.replay(PAIR, 1), if then == FREED { FREED } else { DONE });
    }
}

#[test]
fn a_pair_that_was_failed_stays_so_whatever_a_dead_device_wrote_last() {
    let mut worker = Worker::new();
    let slot = worker.slot(PAIR, 1, 3);
    worker.arm(slot).unwrap();
    worker.ring(PAIR, 2);
    worker.wait(PAIR, DONE);
    worker.rig.preparer.close_session(WORKER).unwrap();
    worker.ring(PAIR, 0);
    worker.set_done(PAIR, DONE);
    let mut worker = worker.after_a_death();
    worker.spoil();
    worker.rig.preparer.arm(WORKER, vec![slot], true).unwrap();
    assert_eq!(worker.wait(PAIR, IDLE), FREED);
    assert_eq!(worker.replay(PAIR, 1), FREED);
    assert_eq!(worker.failure(PAIR), Some(RefusalCode::StalePlan));
    assert!(!worker.has_rows(1));
}

#[test]
fn slots_are_armed_again_while_their_layers_sleep_and_serve_once_they_wake() {
    let mut worker = Worker::new();
    let slot = worker.slot(PAIR, 1, 3);
    worker.arm(slot).unwrap();
    worker.rig.preparer.close_session(WORKER).unwrap();
    let mut worker = worker.after_a_death();
    worker.rig.preparer.drop_region(WORKER, CACHE).unwrap();
    worker.rig.preparer.arm(WORKER, vec![slot], true).unwrap();
    let (descriptor, mapping) = memory();
    mapping.fill(0, REGION_BYTES, 0x5c).unwrap();
    import(&mut worker.rig.preparer, WORKER, RegionId(5), descriptor);
    let to = |layer: &LayerRecord| RebindRecord {
        binding: layer.binding,
        region: RegionId(5),
        placement: layer.placement.clone(),
    };
    let moves: Vec<_> = registration().layers.iter().map(to).collect();
    worker.rig.preparer.rebind(WORKER, &moves).unwrap();
    assert_eq!(worker.replay(PAIR, 1), DONE);
    assert_eq!(worker.rig.word(&worker.rig.packed, 0), 0x5c5c_5c5c);
}

#[test]
fn hundreds_of_graphs_are_served_in_turn() {
    let mut worker = Worker::new();
    let pairs = PAIR..layout::PAIRS;
    for pair in pairs.clone() {
        worker.arm(worker.slot(pair, 1, 1)).unwrap();
    }
    for _ in 0..3 {
        for pair in pairs.clone() {
            worker.wait(pair, IDLE);
            worker.ring(pair, 1);
        }
        for pair in pairs.clone() {
            assert_eq!(worker.wait(pair, DONE), DONE);
            worker.ring(pair, 0);
        }
    }
    assert_eq!(worker.rig.counters.get(Counter::GraphsFailed), 0);
}
