//! Captured graphs against the real daemon: what each replay copies, and what is no graph.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_client::{
    Armed, ConnectOptions, Direction, Error, Flags, GraphLane, IndexWidth, Indices, RefusalCode,
    Request, Step, Transport,
};
use statecopy_tests::{
    Daemon, DaemonOptions, GraphWorker, PATIENCE, eventually, send_signal, until,
};

fn code<T>(outcome: Result<T, Error>) -> Option<RefusalCode> {
    outcome.err().and_then(|error| error.code())
}

#[test]
fn each_replay_copies_what_indices_and_flags_say_at_the_time() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
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
        worker.flag(0, flags);
        worker.fill(u8::try_from(round % 80).unwrap());
        gather.replay(&lane, PATIENCE).unwrap();
        for at in 0..4_usize {
            let row = u64::try_from(rows[at])
                .ok()
                .filter(|row| *row < GraphWorker::ROWS && flags[at] != 0);
            let byte = row
                .map_or(0, |row| GraphWorker::byte_of(0, row, u8::try_from(round % 80).unwrap()));
            assert_eq!(worker.packed_row(0, at as u64), Some(byte), "round {round}, {rows:?}");
        }
        let to = i64::try_from(round).unwrap() % 6;
        worker.select(1, IndexWidth::Int32, [to, -1, i64::from(i32::MAX), i64::from(i32::MIN)]);
        let byte = u8::try_from(round % 251).unwrap();
        worker.fill_packed_row(1, 0, byte);
        scatter.replay(&lane, PATIENCE).unwrap();
        assert_eq!(worker.cache_row(1, u64::try_from(to).unwrap()), Some(byte), "round {round}");
    }
    lane.check().unwrap();
}

#[test]
fn one_graph_holds_slots_of_layers_and_of_a_set_and_two_graphs_are_replayed_at_once() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
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
        for row in 0..GraphWorker::SELECTED {
            assert_eq!(worker.packed_row(first, row), Some(GraphWorker::byte_of(0, 2, 0)));
            assert_eq!(worker.packed_row(first + 1, row), Some(GraphWorker::byte_of(1, 2, 0)));
            assert_eq!(worker.packed_row(first + 2, row), Some(GraphWorker::byte_of(0, 2, 0)));
            assert_eq!(
                worker.packed_row(first + 2, GraphWorker::SELECTED + row),
                Some(GraphWorker::byte_of(1, 2, 0))
            );
        }
    }
    assert_eq!(daemon.counter("statecopy_graphs_failed_total", ""), 0);
    assert_eq!(daemon.counter("statecopy_copies_total", "gather"), 12_000);
}

#[test]
fn words_that_a_graph_never_writes_hurt_nobody_but_itself() {
    let daemon = Daemon::start();
    let (worker, neighbour) = (GraphWorker::new(&daemon), GraphWorker::new(&daemon));
    let (its_lane, its_armed) = neighbour.graph();
    for (bell, done) in [(2, 1), (65_535, 1), (65_536, 1), (u64::MAX, 1), (1 << 32 | 1, 1)] {
        let (lane, armed) = worker.graph();
        let [Step::WaitAny(idle), Step::Write(ring), ..] = armed.steps() else { panic!() };
        lane.memory().0.write_words(idle.offset, &[done]).unwrap();
        lane.memory().0.write_words(ring.offset, &[bell]).unwrap();
        until("a slot that is not armed frees its graph", || lane.check().is_err());
        assert_eq!(code(lane.check()), Some(RefusalCode::StalePlan), "{bell}");
        // Another session comes, and what was prepared for is prepared for again, with that graph still there.
        drop(GraphWorker::new(&daemon));
        its_armed.replay(&its_lane, PATIENCE).unwrap();
    }
    // Whatever `done` holds, the copy is made, or never.
    for done in [0, 2, 3, 4, 7, u64::MAX] {
        let (lane, armed) = worker.graph();
        let [Step::WaitAny(idle), Step::Write(ring), ..] = armed.steps() else { panic!() };
        worker.spoil(0);
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
    let worker = GraphWorker::new(&daemon);
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
    let next = eventually("the pair is given back", || {
        let (lane, armed) = worker.graph();
        (at(&armed) == place).then_some((lane, armed))
    });
    worker.spoil(0);
    next.1.replay(&next.0, PATIENCE).unwrap();
    assert!(worker.has_gathered());
    kept_armed.replay(&kept, PATIENCE).unwrap();
    assert_ne!(at(&kept_armed), place);
}

#[test]
fn a_session_has_448_graph_lanes_and_as_many_slots_as_the_daemon_allows() {
    let daemon = DaemonOptions::default().setting("limits.graph_slots_max", "3").start();
    let worker = GraphWorker::new(&daemon);
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
    let worker = GraphWorker::new(&daemon);
    let (mut lane, armed) = worker.graph();
    let mut refused = |request: Request<'_>| {
        code(lane.arm(&worker.plans.a, Direction::Gather, &request)).unwrap()
    };
    let inline = Request::new(Indices::Int32(&[1, 2]), worker.packed_region.at(0));
    assert_eq!(refused(inline), RefusalCode::IndexType);
    let flags = worker.request(0, IndexWidth::Int32).flags(Flags::Bytes(&[1; 4]));
    assert_eq!(refused(flags), RefusalCode::IndexType);
    let mut at = worker.indices_at(0);
    at.offset += 8;
    let unaligned = Indices::Shared { width: IndexWidth::Int32, at, selected: 1 };
    assert_eq!(
        refused(Request::new(unaligned, worker.packed_region.at(0))),
        RefusalCode::IndexType
    );
    let (at, selected) = (worker.indices_at(0), GraphWorker::SELECTED + 1);
    let many = Indices::Shared { width: IndexWidth::Int32, at, selected };
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
    let worker = GraphWorker::connect(&daemon, options);
    let refused = worker.client.open_graph_lane();
    assert_eq!(code(refused), Some(RefusalCode::VersionMismatch));
}

#[test]
fn an_executor_looks_at_armed_graphs_between_sleeps_and_at_nothing_once_they_are_gone() {
    // So long a spin that it would be all there is, were it done after every look.
    let daemon = DaemonOptions::default().setting("spin_us", "20000").start();
    let worker = GraphWorker::new(&daemon);
    let graphs: Vec<_> = (0..35).map(|_| worker.graph()).collect();
    daemon.expect_sleeps_between_looks();
    for (lane, armed) in &graphs {
        armed.replay(lane, PATIENCE).unwrap();
    }
    drop(graphs);
    until("it looks no more", || {
        let before = daemon.bell_looks();
        thread::sleep(Duration::from_millis(50));
        daemon.bell_looks() == before
    });
}

#[test]
fn a_graph_is_let_go_at_once_and_disarmed_once_the_daemon_answers() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
    let graphs = [worker.graph(), worker.graph(), worker.graph()];
    assert!((daemon.metric("statecopy_graph_slots") - 3.0).abs() < 0.1);
    daemon.signal(Signal::STOP);
    let begun = Instant::now();
    drop(graphs);
    assert!(begun.elapsed() < Duration::from_secs(1), "it waited");
    daemon.signal(Signal::CONT);
    until("they are disarmed", || daemon.metric("statecopy_graph_slots") < 0.1);
}
