//! Another life of the daemon: what the client does by itself, and what it leaves to its caller.

use std::time::{Duration, Instant};

use statecopy_client::{ConnectOptions, Error, Leaves, Rebind, RefusalCode, Use, blocking};

use crate::fake::{Fake, Script};
use crate::{PAGE, Worker, directory, options, pair, registration};

/// Everything that a session is made of was told to the daemon once more.
fn assert_registered_again(daemon: &Fake, times: usize) {
    let seen = daemon.seen();
    assert_eq!(seen.count("open"), times, "{:?}", seen.calls);
    assert_eq!(seen.count("register_region"), 2 * times, "{:?}", seen.calls);
    assert_eq!(seen.count("register_layers"), times, "{:?}", seen.calls);
}

#[test]
fn another_incarnation_gets_everything_again_and_the_refused_copy_once_more() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let plan = worker.bindings.layer("a").unwrap();
    plan.gather(worker.request()).unwrap();
    daemon.seen().be_born_again();
    plan.gather(worker.request()).unwrap();
    assert_registered_again(&daemon, 2);
    let seen = daemon.seen();
    let [before, after] = &seen.copies[..] else { panic!("{:?}", seen.copies) };
    assert_ne!(before.binding_id, after.binding_id);
    assert_ne!(before.packed.unwrap().region_id, after.packed.unwrap().region_id);
    assert_eq!(after.session.as_ref().unwrap().incarnation, [2; 16]);
}

#[test]
fn a_forgotten_session_is_opened_again() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    daemon.seen().forget_sessions();
    worker.bindings.set("both").unwrap().scatter(worker.request()).unwrap();
    assert_registered_again(&daemon, 2);
    daemon.wait_until("the old connection ends", |seen| seen.attached == 1);
}

#[test]
fn a_daemon_that_died_while_idle_is_noticed_before_the_next_copy() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    drop(daemon);
    let next = Fake::start(directory.path(), 2);
    worker.bindings.layer("b").unwrap().gather(worker.request()).unwrap();
    assert_registered_again(&next, 1);
    assert_eq!(next.seen().count("gather"), 1);
}

#[test]
fn a_call_waits_for_the_next_daemon_until_its_deadline() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    drop(daemon);
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| worker.bindings.layer("a").unwrap().gather(worker.request()));
        let next = Fake::start(directory.path(), 2);
        copy.join().unwrap().unwrap();
        assert_registered_again(&next, 1);
    });
    let request = worker.request().deadline(Duration::from_millis(50));
    let started = Instant::now();
    // That daemon is gone as well: nothing was sent to any.
    let error = worker.bindings.layer("a").unwrap().gather(request).unwrap_err();
    assert_eq!(error.leaves(), Leaves::NothingMoved, "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "the slack is for copies that were sent");
}

#[test]
fn a_client_that_looks_for_an_absent_daemon_once_does_not_wait_for_it() {
    let directory = directory();
    let daemon = Fake::start(directory.path(), 1);
    let once = ConnectOptions { reconnect_for: Duration::ZERO, ..options() };
    let worker = Worker::start(&daemon, once);
    drop(daemon);
    let started = Instant::now();
    let error = worker.bindings.layer("a").unwrap().gather(worker.request()).unwrap_err();
    let Error::Unavailable { leaves: Leaves::NothingMoved, .. } = error else {
        panic!("{error:?}");
    };
    assert!(started.elapsed() < Duration::from_secs(5), "it waited for a daemon");
    assert!(!worker.client.has_stray_copies(), "nothing was ever asked of the daemon that died");
    let next = Fake::start(directory.path(), 2);
    worker.bindings.layer("a").unwrap().gather(worker.request()).unwrap();
    assert_registered_again(&next, 1);
}

#[test]
fn a_copy_without_an_answer_is_astray_until_its_executor_is_known_dead() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let plan = worker.bindings.layer("a").unwrap();
    plan.scatter(worker.request()).unwrap();
    assert!(!worker.client.has_stray_copies(), "it was answered");
    daemon.seen().scripts.push_back(Script::Hang);
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| plan.scatter(worker.request()));
        daemon.wait_until("the copy arrives", |seen| seen.count("scatter") == 2);
        drop(daemon);
        let error = copy.join().unwrap().unwrap_err();
        assert_eq!(error.leaves(), Leaves::Unknown, "{error:?}");
    });
    let next = Fake::start(directory.path(), 2);
    plan.gather(worker.request()).unwrap();
    assert_registered_again(&next, 1);
    // The first one told of no device process.
    assert!(worker.client.has_stray_copies());
}

#[test]
fn a_copy_with_an_unknown_outcome_is_repeated_only_if_the_caller_says_so() {
    for repeat in [false, true] {
        let directory = directory();
        let (daemon, worker) = pair(directory.path());
        daemon.seen().scripts.push_back(Script::Hang);
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| {
                let request = worker.request();
                let request = if repeat { request.repeat_unknown() } else { request };
                worker.bindings.layer("a").unwrap().scatter(request)
            });
            daemon.wait_until("the copy arrives", |seen| seen.count("scatter") == 1);
            drop(daemon);
            let next = Fake::start(directory.path(), 2);
            match copy.join().unwrap() {
                Ok(moved) => {
                    assert!(repeat);
                    assert_eq!(moved.copied, 3);
                    assert_registered_again(&next, 1);
                }
                Err(error) => {
                    assert!(!repeat, "{error:?}");
                    assert!(matches!(error, Error::Unavailable { call: "scatter", .. }), "{error}");
                    assert_eq!(error.leaves(), Leaves::Unknown);
                    assert_eq!(next.seen().count("scatter"), 0);
                    // The next one goes on by itself.
                    worker.bindings.layer("a").unwrap().scatter(worker.request()).unwrap();
                    assert_registered_again(&next, 1);
                }
            }
        });
    }
}

#[test]
fn an_unknown_outcome_stays_unknown_when_the_repetition_finds_no_daemon_or_is_refused() {
    for refused in [false, true] {
        let directory = directory();
        let (daemon, worker) = pair(directory.path());
        daemon.seen().scripts.push_back(Script::Hang);
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| {
                let wait = Duration::from_millis(if refused { 10_000 } else { 300 });
                let request = worker.request().repeat_unknown().deadline(wait);
                worker.bindings.layer("a").unwrap().scatter(request)
            });
            daemon.wait_until("the copy arrives", |seen| seen.count("scatter") == 1);
            drop(daemon);
            let next = refused.then(|| {
                Fake::start_told(directory.path(), 2, |seen| {
                    seen.scripts.push_back(Script::Refuse(RefusalCode::Overloaded));
                })
            });
            let error = copy.join().unwrap().unwrap_err();
            assert_eq!(error.leaves(), Leaves::Unknown, "{error:?}");
            assert_eq!(error.code(), Some(RefusalCode::Unavailable));
            drop(next);
        });
    }
}

#[test]
fn a_plan_does_not_outlive_a_newer_registration() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let old = worker.bindings.layer("a").unwrap();
    let new = worker.client.register(&registration(&worker.cache), |_| {}).unwrap();
    daemon.seen().be_born_again();
    new.layer("a").unwrap().gather(worker.request()).unwrap();
    let error = old.gather(worker.request()).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::StalePlan));
    assert_eq!(daemon.seen().count("gather"), 2, "the refused one and its repetition");
}

#[test]
fn what_was_released_or_moved_is_registered_again_as_it_is_now() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let memory = worker.client.allocate("next cache", 8 * PAGE).unwrap();
    let next = worker.client.register_region(&memory, Use::Cache).unwrap();
    let moves = ["a", "b"].map(|layer| Rebind {
        layer: layer.to_owned(),
        region: next.clone(),
        offset_bytes: if layer == "a" { 0 } else { 1024 },
    });
    worker.client.rebind(&moves).unwrap();
    worker.client.release_region(worker.cache.clone()).unwrap();
    daemon.seen().be_born_again();
    worker.bindings.layer("b").unwrap().gather(worker.request()).unwrap();
    assert_eq!(daemon.seen().count("register_region"), 3 + 2);

    worker.client.release_layers().unwrap();
    daemon.seen().be_born_again();
    let error = worker.bindings.layer("b").unwrap().gather(worker.request()).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::StalePlan));
    assert_eq!(daemon.seen().count("register_layers"), 2);
}

#[test]
fn a_client_that_may_not_register_again_hands_the_refusal_to_its_caller() {
    let directory = directory();
    let daemon = Fake::start(directory.path(), 1);
    let worker = Worker::start(&daemon, ConnectOptions { reregister: false, ..options() });
    daemon.seen().be_born_again();
    let plan = worker.bindings.layer("a").unwrap();
    let error = plan.gather(worker.request()).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::IncarnationMismatch));
    let error = plan.gather(worker.request()).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert!(why.contains("the daemon had said: INCARNATION_MISMATCH"), "{why}");
    assert_eq!(daemon.seen().count("open"), 1);
}

#[test]
fn connecting_waits_for_a_daemon_that_starts_and_no_longer_than_it_was_told() {
    let directory = directory();
    std::thread::scope(|scope| {
        let address = statecopy_client::Address::in_directory(directory.path()).unwrap();
        let client = scope.spawn(|| blocking::Client::connect(address, options()));
        let daemon = Fake::start(directory.path(), 1);
        client.join().unwrap().unwrap();
        drop(daemon);
    });
    let address = statecopy_client::Address::in_directory(directory.path()).unwrap();
    let at_once = ConnectOptions { wait_for: Duration::ZERO, ..options() };
    let started = Instant::now();
    let error = blocking::Client::connect(address, at_once).unwrap_err();
    let Error::Unavailable { call: "connect", leaves: Leaves::NothingMoved, .. } = error else {
        panic!("{error:?}");
    };
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(error.remedy().contains("statecopyd"), "{}", error.remedy());
}
