//! Captured graphs against the real daemon: when memory moves, processes die and the daemon ends.

use rustix::process::Signal;
use statecopy_client::{Direction, Error, IndexWidth, Rebind, RefusalCode, Step, Use};
use statecopy_tests::{
    Daemon, DaemonOptions, GraphWorker, PATIENCE, WorkerProcess, replay_step, send_signal, until,
};

fn code<T>(outcome: Result<T, Error>) -> Option<RefusalCode> {
    outcome.err().and_then(|error| error.code())
}

#[test]
fn a_graph_is_replayed_after_sleep_and_wake_in_other_memory_without_a_new_capture() {
    let daemon = Daemon::start();
    let mut worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    for round in 0..5 {
        armed.replay(&lane, PATIENCE).unwrap();
        assert!(worker.has_gathered(), "round {round}");
        worker.client.release_region(worker.cache_region.clone()).unwrap();
        // Woken elsewhere: whoever still used the old memory would gather other bytes.
        worker.fill(50);
        worker.cache = worker.client.allocate("cache", worker.cache.bytes()).unwrap();
        worker.cache_region = worker.client.register_region(&worker.cache, Use::Cache).unwrap();
        worker.fill(0);
        worker.wake();
        worker.spoil(0);
    }
    armed.replay(&lane, PATIENCE).unwrap();
    assert!(worker.has_gathered());
}

#[test]
fn a_graph_whose_layers_sleep_or_cannot_wake_moves_nothing_and_says_why() {
    let daemon = Daemon::start();
    let mut worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    let (other, other_armed) = worker.graph();
    worker.spoil(0);
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
    let mut worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    let (sleeping, never_again) = worker.graph();
    worker.spoil(0);
    worker.register();
    assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(RefusalCode::StalePlan));
    worker.client.release_layers().unwrap();
    assert_eq!(code(never_again.replay(&sleeping, PATIENCE)), Some(RefusalCode::NotSealed));
    assert_eq!(worker.packed_row(0, 0), Some(0xee));
}

#[test]
fn a_device_process_that_dies_in_any_phase_of_a_replay_delays_it_and_loses_nothing() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    for phase in 0..=armed.steps().len() {
        worker.spoil(0);
        for (at, each) in armed.steps().into_iter().enumerate() {
            if at == phase {
                send_signal(daemon.device_process(), Signal::KILL).unwrap();
            }
            replay_step(&lane, each);
        }
        assert!(worker.has_gathered(), "phase {phase}");
        lane.check().unwrap();
    }
}

#[test]
fn a_copy_under_which_a_device_process_died_is_made_once_more_and_then_given_up() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    let [idle, ring, done, note] = armed.steps();
    let Step::WaitAny(word) = done else { panic!("{done:?}") };
    // What an executor leaves that died under its first copy of a ring, and under its second.
    for (left, made) in [(0, true), (4, false)] {
        worker.spoil(0);
        replay_step(&lane, idle);
        let device = daemon.device_process();
        send_signal(device, Signal::STOP).unwrap();
        replay_step(&lane, ring);
        lane.memory().0.write_words(word.offset, &[left]).unwrap();
        send_signal(device, Signal::KILL).unwrap();
        replay_step(&lane, done);
        replay_step(&lane, note);
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
        let worker = GraphWorker::new(&daemon);
        let (lane, armed) = worker.graph();
        armed.replay(&lane, PATIENCE).unwrap();
        let steps = armed.steps();
        worker.spoil(0);
        steps[..phase].iter().for_each(|each| replay_step(&lane, *each));
        daemon.signal(Signal::KILL);
        daemon.wait();
        if phase != 2 {
            until("the graph is failed", || lane.check().is_err());
        }
        steps[phase..].iter().for_each(|each| replay_step(&lane, *each));
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
    let worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    send_signal(daemon.device_process(), Signal::STOP).unwrap();
    let [idle, ring, done, note] = armed.steps();
    replay_step(&lane, idle);
    replay_step(&lane, ring);
    daemon.signal(Signal::KILL);
    daemon.wait();
    replay_step(&lane, done);
    replay_step(&lane, note);
    assert_eq!(code(lane.check()), Some(RefusalCode::Unavailable));
}

#[test]
fn a_worker_that_dies_with_a_graph_leaves_nothing_behind_and_others_go_on() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
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
fn a_daemon_that_drains_waits_for_no_graph_and_a_replay_after_its_end_moves_nothing() {
    let mut daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    armed.replay(&lane, PATIENCE).unwrap();
    worker.spoil(0);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    until("the graph is failed", || lane.check().is_err());
    let failed = code(armed.replay(&lane, PATIENCE)).unwrap();
    assert!(matches!(failed, RefusalCode::IncarnationMismatch), "{failed:?}");
    assert_eq!(worker.packed_row(0, 0), Some(0xee));
}

#[test]
fn a_client_that_is_closed_lets_its_graphs_go_on() {
    let daemon = Daemon::start();
    let worker = GraphWorker::new(&daemon);
    let (lane, armed) = worker.graph();
    let (other, _armed) = worker.graph();
    worker.spoil(0);
    worker.client.clone().close().unwrap();
    until("the graph is failed", || lane.check().is_err());
    assert_eq!(code(armed.replay(&lane, PATIENCE)), Some(RefusalCode::IncarnationMismatch));
    assert_eq!(worker.packed_row(0, 0), Some(0xee));
    drop((lane, other));
    until("nothing is left of it", || daemon.inspect().sessions.is_empty());
}
