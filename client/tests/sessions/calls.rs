//! One life of the daemon: what is sent, and what an answer means.

use std::time::{Duration, Instant};

use statecopy_client::{
    ArgumentError, ConnectOptions, Direction, Error, Event, Flags, IndexWidth, Indices, Leaves,
    PlanKind, PlannedCopy, Progress, ProtocolError, Rebind, RefusalCode, Request, Stage, Use,
    blocking,
};
use statecopy_proto::PROTOCOL_NEWEST;

use crate::fake::{Fake, Script};
use crate::{PAGE, PAYLOAD, Worker, directory, layer, options, pair, registration};

#[test]
fn a_copy_carries_what_the_plan_and_the_caller_know() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let plan = worker.bindings.layer("b").unwrap();
    let request = worker
        .request()
        .flags(Flags::Bools(&[true, false, true]))
        .deadline(Duration::from_secs(3))
        .lane(7);
    assert_eq!(plan.gather(request).unwrap().copied, 3);
    let both = worker.bindings.set("both").unwrap();
    let shared =
        Indices::Shared { width: IndexWidth::Int64, at: worker.packed.at(1024), selected: 2 };
    both.scatter(Request::new(shared, worker.packed.at(0))).unwrap();

    let seen = daemon.seen();
    let [gather, scatter] = &seen.copies[..] else { panic!("{:?}", seen.copies) };
    assert_eq!(gather.signature, plan.as_async().signature().0);
    assert_eq!((gather.selected, gather.lane), (3, 7));
    assert_eq!(gather.packed_bytes, 3 * PAYLOAD * 4);
    assert_eq!(gather.packed.unwrap().offset_bytes, 64);
    assert!((1..=3000).contains(&gather.deadline_ms), "{}", gather.deadline_ms);
    let flags = statecopy_client::v1::copy_request::Flags::InlineFlags(vec![1, 0, 1]);
    assert_eq!(gather.flags, Some(flags));
    assert_eq!(scatter.packed_bytes, 2 * 2 * PAYLOAD * 4);
    assert_ne!(scatter.binding_id, gather.binding_id);
    let unlimited: Vec<&String> =
        seen.calls.iter().filter(|call| !seen.timeouts.contains(*call)).collect();
    assert!(unlimited.is_empty(), "calls without a deadline: {unlimited:?}");
    assert_eq!(plan.as_async().kind(), Some(PlanKind::Fused));
    assert_eq!(seen.labels, ["rank 0"]);
}

#[test]
fn progress_is_reported_in_order() {
    let directory = directory();
    let (_daemon, worker) = pair(directory.path());
    let mut told = Vec::new();
    worker.client.register(&registration(&worker.cache), |progress| told.push(progress)).unwrap();
    let at = |stage| Progress { stage, layers_done: 2, layers_total: 2 };
    assert_eq!(told, [at(Stage::Preparing), at(Stage::Sealing)]);
}

#[test]
fn of_many_copies_each_is_answered_by_itself() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    daemon.seen().scripts.extend([Script::Hang, Script::Refuse(RefusalCode::Overlap)]);
    let gone = worker.client.allocate("gone", PAGE).unwrap();
    let gone = worker.client.register_region(&gone, Use::Packed).unwrap();
    worker.client.release_region(gone.clone()).unwrap();
    let plan = worker.bindings.layer("a").unwrap().as_async();
    let copy = |request| PlannedCopy { plan, direction: Direction::Gather, request };
    let nowhere = Request::new(Indices::Int64(&[0]), gone.at(0));
    let copies =
        [copy(worker.request()), copy(nowhere), copy(worker.request()), copy(worker.request())];
    let answers = worker.client.copy_many(&copies).unwrap();
    let codes: Vec<Option<RefusalCode>> =
        answers.iter().map(|answer| answer.as_ref().err().and_then(Error::code)).collect();
    let refused = [None, Some(RefusalCode::RegionUnknown), Some(RefusalCode::Overlap), None];
    assert_eq!(codes, refused);
}

#[test]
fn a_copy_without_an_answer_ends_at_its_deadline_with_an_unknown_outcome() {
    let directory = directory();
    let daemon = Fake::start(directory.path(), 1);
    let slack = Duration::from_millis(30);
    let worker = Worker::start(&daemon, ConnectOptions { copy_slack: slack, ..options() });
    daemon.seen().scripts.push_back(Script::Hang);
    let started = Instant::now();
    let request = worker.request().deadline(Duration::from_millis(20));
    let error = worker.bindings.layer("a").unwrap().gather(request).unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded { call: "gather", .. }), "{error:?}");
    assert_eq!(error.leaves(), Leaves::Unknown);
    assert_eq!(error.code(), Some(RefusalCode::Unavailable));
    assert!(error.remedy().contains("leave its buffers alone"), "{}", error.remedy());
    assert!(started.elapsed() < Duration::from_secs(5));
    // The session is whole: the next copy needs no new one.
    worker.bindings.layer("a").unwrap().gather(worker.request()).unwrap();
    assert_eq!(daemon.seen().count("open"), 1);
}

#[test]
fn a_refusal_keeps_its_code_and_is_not_repeated() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    for code in RefusalCode::ALL {
        if matches!(code, RefusalCode::SessionUnknown | RefusalCode::IncarnationMismatch) {
            continue;
        }
        daemon.seen().scripts.push_back(Script::Refuse(code));
        let before = daemon.seen().count("scatter");
        let plan = worker.bindings.layer("a").unwrap();
        let error = plan.scatter(worker.request()).unwrap_err();
        assert_eq!(error.code(), Some(code));
        assert_eq!(error.leaves(), code.leaves());
        assert_eq!(error.remedy(), code.remedy());
        assert_eq!(daemon.seen().count("scatter"), before + 1);
    }
}

#[test]
fn an_older_daemon_is_spoken_to_in_its_version() {
    let directory = directory();
    let daemon = Fake::start(directory.path(), 1);
    daemon.seen().version_newest = 1;
    let client = blocking::Client::connect(daemon.address(), options()).unwrap();
    assert_eq!(client.session().unwrap().version.get(), 1);
    assert_eq!(daemon.seen().count("open"), usize::try_from(PROTOCOL_NEWEST).unwrap());

    let newest_only = ConnectOptions { versions: 2..=2, ..options() };
    let error = blocking::Client::connect(daemon.address(), newest_only).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::VersionMismatch));
    #[expect(clippy::reversed_empty_ranges, reason = "a range with nothing in it is the point")]
    let none = ConnectOptions { versions: 2..=1, ..options() };
    let error = blocking::Client::connect(daemon.address(), none).unwrap_err();
    assert!(matches!(error, Error::Argument(ArgumentError::NoVersion)), "{error:?}");
}

#[test]
fn a_daemon_that_computes_another_signature_is_not_believed() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    daemon.seen().signature_error = 1;
    let error = worker.client.register(&registration(&worker.cache), |_| {}).unwrap_err();
    let Error::Protocol { source: ProtocolError::Signature { name, .. }, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(name, "a");
}

#[test]
fn an_invalid_layout_goes_to_the_daemon_which_withdraws_what_was_there() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    daemon.seen().refuse_registration = Some(RefusalCode::LayoutInvalid);
    let mut bad = layer("bad", &worker.cache, 0);
    bad.shape[1] = 0;
    let bad = statecopy_client::Registration::new().layer(bad);
    let error = worker.client.register(&bad, |_| {}).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::LayoutInvalid));
    // After a restart nothing is registered again, and the earlier plan is stale.
    {
        let mut seen = daemon.seen();
        seen.refuse_registration = None;
        seen.be_born_again();
    }
    let error = worker.bindings.layer("a").unwrap().gather(worker.request()).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::StalePlan));
    assert_eq!(daemon.seen().count("register_layers"), 2);
}

#[test]
fn events_are_read_and_those_of_a_newer_daemon_are_passed_over() {
    let directory = directory();
    let (_daemon, worker) = pair(directory.path());
    let events: Vec<Event> = worker.client.events().unwrap().map(Result::unwrap).collect();
    let restarted = Event::DeviceRestarted { pid: 42, restarts: 1 };
    assert_eq!(events, [restarted, Event::Draining { grace: Duration::from_millis(1500) }]);
}

#[test]
fn names_that_were_not_registered_are_said() {
    let directory = directory();
    let (_daemon, worker) = pair(directory.path());
    assert!(worker.bindings.layer("both").unwrap_err().to_string().contains("both"));
    assert!(worker.bindings.set("a").unwrap_err().to_string().contains("No binding set a"));
    let names: Vec<&str> = worker.bindings.layers().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b"]);
    let region = worker.cache.clone();
    let moves = [Rebind { layer: "c".to_owned(), region, offset_bytes: 0 }];
    let error = worker.client.rebind(&moves).unwrap_err();
    assert!(matches!(error, Error::Argument(ArgumentError::NoSuchLayer { .. })), "{error:?}");
}

#[test]
fn a_closed_client_says_so_and_its_connection_ends() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let clone = worker.client.clone();
    worker.client.clone().close().unwrap();
    assert!(matches!(clone.register(&registration(&worker.cache), |_| {}), Err(Error::Closed)));
    let error = worker.bindings.layer("a").unwrap().gather(worker.request()).unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
    daemon.wait_until("the connection ends", |seen| seen.attached == 0);
    assert_eq!(daemon.seen().count("close"), 1);
}

#[test]
fn the_last_clone_ends_the_session() {
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let clone = worker.client.clone();
    drop(worker);
    clone.ping().unwrap();
    assert_eq!(daemon.seen().attached, 1);
    drop(clone);
    daemon.wait_until("the connection ends", |seen| seen.attached == 0);
}

#[test]
fn an_operator_opens_no_session() {
    let directory = directory();
    let daemon = Fake::start(directory.path(), 1);
    let admin = blocking::Admin::connect(daemon.address(), Duration::from_secs(10)).unwrap();
    assert_eq!(admin.ping().unwrap().version, "0");
    admin.inspect().unwrap();
    admin.drain().unwrap();
    assert_eq!(daemon.seen().calls, ["ping", "inspect", "drain"]);
}

#[test]
fn every_future_may_move_between_threads() {
    fn movable(future: impl Send) {
        drop(future);
    }
    let directory = directory();
    let (daemon, worker) = pair(directory.path());
    let client = worker.client.as_async();
    let plan = worker.bindings.layer("a").unwrap().as_async();
    movable(statecopy_client::Client::connect(daemon.address(), options()));
    movable(client.register(&registration(&worker.cache), |_| {}));
    movable(client.rebind(&[]));
    movable(client.release_region(worker.packed.clone()));
    movable(client.copy_many(&[]));
    movable(client.events());
    movable(plan.gather(worker.request()));
    assert_eq!(worker.client.session().unwrap().device.kind, "host");
}
