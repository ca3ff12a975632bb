//! Captured graphs against the real daemon. The graph is a list of steps, and a thread of the test replays it.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, Armed, ConnectOptions, DataType, Direction, Error, Flags, GraphLane, IndexWidth,
    Indices, Layer, Memory, Rebind, RefusalCode, Region, Registration, Request, Step, Strides,
    Transport, Use,
};
use statecopy_tests::{Daemon, DaemonOptions, PATIENCE, WorkerProcess, send_signal, until};

const ROWS: u64 = 6;
const PAYLOAD: u64 = 512;
const PAGE: u64 = 2 * PAYLOAD;
const SELECTED: u64 = 4;
/// Room for the packed buffer of a set, of both layers.
const PACKED: u64 = 2 * SELECTED * PAYLOAD;
const PLACES: u64 = 64;
const INDICES_AT: u64 = PLACES * PACKED;
const FLAGS_AT: u64 = INDICES_AT + PLACES * 32;

/// A client with two layers in every page, and a set of both.
struct Worker {
    client: Client,
    cache: Memory,
    cache_region: Region,
    packed: Memory,
    packed_region: Region,
    plans: Plans,
}

struct Plans {
    a: Plan,
    b: Plan,
    both: Plan,
}

impl Worker {
    fn new(daemon: &Daemon) -> Self {
        let options = ConnectOptions { wait_for: PATIENCE, ..ConnectOptions::default() };
        Self::connect(daemon, options)
    }

    fn connect(daemon: &Daemon, options: ConnectOptions) -> Self {
        let address = Address::in_directory(daemon.runtime()).unwrap();
        let client = Client::connect(address, options).unwrap();
        let cache = client.allocate("cache", ROWS * PAGE).unwrap();
        let packed = client.allocate("packed", FLAGS_AT + PLACES * 16).unwrap();
        let cache_region = client.register_region(&cache, Use::Cache).unwrap();
        let packed_region = client.register_region(&packed, Use::Packed).unwrap();
        let plans = register(&client, &cache_region, ROWS);
        let worker = Self { client, cache, cache_region, packed, packed_region, plans };
        worker.fill(0);
        for place in 0..PLACES {
            worker.select(place, IndexWidth::Int32, [2; 4]);
        }
        worker
    }

    /// Row `r` of layer `l` holds `10 + 100 l + r + more` in every byte.
    fn fill(&self, more: u8) {
        for row in 0..ROWS {
            for layer in 0..2 {
                let at = row * PAGE + layer * PAYLOAD;
                self.cache.fill(at, PAYLOAD, byte_of(layer, row, more)).unwrap();
            }
        }
    }

    /// Has a place select these rows from now on.
    fn select(&self, place: u64, width: IndexWidth, rows: [i64; 4]) {
        let bytes: Vec<u8> = match width {
            IndexWidth::Int32 => {
                rows.iter().flat_map(|row| i32::try_from(*row).unwrap().to_ne_bytes()).collect()
            }
            IndexWidth::Int64 => rows.iter().flat_map(|row| row.to_ne_bytes()).collect(),
        };
        self.packed.write(INDICES_AT + place * 32, &bytes).unwrap();
    }

    fn request(&self, place: u64, width: IndexWidth) -> Request<'static> {
        let at = self.packed_region.at(INDICES_AT + place * 32);
        let indices = Indices::Shared { width, at, selected: SELECTED };
        Request::new(indices, self.packed_region.at(place * PACKED))
    }

    fn flagged(&self, place: u64, width: IndexWidth) -> Request<'static> {
        self.request(place, width)
            .flags(Flags::Shared(self.packed_region.at(FLAGS_AT + place * 16)))
    }

    /// A graph of one gather of layer a, into place 0.
    fn graph(&self) -> (GraphLane, Armed) {
        let mut lane = self.client.open_graph_lane().unwrap();
        let request = self.request(0, IndexWidth::Int32);
        let armed = lane.arm(&self.plans.a, Direction::Gather, &request).unwrap();
        (lane, armed)
    }

    /// The byte that a packed row holds; none where its bytes differ.
    fn packed_row(&self, place: u64, row: u64) -> Option<u8> {
        let bytes = self.packed.read_vec(place * PACKED + row * PAYLOAD, 512).unwrap();
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    fn cache_row(&self, layer: u64, row: u64) -> Option<u8> {
        let bytes = self.cache.read_vec(row * PAGE + layer * PAYLOAD, 512).unwrap();
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Whether place 0 holds row 2 of layer a, as [`Worker::graph`] gathers it.
    fn has_gathered(&self) -> bool {
        (0..SELECTED).all(|row| self.packed_row(0, row) == Some(byte_of(0, 2, 0)))
    }

    fn spoil(&self) {
        self.packed.fill(0, PACKED, 0xee).unwrap();
    }

    /// Binds both layers to the memory that the worker has now.
    fn wake(&self) {
        let to = |(layer, offset_bytes): (&str, u64)| Rebind {
            layer: layer.to_owned(),
            region: self.cache_region.clone(),
            offset_bytes,
        };
        self.client.rebind(&[("a", 0), ("b", PAYLOAD)].map(to)).unwrap();
    }
}

fn byte_of(layer: u64, row: u64, more: u8) -> u8 {
    u8::try_from(10 + 100 * layer + row).unwrap().wrapping_add(more)
}

fn layer(name: &str, region: &Region, offset_bytes: u64, rows: u64) -> Layer {
    Layer {
        name: name.to_owned(),
        dtype: DataType::Float32,
        shape: [rows, 2, 4, 16],
        strides: Strides::PageStride(PAGE / 4),
        region: region.clone(),
        offset_bytes,
        max_selected: SELECTED,
        check_unique: false,
    }
}

fn register(client: &Client, region: &Region, rows: u64) -> Plans {
    let registration = Registration::new()
        .layer(layer("a", region, 0, rows))
        .layer(layer("b", region, PAYLOAD, rows))
        .set("both", ["a", "b"]);
    let bindings = client.register(&registration, |_| {}).unwrap();
    let named = |name| bindings.layer(name).unwrap().clone();
    Plans { a: named("a"), b: named("b"), both: bindings.set("both").unwrap().clone() }
}

fn code<T>(outcome: Result<T, Error>) -> Option<RefusalCode> {
    outcome.err().and_then(|error| error.code())
}

/// What a stream does: one step of a graph.
fn step(lane: &GraphLane, step: Step) {
    let memory = lane.memory().0;
    let word = |at| {
        let mut words = [0];
        memory.read_words(at, &mut words).unwrap();
        words[0]
    };
    match step {
        Step::Write(to) => memory.write_words(to.offset, &[to.value]).unwrap(),
        Step::WaitAny(of) => until("the graph goes on", || word(of.offset) & of.value != 0),
    }
}

#[test]
fn each_replay_copies_what_indices_and_flags_say_at_the_time() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let mut lane = worker.client.open_graph_lane().unwrap();
    let gather = worker.flagged(0, IndexWidth::Int64);
    let gather = lane.arm(&worker.plans.a, Direction::Gather, &gather).unwrap();
    let scatter = worker.request(1, IndexWidth::Int32);
    let scatter = lane.arm(&worker.plans.b, Direction::Scatter, &scatter).unwrap();
    let extremes = [i64::MIN, i64::MAX, -1, 6, 1 << 32, i64::MAX - 1];
    for round in 0..300_usize {
        let rows = [0, 1, 2, 3].map(|at| {
            let rows = [0, 1, 2, 3, 4, 5, extremes[round % 6], extremes[(round + at) % 6]];
            rows[(round + at * 3) % 8]
        });
        let flags = [0, 1, 2, 3].map(|at| u8::from((round >> at) & 1 == 0) * 7);
        worker.select(0, IndexWidth::Int64, rows);
        worker.packed.write(FLAGS_AT, &flags).unwrap();
        worker.fill(u8::try_from(round % 80).unwrap());
        gather.replay(&lane, PATIENCE).unwrap();
        for at in 0..4_usize {
            let row = u64::try_from(rows[at]).ok().filter(|row| *row < ROWS && flags[at] != 0);
            let byte = row.map_or(0, |row| byte_of(0, row, u8::try_from(round % 80).unwrap()));
            assert_eq!(worker.packed_row(0, at as u64), Some(byte), "round {round}, {rows:?}");
        }
        let to = i64::try_from(round).unwrap() % 6;
        worker.select(1, IndexWidth::Int32, [to, -1, i64::from(i32::MAX), i64::from(i32::MIN)]);
        let byte = u8::try_from(round % 251).unwrap();
        worker.packed.fill(PACKED, PAYLOAD, byte).unwrap();
        scatter.replay(&lane, PATIENCE).unwrap();
        assert_eq!(worker.cache_row(1, u64::try_from(to).unwrap()), Some(byte), "round {round}");
    }
    lane.check().unwrap();
}

#[test]
fn one_graph_holds_slots_of_layers_and_of_a_set_and_two_graphs_are_replayed_at_once() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let arm = |first: u64| {
        let mut lane = worker.client.open_graph_lane().unwrap();
        let slots: Vec<Armed> = [&worker.plans.a, &worker.plans.b, &worker.plans.both]
            .into_iter()
            .zip(first..)
            .map(|(plan, place)| {
                let request = worker.request(place, IndexWidth::Int32);
                lane.arm(plan, Direction::Gather, &request).unwrap()
            })
            .collect();
        (lane, slots)
    };
    let graphs = [arm(0), arm(3)];
    thread::scope(|scope| {
        for (lane, slots) in &graphs {
            scope.spawn(move || {
                for _ in 0..2_000 {
                    for slot in slots {
                        slot.replay(lane, PATIENCE).unwrap();
                    }
                }
            });
        }
    });
    for first in [0, 3] {
        for row in 0..SELECTED {
            assert_eq!(worker.packed_row(first, row), Some(byte_of(0, 2, 0)));
            assert_eq!(worker.packed_row(first + 1, row), Some(byte_of(1, 2, 0)));
            assert_eq!(worker.packed_row(first + 2, row), Some(byte_of(0, 2, 0)));
            assert_eq!(worker.packed_row(first + 2, SELECTED + row), Some(byte_of(1, 2, 0)));
        }
    }
    assert_eq!(daemon.counter("statecopy_graphs_failed_total", ""), 0);
    assert_eq!(daemon.counter("statecopy_copies_total", "gather"), 12_000);
}

#[test]
fn a_graph_is_replayed_after_sleep_and_wake_in_other_memory_without_a_new_capture() {
    let daemon = Daemon::start();
    let mut worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    for round in 0..5 {
        armed.replay(&lane, PATIENCE).unwrap();
        assert!(worker.has_gathered(), "round {round}");
        worker.client.release_region(worker.cache_region.clone()).unwrap();
        // Woken elsewhere: whoever still used the old memory would gather other bytes.
        worker.fill(50);
        worker.cache = worker.client.allocate("cache", ROWS * PAGE).unwrap();
        worker.cache_region = worker.client.register_region(&worker.cache, Use::Cache).unwrap();
        worker.fill(0);
        worker.wake();
        worker.spoil();
    }
    armed.replay(&lane, PATIENCE).unwrap();
    assert!(worker.has_gathered());
}

#[test]
fn a_graph_whose_layers_sleep_or_cannot_wake_moves_nothing_and_says_why() {
    let daemon = Daemon::start();
    let mut worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    let (other, other_armed) = worker.graph();
    worker.spoil();
    worker.client.release_region(worker.cache_region.clone()).unwrap();
    assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(RefusalCode::RegionUnknown));
    assert_eq!(worker.packed_row(0, 0), Some(0xee), "no byte moved");
    // Memory of another signature wakes nothing.
    worker.cache_region = worker.client.register_region(&worker.cache, Use::Cache).unwrap();
    let elsewhere =
        Rebind { layer: "a".into(), region: worker.cache_region.clone(), offset_bytes: 4 };
    assert!(worker.client.rebind(&[elsewhere]).is_err());
    other.check().unwrap();
    assert_eq!(code(other_armed.replay(&other, PATIENCE)), Some(RefusalCode::RegionUnknown));
    worker.wake();
    // A failed graph stays so, and its waits go on at once.
    let refused = armed.replay(&lane, PATIENCE);
    assert_eq!(code(refused), Some(RefusalCode::RegionUnknown));
    assert_eq!(code(lane.check()), Some(RefusalCode::RegionUnknown));
    let mut lane = lane;
    let request = worker.request(1, IndexWidth::Int32);
    let refused = lane.arm(&worker.plans.a, Direction::Gather, &request);
    assert_eq!(code(refused), Some(RefusalCode::RegionUnknown));
    assert_eq!(worker.packed_row(0, 0), Some(0xee), "no byte moved");
    assert_eq!(daemon.counter("statecopy_graphs_failed_total", ""), 2);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    assert!(worker.has_gathered());
}

#[test]
fn a_graph_of_an_earlier_registration_moves_nothing() {
    let daemon = Daemon::start();
    let mut worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    let (sleeping, never_again) = worker.graph();
    worker.spoil();
    worker.plans = register(&worker.client, &worker.cache_region, ROWS);
    assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(RefusalCode::StalePlan));
    worker.client.release_layers().unwrap();
    assert_eq!(code(never_again.replay(&sleeping, PATIENCE)), Some(RefusalCode::NotSealed));
    assert_eq!(worker.packed_row(0, 0), Some(0xee));
}

#[test]
fn a_device_process_that_dies_in_any_phase_of_a_replay_delays_it_and_loses_nothing() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    for phase in 0..=armed.steps().len() {
        worker.spoil();
        for (at, each) in armed.steps().into_iter().enumerate() {
            if at == phase {
                send_signal(daemon.device_process(), Signal::KILL).unwrap();
            }
            step(&lane, each);
        }
        assert!(worker.has_gathered(), "phase {phase}");
        lane.check().unwrap();
    }
}

#[test]
fn a_copy_under_which_a_device_process_died_is_made_once_more_and_then_given_up() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    let [idle, ring, done, note] = armed.steps();
    let Step::WaitAny(word) = done else { panic!("{done:?}") };
    // What an executor leaves that died under its first copy of a ring, and under its second.
    for (left, made) in [(0, true), (4, false)] {
        worker.spoil();
        step(&lane, idle);
        let device = daemon.device_process();
        send_signal(device, Signal::STOP).unwrap();
        step(&lane, ring);
        lane.memory().0.write_words(word.offset, &[left]).unwrap();
        send_signal(device, Signal::KILL).unwrap();
        step(&lane, done);
        step(&lane, note);
        assert_eq!(worker.has_gathered(), made);
    }
    assert_eq!(code(lane.check()), Some(RefusalCode::DeviceLost));
    // The next device process finds it failed, and lets it go on.
    send_signal(daemon.device_process(), Signal::KILL).unwrap();
    assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(RefusalCode::DeviceLost));
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
}

#[test]
fn a_daemon_that_dies_in_any_phase_of_a_replay_frees_it_and_the_next_one_serves_another_graph() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = directory.path().join("run");
    for phase in 0..=4 {
        let mut daemon = DaemonOptions::default().runtime(&runtime).start();
        let worker = Worker::new(&daemon);
        let (lane, armed) = worker.graph();
        armed.replay(&lane, PATIENCE).unwrap();
        let steps = armed.steps();
        worker.spoil();
        steps[..phase].iter().for_each(|each| step(&lane, *each));
        daemon.signal(Signal::KILL);
        daemon.wait();
        if phase != 2 {
            until("the graph is failed", || lane.check().is_err());
        }
        steps[phase..].iter().for_each(|each| step(&lane, *each));
        until("the graph is failed", || lane.check().is_err());
        let failed = code(lane.check()).unwrap();
        if phase == 2 {
            // Rung, it may have been copied, or in part.
            let either = [RefusalCode::IncarnationMismatch, RefusalCode::Unavailable];
            assert!(either.contains(&failed), "{failed:?}");
        } else {
            assert_eq!(failed, RefusalCode::IncarnationMismatch, "phase {phase}");
        }
        assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(failed));
        drop(daemon);
        let _daemon = DaemonOptions::default().runtime(&runtime).start();
        let (next, armed) = worker.graph();
        armed.replay(&next, PATIENCE).unwrap();
        assert!(worker.has_gathered());
        assert_eq!(code(lane.check()), Some(failed), "the graph of the dead daemon stays failed");
        worker.client.close().unwrap();
    }
}

#[test]
fn a_ring_that_a_dying_daemon_may_have_served_is_said_to_be_unknown() {
    let directory = tempfile::tempdir().unwrap();
    let mut daemon = DaemonOptions::default().runtime(&directory.path().join("run")).start();
    let worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    send_signal(daemon.device_process(), Signal::STOP).unwrap();
    let [idle, ring, done, note] = armed.steps();
    step(&lane, idle);
    step(&lane, ring);
    daemon.signal(Signal::KILL);
    daemon.wait();
    step(&lane, done);
    step(&lane, note);
    assert_eq!(code(lane.check()), Some(RefusalCode::Unavailable));
}

#[test]
fn a_worker_that_dies_with_a_graph_leaves_nothing_behind_and_others_go_on() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let (lane, armed) = worker.graph();
    // At rest, and rung.
    for rings in ["0", "2", "1", "3"] {
        let mut other = WorkerProcess::start(&daemon.control_socket());
        assert_eq!(other.say(&format!("graph {rings}")), "rung");
        other.kill();
        armed.replay(&lane, PATIENCE).unwrap();
        until("its session is over", || daemon.inspect().sessions.len() == 1);
        armed.replay(&lane, PATIENCE).unwrap();
    }
    assert_eq!(daemon.counter("statecopy_graphs_failed_total", ""), 0);
}

#[test]
fn words_that_a_graph_never_writes_hurt_nobody_but_itself() {
    let daemon = Daemon::start();
    let (worker, neighbour) = (Worker::new(&daemon), Worker::new(&daemon));
    let (its_lane, its_armed) = neighbour.graph();
    for (bell, done) in [(2, 1), (65_535, 1), (65_536, 1), (u64::MAX, 1), (1 << 32 | 1, 1)] {
        let (lane, armed) = worker.graph();
        let [Step::WaitAny(idle), Step::Write(ring), ..] = armed.steps() else { panic!() };
        lane.memory().0.write_words(idle.offset, &[done]).unwrap();
        lane.memory().0.write_words(ring.offset, &[bell]).unwrap();
        until("a slot that is not armed frees its graph", || lane.check().is_err());
        assert_eq!(code(lane.check()), Some(RefusalCode::StalePlan), "{bell}");
        its_armed.replay(&its_lane, PATIENCE).unwrap();
    }
    // Whatever `done` holds, the copy is made, or never.
    for done in [0, 2, 3, 4, 7, u64::MAX] {
        let (lane, armed) = worker.graph();
        let [Step::WaitAny(idle), Step::Write(ring), ..] = armed.steps() else { panic!() };
        worker.spoil();
        lane.memory().0.write_words(idle.offset, &[done]).unwrap();
        lane.memory().0.write_words(ring.offset, &[1]).unwrap();
        until("the copy is made", || worker.has_gathered());
        // Scribbled, and then a device process that has nothing else to go by.
        lane.memory().0.write_words(idle.offset, &[done]).unwrap();
        send_signal(daemon.device_process(), Signal::KILL).unwrap();
        its_armed.replay(&its_lane, PATIENCE).unwrap();
    }
    its_lane.check().unwrap();
}

#[test]
fn the_pair_of_a_graph_that_is_gone_serves_the_next_one() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let at = |armed: &Armed| match armed.steps()[1] {
        Step::Write(bell) => bell.offset,
        other => panic!("{other:?}"),
    };
    let (kept, kept_armed) = worker.graph();
    let (lane, armed) = worker.graph();
    let place = at(&armed);
    // One that was failed, and rang last.
    lane.memory().0.write_words(place, &[9]).unwrap();
    until("it is failed", || lane.check().is_err());
    drop(lane);
    let next = statecopy_tests::eventually("the pair is given back", || {
        let (lane, armed) = worker.graph();
        (at(&armed) == place).then_some((lane, armed))
    });
    worker.spoil();
    next.1.replay(&next.0, PATIENCE).unwrap();
    assert!(worker.has_gathered());
    kept_armed.replay(&kept, PATIENCE).unwrap();
    assert_ne!(at(&kept_armed), place);
}

#[test]
fn a_session_has_448_graph_lanes_and_as_many_slots_as_the_daemon_allows() {
    let daemon = DaemonOptions::default().setting("limits.graph_slots_max", "3").start();
    let worker = Worker::new(&daemon);
    let (one, _armed) = worker.graph();
    let (mut other, _armed) = worker.graph();
    let request = worker.request(1, IndexWidth::Int32);
    let third = other.arm(&worker.plans.b, Direction::Scatter, &request).unwrap();
    let fourth = other.arm(&worker.plans.b, Direction::Scatter, &request).unwrap_err();
    assert_eq!(fourth.code(), Some(RefusalCode::QuotaExceeded));
    assert!(fourth.to_string().contains("limits.graph_slots_max = 3"), "{fourth}");
    third.replay(&other, PATIENCE).unwrap();
    drop(one);
    until("a slot is free", || other.arm(&worker.plans.b, Direction::Scatter, &request).is_ok());
    let lanes: Vec<GraphLane> =
        std::iter::from_fn(|| worker.client.open_graph_lane().ok()).collect();
    assert_eq!(lanes.len(), 447);
    let refused = worker.client.open_graph_lane();
    assert_eq!(code(refused), Some(RefusalCode::QuotaExceeded));
    drop(lanes);
    worker.client.open_graph_lane().unwrap();
}

#[test]
fn what_does_not_fit_is_refused_at_the_capture_and_the_graph_goes_on() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let (mut lane, armed) = worker.graph();
    let mut refused = |request: Request<'_>| {
        code(lane.arm(&worker.plans.a, Direction::Gather, &request)).unwrap()
    };
    let inline = Request::new(Indices::Int32(&[1, 2]), worker.packed_region.at(0));
    assert_eq!(refused(inline), RefusalCode::IndexType);
    let flags = worker.request(0, IndexWidth::Int32).flags(Flags::Bytes(&[1; 4]));
    assert_eq!(refused(flags), RefusalCode::IndexType);
    let at = worker.packed_region.at(INDICES_AT + 8);
    let unaligned = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
    assert_eq!(
        refused(Request::new(unaligned, worker.packed_region.at(0))),
        RefusalCode::IndexType
    );
    let at = worker.packed_region.at(INDICES_AT);
    let many = Indices::Shared { width: IndexWidth::Int32, at, selected: SELECTED + 1 };
    let many = Request::new(many, worker.packed_region.at(0));
    assert_eq!(refused(many), RefusalCode::SelectedTooLarge);
    armed.replay(&lane, PATIENCE).unwrap();
    assert!(worker.has_gathered());
}

#[test]
fn copies_over_grpc_have_no_graphs() {
    let daemon = Daemon::start();
    let options = ConnectOptions {
        wait_for: PATIENCE,
        transport: Transport::Grpc,
        ..ConnectOptions::default()
    };
    let worker = Worker::connect(&daemon, options);
    let refused = worker.client.open_graph_lane();
    assert_eq!(code(refused), Some(RefusalCode::VersionMismatch));
}

/// Processor time of a process so far, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit_once(") ").unwrap().1.split(' ').skip(11).take(2);
    fields.map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
fn an_executor_looks_at_armed_graphs_between_sleeps_and_at_nothing_once_they_are_gone() {
    // So long a spin that it would be all there is, were it done after every look.
    let daemon = DaemonOptions::default().setting("spin_us", "20000").start();
    let worker = Worker::new(&daemon);
    let graphs: Vec<_> = (0..35).map(|_| worker.graph()).collect();
    let looks = || daemon.counter("statecopy_bell_looks_total", "");
    until("it sleeps", || looks() > 0);
    let device = daemon.device_process();
    let (before, begun) = (ticks(device), Instant::now());
    let enough = looks() + 2_000;
    until("it looks again and again", || looks() > enough);
    let used = Duration::from_millis((ticks(device) - before) * 10);
    // Aimed at 5 % of a processor; ten times that is a fault.
    assert!(used < begun.elapsed() / 2, "{used:?} of {:?}", begun.elapsed());
    for (lane, armed) in &graphs {
        armed.replay(lane, PATIENCE).unwrap();
    }
    drop(graphs);
    until("it looks no more", || {
        let before = looks();
        thread::sleep(Duration::from_millis(50));
        looks() == before
    });
}
