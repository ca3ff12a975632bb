//! The life of sessions and of the daemon: who dies, and what is given back.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::{OpenRequest, event::Event};
use statecopy_proto::{DataType, Direction, PROTOCOL_NEWEST, RefusalCode};
use statecopy_tests::{
    Daemon, DaemonOptions, Footprint, Indices, Rig, Session, Shared, WorkerProcess, runs,
    send_signal, until,
};

fn layout() -> CacheLayout {
    CacheLayout::with_page_stride(DataType::Float32, [6, 2, 4, 16], 200).unwrap()
}

fn rig(daemon: &Daemon) -> Rig {
    Rig::new(&daemon.connect(), &[(layout(), 0)], 4)
}

fn gathers(rig: &mut Rig) {
    rig.copy(Direction::Gather, 0, &Indices::Int32(vec![5, 0, -1]), None).unwrap();
}

/// What both processes hold once they have served a worker that is gone.
fn baseline(daemon: &Daemon) -> [(u32, Footprint); 2] {
    drop(rig(daemon));
    until("the first worker is gone", || daemon.inspect().sessions.is_empty());
    until("its plan is gone", || daemon.inspect().devices[0].plans.is_empty());
    [daemon.supervisor(), daemon.device_process()].map(|pid| (pid, Footprint::of(pid)))
}

#[test]
fn a_worker_killed_at_any_point_gives_everything_back_and_disturbs_nobody() {
    let daemon = Daemon::start();
    let before = baseline(&daemon);
    // Idle after its registration; between descriptor and registration; before its first descriptor; while it copies.
    let points: [&[&str]; 5] =
        [&["register"], &["open", "send"], &["open"], &["register", "random 7 100000"], &[]];
    for orders in points {
        let mut other = rig(&daemon);
        let mut worker = WorkerProcess::start(&daemon.control_socket());
        for order in orders {
            worker.order(order);
            if !order.starts_with("random") {
                worker.answer();
            }
        }
        if orders.iter().any(|order| order.starts_with("random")) {
            let busy = || daemon.inspect().sessions.iter().any(|session| session.copies > 20);
            until("the worker copies", busy);
        }
        worker.kill();
        until("only the other session is left", || daemon.inspect().sessions.len() == 1);
        gathers(&mut other);
        drop(other);
        // The worker is a zombie until here: that counts as dead.
        until("no session is left", || daemon.inspect().sessions.is_empty());
        drop(worker);
        Footprint::wait_for(&before);
    }
}

#[test]
fn a_session_ends_with_its_connection_or_when_it_is_closed() {
    let daemon = Daemon::start();
    let before = baseline(&daemon);
    for close in [true, false] {
        let rig = rig(&daemon);
        if close {
            let session = rig.session.reference();
            let wire = rig.session.wire();
            let request = statecopy_proto::v1::CloseRequest { session };
            wire.ask(wire.sessions().close(request)).unwrap();
            let request = rig.request(0, &Indices::Int32(vec![0]), None);
            let refusal = rig.session.copy(Direction::Gather, request).unwrap_err();
            assert_eq!(refusal.code(), RefusalCode::SessionUnknown, "{refusal}");
        }
        drop(rig);
        until("the session is gone", || daemon.inspect().sessions.is_empty());
        Footprint::wait_for(&before);
    }
}

#[test]
fn a_stopped_worker_keeps_its_session() {
    let daemon = Daemon::start();
    let mut worker = WorkerProcess::start(&daemon.control_socket());
    worker.say("register");
    worker.signal(Signal::STOP);
    let stopped = Instant::now();
    // Far past the time to attach, and nobody counts heartbeats.
    until("some seconds pass", || stopped.elapsed() > Duration::from_secs(6));
    assert_eq!(daemon.inspect().sessions.len(), 1);
    worker.signal(Signal::CONT);
    assert_eq!(worker.say("random 1 20"), "right");
}

#[test]
fn a_forked_child_that_holds_the_socket_does_not_keep_a_dead_workers_session() {
    let daemon = Daemon::start();
    let mut worker = WorkerProcess::start(&daemon.control_socket());
    worker.say("open");
    let child: u32 = worker.say("fork").parse().unwrap();
    worker.kill();
    until("the session is gone", || daemon.inspect().sessions.is_empty());
    assert!(runs(child), "the child still holds the socket");
    send_signal(child, Signal::KILL).unwrap();
}

#[test]
fn a_session_whose_token_is_not_presented_in_time_ends() {
    let daemon = DaemonOptions::default().setting("attach_timeout_ms", "200").start();
    let wire = daemon.wire();
    let request = OpenRequest { protocol_version: PROTOCOL_NEWEST, ..OpenRequest::default() };
    let opened = wire.ask(wire.sessions().open(request)).unwrap();
    assert_eq!(opened.attach_timeout_ms, 200);
    assert_eq!(daemon.inspect().sessions[0].state, "attaching");
    until("it is gone", || daemon.inspect().sessions.is_empty());
    let connection = Session::dial(opened.descriptor_socket.as_ref());
    let token = statecopy_proto::descriptor_socket::Token::parse(&opened.token).unwrap();
    let attach = statecopy_proto::descriptor_socket::WorkerRecord::Attach { token };
    let answer = Session::exchange(&connection, &attach.encode(), &[]);
    assert!(
        !matches!(answer, Some(statecopy_proto::descriptor_socket::DaemonRecord::Attached)),
        "{answer:?}"
    );
}

#[test]
fn sigterm_with_a_hundred_requests_in_flight_answers_them_all_and_leaves_nothing() {
    let mut daemon = Daemon::start();
    let mut rig = rig(&daemon);
    let device = daemon.device_process();
    let indices = Indices::Int32(vec![3, 1]);
    let request = rig.request(0, &indices, None);
    let wire = rig.session.wire().clone();
    let session = rig.session.reference();
    let mut events =
        wire.ask(wire.sessions().events(statecopy_proto::v1::EventsRequest { session })).unwrap();
    send_signal(device, Signal::STOP).unwrap();
    let copies: Vec<_> = (0..100)
        .map(|_| {
            let (wire, request) = (wire.clone(), request.clone());
            thread::spawn(move || wire.ask(wire.copies().gather(request)))
        })
        .collect();
    until("all are in flight", || daemon.metric("statecopy_requests_pending") == 100.0);
    daemon.signal(Signal::TERM);
    until("it drains", || daemon.inspect().draining);
    assert_eq!(daemon.get("/readyz").status, 503);
    assert_eq!(daemon.get("/healthz").status, 200);
    let event = rig.session.next(&mut events).unwrap().unwrap();
    assert!(matches!(event.event, Some(Event::Draining(_))), "{event:?}");
    send_signal(device, Signal::CONT).unwrap();
    for copy in copies {
        copy.join().unwrap().unwrap();
    }
    rig.expect(Direction::Gather, 0..1, &indices, None);
    rig.check("after 100 gathers");
    assert!(daemon.wait().success());
    assert_eq!(daemon.runtime_entries(), [""; 0], "nothing is left");
    assert!(!runs(device));
}

#[test]
fn a_drain_that_cannot_finish_says_so_by_its_exit_code() {
    let mut daemon = DaemonOptions::default().setting("drain_grace_ms", "100").start();
    let rig = rig(&daemon);
    let request = rig.request(0, &Indices::Int32(vec![3]), None);
    let wire = rig.session.wire().clone();
    send_signal(daemon.device_process(), Signal::STOP).unwrap();
    let copy = thread::spawn(move || wire.ask(wire.copies().gather(request)));
    until("it is in flight", || daemon.metric("statecopy_requests_pending") == 1.0);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(1));
    copy.join().unwrap().unwrap_err();
}

#[test]
fn a_second_sigterm_ends_the_daemon_at_once() {
    // Nothing else would end it: the copy never finishes, and the grace is long.
    let mut daemon = DaemonOptions::default().setting("drain_grace_ms", "600000").start();
    let rig = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let (wire, request) =
        (rig.session.wire().clone(), rig.request(0, &Indices::Int32(vec![3]), None));
    let copy = thread::spawn(move || wire.ask(wire.copies().gather(request)));
    until("it is in flight", || daemon.metric("statecopy_requests_pending") == 1.0);
    daemon.signal(Signal::TERM);
    until("it drains", || daemon.inspect().draining);
    assert_eq!(daemon.try_wait(), None);
    daemon.signal(Signal::TERM);
    daemon.wait();
    assert!(copy.join().unwrap().is_err());
    until("the device process ends too", || !runs(device));
}

#[test]
fn drain_by_a_call_is_sigterm() {
    let mut daemon = Daemon::start();
    let mut rig = rig(&daemon);
    gathers(&mut rig);
    let wire = rig.session.wire().clone();
    let reply = wire.ask(wire.admin().drain(statecopy_proto::v1::DrainRequest {})).unwrap();
    assert!(reply.grace_ms > 0);
    assert!(daemon.wait().success());
    let log = daemon.log();
    let (_, end) = log.split_once("told to end").expect("the log tells of the drain");
    assert!(!end.contains("WARN") && !end.contains("ERROR"), "nobody is woken for a drain: {log}");
    assert_eq!(daemon.runtime_entries(), [""; 0]);
}

#[test]
fn a_start_that_fails_says_why_once_and_leaves_nothing() {
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = elsewhere.local_addr().unwrap().to_string();
    let driver = ("STATECOPY_CUDA__DRIVER_LIBRARY", "/nowhere/libcuda.so.1");
    for (variables, code, reason) in [
        (&[("STATECOPY_DEVICES", "cuda:0"), driver][..], 69, driver.1),
        (&[("STATECOPY_DEVICES", "host,cuda:0"), driver], 69, driver.1),
        (&[("STATECOPY_HTTP_ADDRESS", taken.as_str())], 71, taken.as_str()),
        (&[("STATECOPY_SLOTS", "3")], 78, "slots"),
    ] {
        let options = variables
            .iter()
            .fold(DaemonOptions::default(), |options, (name, value)| options.variable(name, value));
        let mut daemon = options.spawn();
        assert_eq!(daemon.wait().code(), Some(code), "{variables:?}: {}", daemon.log());
        let log = daemon.log();
        let telling = log.lines().filter(|line| line.contains(reason)).count();
        assert_eq!((telling, log.matches("statecopyd: ").count()), (1, 1), "{log}");
        if daemon.runtime().exists() {
            assert_eq!(daemon.runtime_entries(), [""; 0], "{variables:?}");
        }
    }
}

#[test]
fn a_start_that_is_told_to_end_leaves_nothing() {
    for _ in 0..20 {
        let mut daemon = DaemonOptions::default().spawn();
        let lock = daemon.runtime().join("statecopyd.lock");
        until("it starts", || lock.exists());
        daemon.signal(Signal::TERM);
        assert!(daemon.wait().success());
        assert_eq!(daemon.runtime_entries(), [""; 0], "{}", daemon.log());
    }
}

#[test]
fn pending_descriptors_are_bounded_and_given_back() {
    let daemon = DaemonOptions::default().setting("limits.descriptors_pending_max", "70").start();
    let before = baseline(&daemon);
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 4096]);
    session.send(&[memory.descriptor(); 64]);
    let tag = session.tag();
    let record = statecopy_proto::descriptor_socket::WorkerRecord::Descriptors { tag, count: 7 };
    let answer = session.say(&record.encode(), &[memory.descriptor(); 7]);
    let Some(statecopy_proto::descriptor_socket::DaemonRecord::Refused { code, .. }) = answer
    else {
        panic!("{answer:?}");
    };
    assert_eq!(code, RefusalCode::QuotaExceeded);
    session.send(&[memory.descriptor(); 6]);
    drop(session);
    Footprint::wait_for(&before);
}
