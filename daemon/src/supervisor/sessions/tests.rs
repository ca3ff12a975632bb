use std::fs::File;
use std::time::Duration;

use statecopy_proto::{HandleKind, PROTOCOL_NEWEST};

use super::*;
use crate::record::{HandleRecord, PieceRecord};
use crate::supervisor::testing::scripted_device;

const WORKER: Caller = Caller { uid: 1000, pid: Some(7) };

fn table(limits: Limits) -> Sessions {
    with_room(limits, 1000)
}

fn with_room(limits: Limits, room: u64) -> Sessions {
    let descriptors = DescriptorRoom { limit: room + 40, room };
    Sessions::new(Incarnation::new([1; 16]), limits, descriptors)
}

fn open(sessions: &Sessions, byte: u8, until: Instant) -> SessionId {
    let opening = Opening {
        caller: WORKER,
        version: ProtocolVersion::agree(PROTOCOL_NEWEST).unwrap(),
        label: String::new(),
        device: scripted_device().handle,
        token: Token::new([byte; 32]),
        until,
    };
    sessions.open(opening).unwrap().id
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn a_token_attaches_its_own_session_among_many() {
    let sessions = table(Limits::default());
    let ids: Vec<SessionId> = (1..=5).map(|byte| open(&sessions, byte, later())).collect();
    let now = Instant::now();
    let granted = sessions.attach(&Token::new([3; 32]), WORKER.uid, Some(9), now).unwrap();
    assert_eq!(granted.id, ids[2]);
    let refusal = sessions.attach(&Token::new([3; 32]), WORKER.uid, None, now).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
    assert_eq!(sessions.totals().sessions.get("attaching"), Some(&4));
    assert_eq!(sessions.inspect()[2].worker_pid, 9);
}

#[test]
fn a_region_costs_as_many_descriptors_as_it_has_pieces_of_them() {
    let sessions = with_room(Limits::default(), DESCRIPTORS_A_SESSION + 5);
    let id = open(&sessions, 1, later());
    let descriptor = || OwnedFd::from(File::open("/dev/null").unwrap());
    let piece = |buffer| PieceRecord {
        bytes: 2048,
        buffer,
        handle: HandleRecord::Descriptor(Arc::new(descriptor())),
    };
    let region = |region, buffers: [u64; 2]| RegionRecord {
        id: RegionId(region),
        kind: HandleKind::CudaVmm,
        bytes: 4096,
        pieces: Arc::new(buffers.map(piece)),
    };
    sessions.add_region(id, region(1, [5, 6]), None).unwrap();
    sessions.add_region(id, region(2, [5, 6]), None).unwrap();
    let mut two = vec![descriptor(), descriptor()];
    let refusal = sessions.add_descriptors(id, 1, &mut two).unwrap_err();
    assert_eq!(refusal.subject(), "RLIMIT_NOFILE", "{refusal}");
    sessions.remove_region(id, RegionId(2)).unwrap();
    assert_eq!(sessions.add_descriptors(id, 1, &mut two).unwrap(), 2);
}

#[test]
fn regions_that_their_worker_says_are_the_same_memory_are_one_allocation() {
    let sessions = table(Limits::default());
    let id = open(&sessions, 1, later());
    let region = |region, kind, buffers: &[u64], value: u8| RegionRecord {
        id: RegionId(region),
        kind,
        bytes: 4096,
        pieces: buffers
            .iter()
            .map(|buffer| PieceRecord {
                bytes: 2048,
                buffer: *buffer,
                handle: HandleRecord::Value(Box::new([value; 64])),
            })
            .collect(),
    };
    let (ipc, fabric) = (HandleKind::CudaIpc, HandleKind::CudaFabric);
    for (at, (kind, buffers, value)) in [
        (ipc, &[5][..], 1),
        (ipc, &[5][..], 1),
        // The handle comes back for another allocation, or another handle names it.
        (ipc, &[6][..], 1),
        (ipc, &[5][..], 2),
        (fabric, &[5, 6][..], 1),
        (fabric, &[6, 5][..], 1),
        // A worker that cannot tell says nothing.
        (fabric, &[0, 0][..], 1),
        (fabric, &[0, 0][..], 1),
    ]
    .into_iter()
    .enumerate()
    {
        sessions.add_region(id, region(at as u64, kind, buffers, value), None).unwrap();
    }
    let allocations: Vec<AllocationId> =
        sessions.regions(id).unwrap().values().map(|held| held.allocation).collect();
    assert_eq!(allocations[0], allocations[1]);
    let different: std::collections::HashSet<_> = allocations[1..].iter().collect();
    assert_eq!(different.len(), allocations.len() - 1);
}

#[test]
fn another_user_neither_attaches_nor_uses_a_session() {
    let sessions = table(Limits::default());
    let id = open(&sessions, 1, later());
    let refusal = sessions.attach(&Token::new([1; 32]), 1001, None, Instant::now()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
    assert_eq!(sessions.inspect()[0].state, "attaching");
    let refusal = sessions.grant(id, Caller { uid: 0, pid: None }).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
    sessions.grant(id, WORKER).unwrap();
}

#[test]
fn a_token_that_comes_too_late_is_told_so() {
    let sessions = table(Limits::default());
    let until = Instant::now();
    let id = open(&sessions, 1, until);
    let refusal = sessions.attach(&Token::new([1; 32]), WORKER.uid, None, until).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::SessionUnknown);
    assert!(sessions.expire(id, until - Duration::from_millis(1)).is_none());
    assert_eq!(sessions.expire(id, until).unwrap().reason, EndReason::AttachTimeout);
    assert!(sessions.expire(id, until).is_none());
}

#[test]
fn ids_are_not_used_again() {
    let sessions = table(Limits { sessions_max: 1, ..Limits::default() });
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = open(&sessions, 1, later());
        ids.push(id);
        assert_eq!(sessions.end(id, EndReason::Closed).unwrap().id, id);
        assert!(sessions.end(id, EndReason::Closed).is_none());
    }
    ids.dedup();
    assert_eq!(ids.len(), 3);
    let first: Vec<_> = sessions.next_bindings(2).collect();
    let second: Vec<_> = sessions.next_bindings(2).collect();
    assert!(first.iter().all(|id| !second.contains(id)), "{first:?} {second:?}");
}

#[test]
fn descriptors_are_all_kept_or_all_refused_and_given_back_with_the_session() {
    let sessions = table(Limits { descriptors_pending_max: 3, ..Limits::default() });
    let id = open(&sessions, 1, later());
    let some = |count: usize| -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    };
    assert_eq!(sessions.add_descriptors(id, 1, &mut some(2)).unwrap(), 2);
    let refusal = sessions.add_descriptors(id, 1, &mut some(2)).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    assert_eq!(sessions.totals().descriptors_pending, 2);
    let refusal = sessions.take_descriptors(id, 1, 3).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
    assert_eq!(sessions.totals().descriptors_pending, 0, "they are closed");
    sessions.add_descriptors(id, 2, &mut some(3)).unwrap();
    let ended = sessions.end(id, EndReason::WorkerDied).unwrap();
    assert_eq!(ended.held.1.values().map(Vec::len).sum::<usize>(), 3);
    let refusal = sessions.add_descriptors(id, 2, &mut some(1)).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::SessionUnknown);
}

#[test]
fn where_few_descriptors_are_left_new_sessions_are_refused_and_old_ones_go_on() {
    let sessions = with_room(Limits::default(), 8);
    let (first, second) = (open(&sessions, 1, later()), open(&sessions, 2, later()));
    let opening = Opening {
        caller: WORKER,
        version: ProtocolVersion::agree(1).unwrap(),
        label: String::new(),
        device: scripted_device().handle,
        token: Token::new([3; 32]),
        until: later(),
    };
    let refusal = sessions.open(opening).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    assert!(refusal.sentence().contains("RLIMIT_NOFILE = 48"), "{refusal}");
    let some = |count: usize| -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    };
    sessions.add_descriptors(first, 1, &mut some(2)).unwrap();
    let refusal = sessions.add_descriptors(second, 1, &mut some(1)).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    sessions.end(first, EndReason::Closed).unwrap();
    sessions.add_descriptors(second, 1, &mut some(1)).unwrap();
}

#[test]
fn a_stream_that_is_not_read_is_ended_and_nobody_waits_for_it() {
    let sessions = table(Limits::default());
    let id = open(&sessions, 1, later());
    let (sender, mut receiver) = sessions.subscribe(id).unwrap();
    drop(sender);
    let event = message::draining(Incarnation::new([1; 16]), 5);
    let lost: u64 = (0..EVENTS_HELD + 3).map(|_| sessions.send_event(&event, |_| true)).sum();
    assert_eq!(lost, 1);
    for _ in 0..EVENTS_HELD {
        assert!(receiver.try_recv().is_ok());
    }
    let ended = receiver.try_recv();
    assert!(matches!(ended, Err(mpsc::error::TryRecvError::Disconnected)), "{ended:?}");
}

#[test]
fn a_closed_table_opens_nothing_and_holds_nothing() {
    let sessions = table(Limits::default());
    let ids = [open(&sessions, 1, later()), open(&sessions, 2, later())];
    let ended = sessions.close(&EndReason::Draining);
    assert_eq!(ended.iter().map(|ended| ended.id).collect::<Vec<_>>(), ids);
    assert_eq!(sessions.totals(), Totals::default());
    let opening = Opening {
        caller: WORKER,
        version: ProtocolVersion::agree(1).unwrap(),
        label: String::new(),
        device: scripted_device().handle,
        token: Token::new([1; 32]),
        until: later(),
    };
    assert_eq!(sessions.open(opening).unwrap_err().code(), RefusalCode::Draining);
}
