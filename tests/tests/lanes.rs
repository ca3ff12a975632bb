//! Copies in the order of a worker's stream, against the real daemon. The stream is a thread of the test.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::sharing::Regions;
use statecopy_client::{
    Address, ConnectOptions, DataType, Direction, Error, IndexWidth, Indices, LaneWord, Layer,
    Memory, RefusalCode, Region, Registration, Request, StreamLane, Strides, Transport, Tried, Use,
};
use statecopy_tests::{Daemon, DaemonOptions, PATIENCE, send_signal, until};

const ROWS: u64 = 6;
const PAYLOAD: u64 = 512;
const SLOTS: u64 = 4096;
const INDICES_AT: u64 = SLOTS * PAYLOAD;

/// A client with one layer, row `r` filled with `10 + r`, and indices in shared memory: those of slot `s` name row `s mod ROWS`.
struct Worker {
    client: Client,
    cache: Memory,
    packed: Memory,
    packed_region: Region,
    cache_region: Region,
    plan: Plan,
}

impl Worker {
    fn new(daemon: &Daemon) -> Self {
        let options = ConnectOptions { wait_for: PATIENCE, ..ConnectOptions::default() };
        Self::connect(daemon, options)
    }

    fn connect(daemon: &Daemon, options: ConnectOptions) -> Self {
        let address = Address::in_directory(daemon.runtime()).unwrap();
        let client = Client::connect(address, options).unwrap();
        let cache = client.allocate("cache", ROWS * PAYLOAD).unwrap();
        let packed = client.allocate("packed", INDICES_AT + SLOTS * 16).unwrap();
        let cache_region = client.register_region(&cache, Use::Cache).unwrap();
        let packed_region = client.register_region(&packed, Use::Packed).unwrap();
        let layer = Layer {
            name: "layers.0".to_owned(),
            dtype: DataType::Float32,
            shape: [ROWS, 2, 4, 16],
            strides: Strides::PageStride(PAYLOAD / 4),
            region: cache_region.clone(),
            offset_bytes: 0,
            max_selected: 4,
            check_unique: false,
        };
        let bindings = client.register(&Registration::new().layer(layer), |_| {}).unwrap();
        let plan = bindings.layer("layers.0").unwrap().clone();
        for row in 0..ROWS {
            cache.fill(row * PAYLOAD, PAYLOAD, 10 + u8::try_from(row).unwrap()).unwrap();
        }
        for slot in 0..SLOTS {
            let row = i32::try_from(slot % ROWS).unwrap();
            packed.write(INDICES_AT + slot * 16, &row.to_ne_bytes()).unwrap();
        }
        Self { client, cache, packed, packed_region, cache_region, plan }
    }

    fn request(&self, slot: u64) -> Request<'static> {
        let at = self.packed_region.at(INDICES_AT + slot * 16);
        let indices = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
        Request::new(indices, self.packed_region.at(slot * PAYLOAD))
    }

    fn holds(&self, slot: u64, byte: u8) -> bool {
        let rows = self.packed.read_vec(slot * PAYLOAD, 512).unwrap();
        rows.iter().all(|it| *it == byte)
    }

    /// Whether the packed slot holds its row.
    fn has_row(&self, slot: u64) -> bool {
        self.holds(slot, 10 + u8::try_from(slot % ROWS).unwrap())
    }

    fn code(outcome: Result<(), Error>) -> Option<RefusalCode> {
        outcome.err().and_then(|error| error.code())
    }
}

#[test]
fn a_gather_and_a_scatter_take_their_places_in_the_stream() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    for round in 0..200_u8 {
        let gather = lane.order(&worker.plan, Direction::Gather, &worker.request(2)).unwrap();
        // What the stream does before: the producer.
        worker.cache.fill(2 * PAYLOAD, PAYLOAD, round).unwrap();
        gather.ring();
        gather.wait(PATIENCE).unwrap();
        assert!(worker.holds(2, round), "{round}");
        let scatter = lane.order(&worker.plan, Direction::Scatter, &worker.request(2)).unwrap();
        worker.packed.fill(2 * PAYLOAD, PAYLOAD, round ^ 0xff).unwrap();
        scatter.ring();
        scatter.wait(PATIENCE).unwrap();
        assert_eq!(worker.cache.read_vec(2 * PAYLOAD, 512).unwrap(), [round ^ 0xff; 512]);
        lane.check().unwrap();
    }
}

#[test]
fn three_workers_far_ahead_on_all_their_lanes_hold_nobody_up() {
    let daemon = Daemon::start();
    let workers = [(); 3].map(|()| Worker::new(&daemon));
    let mut lanes: Vec<(usize, StreamLane)> = Vec::new();
    for (of, worker) in workers.iter().enumerate() {
        for _ in 0..if of == 0 { 62 } else { 1 } {
            lanes.push((of, worker.client.open_lane().unwrap()));
        }
    }
    // Unrung, each; the first of them a thousand ahead.
    for (at, (of, lane)) in lanes.iter_mut().enumerate() {
        let ahead = if at == 0 { 1_000 } else { 2 };
        for turn in 0..ahead {
            let slot = if at == 0 { turn } else { 1_000 + at as u64 * 2 + turn };
            let _unrung = lane
                .order(&workers[*of].plan, Direction::Gather, &workers[*of].request(slot))
                .unwrap();
        }
    }
    // Another session comes, registers, copies and goes.
    let other = Worker::new(&daemon);
    other.plan.gather(Request::new(Indices::Int32(&[1]), other.packed_region.at(0))).unwrap();
    other.client.close().unwrap();
    // Last come, first rung: a third request of each lane rings the two before.
    for (at, (of, lane)) in lanes.iter_mut().enumerate().rev() {
        let worker = &workers[*of];
        let slot = 2_000 + at as u64;
        let last = lane.order(&worker.plan, Direction::Gather, &worker.request(slot)).unwrap();
        last.ring();
        last.wait(PATIENCE).unwrap();
        assert!(worker.has_row(slot), "lane {at}");
        lane.check().unwrap();
    }
    assert!((0..1_000).all(|slot| workers[0].has_row(slot)));
    assert_eq!(daemon.counter("statecopy_lanes_failed_total", ""), 0);
}

#[test]
fn at_the_bound_a_worker_waits_for_a_place_and_is_overloaded_only_at_its_deadline() {
    let daemon = DaemonOptions::default().setting("lane_slots", "4").start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    for slot in 0..4 {
        let _unrung = lane.order(&worker.plan, Direction::Gather, &worker.request(slot)).unwrap();
    }
    let short = worker.request(4).deadline(Duration::from_millis(50));
    let begun = Instant::now();
    let refused = lane.order(&worker.plan, Direction::Gather, &short).map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::Overloaded));
    assert!(begun.elapsed() >= Duration::from_millis(50), "it waited");
    // A stream that rings meanwhile makes room.
    let (memory, _) = lane.memory();
    let memory = Arc::clone(memory);
    let mut other = worker.client.open_lane().unwrap();
    let probe = other.order(&worker.plan, Direction::Gather, &worker.request(5)).unwrap();
    // Lanes are numbered one after the other: the first one's bell is one pair before the second's.
    let bell = probe.bell().offset - 512;
    let ringing = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        memory.write_words(bell, &[1]).unwrap();
    });
    let waited = lane.order(&worker.plan, Direction::Gather, &worker.request(6)).unwrap();
    ringing.join().unwrap();
    waited.ring();
    waited.wait(PATIENCE).unwrap();
    assert!(worker.has_row(0) && worker.has_row(3) && worker.has_row(6) && !worker.has_row(5));
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_on_the_stream_and_the_lane_goes_on() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    let beyond = Request::new(Indices::Int32(&[1, 2]), worker.packed_region.at(0));
    let inline = lane.order(&worker.plan, Direction::Gather, &beyond).map(drop);
    assert_eq!(Worker::code(inline), Some(RefusalCode::IndexType));
    let at = worker.packed_region.at(INDICES_AT + 8);
    let unaligned = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
    let unaligned = Request::new(unaligned, worker.packed_region.at(0));
    let refused = lane.order(&worker.plan, Direction::Gather, &unaligned).map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::IndexType));
    lane.check().unwrap();
    let good = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    good.ring();
    good.wait(PATIENCE).unwrap();
    assert!(worker.has_row(1));
}

#[test]
fn a_copy_whose_memory_was_released_before_its_bell_frees_the_stream_and_every_later_call_says_why()
{
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    let mut other = worker.client.open_lane().unwrap();
    {
        let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
        worker.client.release_region(worker.cache_region.clone()).unwrap();
        ordered.ring();
        let freed = ordered.wait(PATIENCE);
        assert_eq!(Worker::code(freed), Some(RefusalCode::RegionUnknown));
    }
    assert!(!worker.has_row(1), "no byte moved");
    assert_eq!(Worker::code(lane.check()), Some(RefusalCode::RegionUnknown));
    let again = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).map(drop);
    assert_eq!(Worker::code(again), Some(RefusalCode::RegionUnknown));
    other.check().unwrap();
    let asleep = other.order(&worker.plan, Direction::Gather, &worker.request(1)).map(drop);
    assert_eq!(Worker::code(asleep), Some(RefusalCode::RegionUnknown), "refused, and not failed");
    other.check().unwrap();
}

#[test]
fn a_killed_device_process_delays_a_lane_and_loses_nothing() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    for round in 0..3_u64 {
        let before = daemon.device_process();
        for slot in 0..10 {
            let _unrung = lane
                .order(&worker.plan, Direction::Gather, &worker.request(round * 20 + slot))
                .unwrap();
        }
        send_signal(before, Signal::KILL).unwrap();
        let last =
            lane.order(&worker.plan, Direction::Gather, &worker.request(round * 20 + 10)).unwrap();
        last.ring();
        last.wait(PATIENCE).unwrap();
        assert!((0..=10).all(|slot| worker.has_row(round * 20 + slot)), "round {round}");
        lane.check().unwrap();
    }
}

#[test]
fn the_end_of_the_daemon_frees_waiting_streams_and_the_next_one_serves_another_lane() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = directory.path().join("run");
    let mut daemon = DaemonOptions::default().runtime(&runtime).start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    {
        let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
        daemon.signal(Signal::KILL);
        daemon.wait();
        // It rings when nobody listens any more.
        ordered.ring();
        let freed = ordered.wait(PATIENCE).unwrap_err();
        assert_eq!(freed.code(), Some(RefusalCode::Unavailable), "{freed}");
    }
    assert_eq!(Worker::code(lane.check()), Some(RefusalCode::Unavailable));
    let refused = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::Unavailable));
    drop(daemon);
    let _daemon = DaemonOptions::default().runtime(&runtime).start();
    let mut next = worker.client.open_lane().unwrap();
    let ordered = next.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    ordered.ring();
    ordered.wait(PATIENCE).unwrap();
    assert!(worker.has_row(1));
    assert!(lane.check().is_err(), "the lane of the dead daemon stays failed");
}

#[test]
fn a_session_has_64_lanes_and_gets_back_those_that_are_at_rest() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lanes: Vec<StreamLane> = (0..64).map(|_| worker.client.open_lane().unwrap()).collect();
    let refused = worker.client.open_lane().map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::QuotaExceeded));
    for turn in 0..3 {
        let mut lane = lanes.pop().unwrap();
        let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(turn)).unwrap();
        ordered.ring();
        ordered.wait(PATIENCE).unwrap();
        until("the copy is settled", || ordered.is_settled());
        drop(lane);
        lanes.push(worker.client.open_lane().unwrap());
    }
    // One that was never rung stays taken.
    let mut lane = lanes.pop().unwrap();
    let _unrung = lane.order(&worker.plan, Direction::Gather, &worker.request(9)).unwrap();
    drop(lane);
    assert!(worker.client.open_lane().is_err());
}

#[test]
fn copies_over_grpc_have_no_lanes() {
    let daemon = Daemon::start();
    let options = ConnectOptions {
        wait_for: PATIENCE,
        transport: Transport::Grpc,
        ..ConnectOptions::default()
    };
    let worker = Worker::connect(&daemon, options);
    let refused = worker.client.open_lane().map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::VersionMismatch));
}

#[test]
fn an_executor_that_waits_for_bells_sleeps_between_its_looks() {
    // So long a spin that it would be all there is, were it done after every look.
    let daemon = DaemonOptions::default().setting("spin_us", "20000").start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    let waits = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    daemon.expect_sleeps_between_looks();
    waits.ring();
    waits.wait(PATIENCE).unwrap();
    assert!(worker.has_row(1));
}

/// Rings a copy that was accepted, as a stream does, and waits until nothing of the lane is under way.
fn ring(lane: &StreamLane, [bell, _]: [LaneWord; 2]) {
    let (memory, _) = lane.memory();
    memory.write_words(bell.offset, &[bell.value]).unwrap();
    until("the copy is over", || lane.is_settled());
}

#[test]
fn whoever_has_no_patience_hears_at_once_that_there_is_no_place_or_waits_for_the_check_later() {
    let daemon = DaemonOptions::default().setting("lane_slots", "4").start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    let mut words = Vec::new();
    for (slot, patience) in [PATIENCE, Duration::ZERO, PATIENCE, Duration::ZERO].iter().enumerate()
    {
        let request = worker.request(slot as u64);
        let tried = lane.try_order(&worker.plan, Direction::Gather, &request, *patience).unwrap();
        words.push(match tried {
            Tried::Accepted(words) => words,
            Tried::Asked(asked) => lane.accepted(&asked).unwrap(),
            Tried::Full => panic!("there is a place for number {slot}"),
        });
    }
    let request = worker.request(9);
    let full = lane.try_order(&worker.plan, Direction::Gather, &request, PATIENCE).unwrap();
    assert!(matches!(full, Tried::Full));
    assert!(!lane.is_settled());
    ring(&lane, words[3]);
    assert!(
        (0..4).all(|slot| worker.has_row(slot)) && !worker.has_row(9),
        "nothing else was asked"
    );
    let beyond = Request::new(Indices::Int32(&[1]), worker.packed_region.at(0));
    let refused = lane.try_order(&worker.plan, Direction::Gather, &beyond, PATIENCE).map(drop);
    assert_eq!(Worker::code(refused), Some(RefusalCode::IndexType));
    let accepted = lane.try_order(&worker.plan, Direction::Gather, &request, PATIENCE).unwrap();
    let Tried::Accepted(words) = accepted else { panic!("{accepted:?}") };
    ring(&lane, words);
    assert!(worker.has_row(9));
}

#[test]
fn a_lane_whose_stream_did_not_take_a_copy_takes_no_other() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_lane().unwrap();
    let _unrung = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
    lane.distrust();
    assert_eq!(Worker::code(lane.check()), Some(RefusalCode::Unavailable));
    let again = lane.order(&worker.plan, Direction::Gather, &worker.request(2)).map(drop);
    assert_eq!(Worker::code(again), Some(RefusalCode::Unavailable));
    assert!(!lane.is_spent(), "its daemon lives");
    let mut other = worker.client.open_lane().unwrap();
    let ordered = other.order(&worker.plan, Direction::Gather, &worker.request(3)).unwrap();
    ordered.ring();
    ordered.wait(PATIENCE).unwrap();
    assert!(worker.has_row(3) && !worker.has_row(1) && !worker.has_row(2));
}

#[test]
fn a_lane_is_spent_once_its_daemon_is_gone_unless_it_lost_a_copy() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = directory.path().join("run");
    let mut daemon = DaemonOptions::default().runtime(&runtime).start();
    let worker = Worker::new(&daemon);
    let [mut fresh, mut done, mut lost, mut failed] =
        [(); 4].map(|()| worker.client.open_lane().unwrap());
    for lane in [&mut done, &mut failed] {
        let ordered = lane.order(&worker.plan, Direction::Gather, &worker.request(1)).unwrap();
        ordered.ring();
        ordered.wait(PATIENCE).unwrap();
        until("the copy is over", || lane.is_settled());
    }
    let other = worker.client.allocate("other", PAYLOAD).unwrap();
    let region = worker.client.register_region(&other, Use::Packed).unwrap();
    let at = worker.packed_region.at(INDICES_AT);
    let indices = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
    let gone = Request::new(indices, region.at(0));
    let ordered = failed.order(&worker.plan, Direction::Gather, &gone).unwrap();
    worker.client.release_region(region).unwrap();
    ordered.ring();
    assert!(ordered.wait(PATIENCE).is_err());
    let _unrung = lost.order(&worker.plan, Direction::Gather, &worker.request(2)).unwrap();
    assert!([&fresh, &done, &lost, &failed].iter().all(|lane| !lane.is_spent()));
    daemon.signal(Signal::KILL);
    daemon.wait();
    until("the end is seen", || done.is_spent());
    assert!(fresh.is_spent());
    until("the loss is seen", || lost.check().is_err());
    assert!(!lost.is_spent() && !failed.is_spent());
    assert_eq!(Worker::code(failed.check()), Some(RefusalCode::RegionUnknown));
    let refused = fresh.order(&worker.plan, Direction::Gather, &worker.request(1)).map(drop);
    assert!(refused.is_err());
}

#[test]
fn memory_that_a_settled_copy_held_can_be_given_up() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let known = Regions::new(&worker.client);
    let packed = worker.client.allocate("packed", PAYLOAD).unwrap();
    let holder: Arc<dyn Any + Send + Sync> = Arc::new(());
    let place = known.of_memory(&packed, Arc::downgrade(&holder), 0, PAYLOAD).unwrap().unwrap();
    let mut lane = worker.client.open_lane().unwrap();
    {
        let at = worker.packed_region.at(INDICES_AT);
        let indices = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
        let request = Request::new(indices, place);
        let ordered = lane.order(&worker.plan, Direction::Gather, &request).unwrap();
        drop(request);
        assert_eq!(known.trim(), 0, "the copy is to come");
        ordered.ring();
        ordered.wait(PATIENCE).unwrap();
        until("the copy is over", || ordered.is_settled());
    }
    assert_eq!(packed.read_vec(0, 512).unwrap(), [10; 512]);
    lane.let_go();
    assert_eq!(known.trim(), packed.bytes());
}
