//! Recovery: the device process dies and comes back; the daemon dies and the next one starts.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::os::fd::AsFd;
use std::thread;

use rustix::process::Signal;
use statecopy_descriptors::SealedMemory;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::event::Event;
use statecopy_proto::v1::{CopyReply, CopyRequest, EventsRequest, RegionSlice};
use statecopy_proto::{DataType, Direction, RefusalCode};
use statecopy_tests::{
    Daemon, DaemonOptions, Indices, Rig, Session, Wire, eventually, layer_spec, refusal, runs,
    send_signal, until,
};
use tonic::{Code, Status};

fn layout(dtype: DataType) -> CacheLayout {
    CacheLayout::with_page_stride(dtype, [6, 2, 4, 16], 200).unwrap()
}

fn rig(daemon: &Daemon) -> Rig {
    Rig::new(
        &daemon.connect(),
        &[(layout(DataType::Float32), 0), (layout(DataType::Float32), 1 << 16)],
        4,
    )
}

/// Both directions, one layer and all.
fn serves(rig: &mut Rig) {
    for direction in Direction::ALL {
        rig.compute(4);
        rig.copy(direction, 1, &Indices::Int64(vec![5, 0, -1]), None).unwrap();
        rig.copy_all(direction, &Indices::Int32(vec![2, 9, 3]), None).unwrap();
    }
}

/// Kills the device process, and waits until another one serves. Gives its process id.
fn kill_device(daemon: &Daemon) -> u32 {
    let old = daemon.device_process();
    send_signal(old, Signal::KILL).unwrap();
    eventually("another device process serves", || {
        let device = daemon.inspect().devices[0].clone();
        (device.device_process_pid != old && device.ready).then_some(device.device_process_pid)
    })
}

#[test]
fn a_killed_device_process_is_started_again_and_the_bindings_come_back() {
    let daemon = Daemon::start();
    let (mut one, mut other) = (rig(&daemon), rig(&daemon));
    let mut fallback = Rig::new(&daemon.connect(), &[(layout(DataType::Float16), 32)], 4);
    serves(&mut one);
    let wire = one.session.wire().clone();
    let session = one.session.reference();
    let mut events = wire.ask(wire.sessions().events(EventsRequest { session })).unwrap();
    let plans = |daemon: &Daemon| {
        let device = daemon.inspect().devices[0].clone();
        let mut plans: Vec<_> =
            device.plans.iter().map(|plan| (plan.signature, plan.plan, plan.bindings)).collect();
        plans.sort_unstable();
        plans
    };
    let before = plans(&daemon);
    for restarts in 1..=3 {
        let supervisor = daemon.supervisor();
        let pid = kill_device(&daemon);
        // Not one call to register anything again.
        serves(&mut one);
        serves(&mut other);
        fallback.copy(Direction::Gather, 0, &Indices::Int32(vec![1, -1]), None).unwrap();
        let event = one.session.next(&mut events).unwrap().unwrap();
        let Some(Event::DeviceRestarted(event)) = event.event else { panic!("{event:?}") };
        assert_eq!((event.device_process_pid, event.restarts), (pid, restarts));
        assert_eq!(daemon.supervisor(), supervisor);
        assert_eq!(daemon.inspect().devices[0].restarts, restarts);
        assert_eq!(plans(&daemon), before);
    }
}

#[test]
fn copies_that_wait_while_the_device_process_dies_are_answered_once_and_right() {
    let daemon = Daemon::start();
    let mut rig = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let indices = Indices::Int32(vec![4, -1, 2]);
    let copies: Vec<_> =
        (0..8).map(|_| submit(rig.session.wire(), rig.request(0, &indices, None))).collect();
    until("all are in flight", || daemon.metric("statecopy_requests_pending") == 8.0);
    kill_device(&daemon);
    for copy in copies {
        copy.join().unwrap().unwrap();
    }
    rig.expect(Direction::Gather, 0..1, &indices, None);
    rig.check("after copies that a restart interrupted");
    serves(&mut rig);
}

type Answer = Result<CopyReply, Status>;

fn submit(wire: &Wire, request: CopyRequest) -> thread::JoinHandle<Answer> {
    let wire = wire.clone();
    thread::spawn(move || wire.ask(wire.copies().gather(request)))
}

/// A session with one layer of two rows of 4 MiB, and a request that gathers 128 of them into untouched memory.
fn large_gather(daemon: &Daemon) -> (Session, CopyRequest) {
    let (row, rows) = (4 << 20, 128);
    let layout = CacheLayout::with_page_stride(DataType::UInt8, [2, 1, 1, row], row).unwrap();
    let mut session = Session::open(&daemon.connect());
    let mut memory = |bytes| {
        let memory = SealedMemory::create("large", bytes).unwrap();
        session.offer(memory.as_fd(), bytes).unwrap()
    };
    let (cache, packed) = (memory(2 * row), memory(rows * row));
    let layer = layer_spec(0, &layout.place(0, 2 * row).unwrap(), cache, rows);
    let published = session.register_layers(vec![layer], Vec::new()).unwrap();
    let request = CopyRequest {
        session: session.reference(),
        binding_id: published.bindings[0].binding_id,
        signature: published.bindings[0].signature,
        selected: rows,
        indices: Some(Indices::Int32([0, 1].repeat(64)).to_wire()),
        packed: Some(RegionSlice { region_id: packed, offset_bytes: 0 }),
        packed_dtype: statecopy_proto::v1::DataType::Uint8.into(),
        packed_bytes: rows * row,
        ..CopyRequest::default()
    };
    (session, request)
}

#[test]
fn a_copy_under_which_the_device_process_dies_twice_is_lost_and_the_next_is_served() {
    let daemon = Daemon::start();
    let mut other = rig(&daemon);
    let (session, request) = large_gather(&daemon);
    // It may finish before the second blow; then it is asked for again. Fewer deaths than end the daemon.
    let lost = (0..4).find_map(|_| {
        let copy = submit(session.wire(), request.clone());
        until("it is under way", || daemon.metric("statecopy_requests_pending") == 1.0);
        while !copy.is_finished() {
            kill_device(&daemon);
        }
        copy.join().unwrap().err()
    });
    let refusal = refusal(&lost.expect("two deaths under one copy"));
    assert_eq!(refusal.code(), RefusalCode::DeviceLost, "{refusal}");
    serves(&mut other);
    session.copy(Direction::Gather, request).unwrap();
}

#[test]
fn readiness_is_off_while_no_device_process_serves() {
    let daemon = Daemon::start();
    assert_eq!(daemon.get("/readyz").status, 200);
    let device = daemon.device_process();
    send_signal(device, Signal::KILL).unwrap();
    until("it is not ready", || {
        daemon.get("/readyz").status == 503 || daemon.inspect().devices[0].restarts == 1
    });
    assert_eq!(daemon.get("/healthz").status, 200);
    until("it is ready again", || daemon.get("/readyz").status == 200);
}

#[test]
fn a_device_process_that_cannot_live_ends_the_daemon() {
    let mut daemon = Daemon::start();
    let mut killed = 0;
    until("the daemon gives up", || {
        if let Some(status) = daemon.try_wait() {
            assert!(!status.success());
            return true;
        }
        if let Ok(reply) = daemon.wire().inspect() {
            let pid = reply.devices[0].device_process_pid;
            if pid != 0 && reply.devices[0].ready {
                killed += usize::from(send_signal(pid, Signal::KILL).is_ok());
            }
        }
        false
    });
    assert!((1..=10).contains(&killed), "{killed}");
}

#[test]
fn the_device_process_ends_with_a_killed_supervisor() {
    let mut daemon = Daemon::start();
    let rig = rig(&daemon);
    let device = daemon.device_process();
    daemon.signal(Signal::KILL);
    daemon.wait();
    until("the device process ends", || !runs(device));
    drop(rig);
}

#[test]
fn callers_of_a_killed_daemon_hear_of_it_and_register_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = folder.path().join("run");
    let mut daemon = DaemonOptions::default().runtime(&runtime).start();
    let old = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let copy = submit(old.session.wire(), old.request(0, &Indices::Int32(vec![1]), None));
    until("it is in flight", || daemon.metric("statecopy_requests_pending") == 1.0);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let status = copy.join().unwrap().unwrap_err();
    assert!(matches!(status.code(), Code::Unavailable | Code::Unknown), "{status}");
    // Even a stopped process ends when its parent is killed.
    until("the device process ends", || !runs(device));

    let next = DaemonOptions::default().runtime(&runtime).start();
    let reply = next.inspect();
    assert_ne!(reply.incarnation, old.session.opened.incarnation);
    let wire = next.connect();
    let request = old.request(0, &Indices::Int32(vec![1]), None);
    let status = wire.ask(wire.copies().gather(request)).unwrap_err();
    assert_eq!(refusal(&status).code(), RefusalCode::IncarnationMismatch);
    old.check("which no daemon holds any more");
    let mut new = rig(&next);
    serves(&mut new);
}

#[test]
fn signals_that_reach_the_device_process_too_are_the_supervisors_to_answer() {
    let daemon = Daemon::start();
    let mut rig = rig(&daemon);
    let device = daemon.device_process();
    // A service manager and a terminal signal every process of the daemon.
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        send_signal(device, signal).unwrap();
        serves(&mut rig);
    }
    assert_eq!(daemon.device_process(), device, "it is the same one");
}
