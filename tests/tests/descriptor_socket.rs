//! The descriptor socket: malformed records, tokens, and who may speak there.

use std::io::IoSlice;
use std::mem::MaybeUninit;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use statecopy_descriptors::Connection;
use statecopy_proto::RefusalCode;
use statecopy_proto::descriptor_socket::{
    DESCRIPTORS_MAX, DaemonRecord, TOKEN_BYTES, Token, WorkerRecord,
};
use statecopy_proto::v1::OpenRequest;
use statecopy_tests::{Daemon, Footprint, Random, Session, Shared, random_bytes, until};

fn dial(daemon: &Daemon) -> Connection {
    Session::dial(&daemon.runtime().join("statecopyd.fds.sock"))
}

fn refused(answer: &Option<DaemonRecord>) -> Option<RefusalCode> {
    match answer {
        Some(DaemonRecord::Refused { code, .. }) => Some(*code),
        Some(DaemonRecord::Attached | DaemonRecord::DeviceProcess) | None => None,
        Some(DaemonRecord::Received { .. } | DaemonRecord::SessionEnded { .. }) => None,
    }
}

/// Messages that are no record of a worker.
fn malformed() -> Vec<Vec<u8>> {
    let attach = WorkerRecord::Attach { token: Token::new([7; TOKEN_BYTES]) }.encode();
    let descriptors = WorkerRecord::Descriptors { tag: 1, count: 1 }.encode();
    let mut messages = vec![vec![0], b"GET / HTTP/1.1".to_vec(), random_bytes(3, 400)];
    for record in [attach, descriptors] {
        messages.push(record[..record.len() - 1].to_vec());
        messages.push([record.as_slice(), &[0]].concat());
        // Magic, version, kind; and what of a count must be zero, or is out of range.
        for at in [0, 4, 6, record.len() - 1] {
            let mut changed = record.clone();
            changed[at] ^= 0xff;
            messages.push(changed);
        }
    }
    messages.push(DaemonRecord::Attached.encode());
    messages
}

#[test]
fn a_malformed_record_is_refused_before_and_after_the_token() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 4096]);
    for message in malformed() {
        let connection = dial(&daemon);
        let answer = Session::exchange(&connection, &message, &[]);
        // A token of the right form is refused for what it is.
        assert!(refused(&answer).is_some(), "{message:?}: {answer:?}");
        until("the connection is closed", || {
            Session::exchange(&connection, &message, &[]).is_none()
        });
        let answer = session.say(&message, &[]);
        assert!(refused(&answer).is_some(), "{message:?}: {answer:?}");
    }
    // The session of a worker that mis-spoke lives on.
    session.share(&memory);
}

#[test]
fn a_token_serves_once_and_only_its_own_session() {
    let daemon = Daemon::start();
    let wire = daemon.wire();
    let request = OpenRequest { protocol_version: 2, ..OpenRequest::default() };
    let opened = wire.ask(wire.sessions().open(request)).unwrap();
    let token = Token::parse(&opened.token).unwrap();
    let attach = WorkerRecord::Attach { token }.encode();
    // One bit of it makes it another token.
    let mut wrong = attach.clone();
    *wrong.last_mut().unwrap() ^= 1;
    let answer = Session::exchange(&dial(&daemon), &wrong, &[]);
    assert_eq!(refused(&answer), Some(RefusalCode::PermissionDenied));

    let connection = dial(&daemon);
    assert_eq!(Session::exchange(&connection, &attach, &[]), Some(DaemonRecord::Attached));
    let answer = Session::exchange(&dial(&daemon), &attach, &[]);
    assert_eq!(refused(&answer), Some(RefusalCode::PermissionDenied));
    assert!(refused(&Session::exchange(&connection, &attach, &[])).is_some(), "a second token");
    assert_eq!(daemon.inspect().sessions.len(), 1);
}

#[test]
fn descriptors_before_the_token_are_refused_and_closed() {
    let daemon = Daemon::start();
    let before = [(daemon.supervisor(), Footprint::of(daemon.supervisor()))];
    let memory = Shared::new(vec![0; 4096]);
    for _ in 0..10 {
        let connection = dial(&daemon);
        let record = WorkerRecord::Descriptors { tag: 1, count: 3 }.encode();
        let answer = Session::exchange(&connection, &record, &[memory.descriptor(); 3]);
        assert!(refused(&answer).is_some(), "{answer:?}");
    }
    Footprint::wait_for(&before);
}

#[test]
fn descriptors_of_one_tag_add_up_and_too_many_in_one_message_are_refused() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 4096]);
    let baseline = Footprint::of(daemon.supervisor());
    let tag = session.tag();
    let half = DESCRIPTORS_MAX / 2;
    let record = WorkerRecord::Descriptors { tag, count: half }.encode();
    let descriptors = vec![memory.descriptor(); half as usize];
    for total in [half, 2 * half, 3 * half] {
        let answer = session.say(&record, &descriptors);
        assert_eq!(answer, Some(DaemonRecord::Received { tag, total }));
    }
    // More than the library would send.
    for count in [DESCRIPTORS_MAX + 1, 200] {
        let many = vec![memory.descriptor(); count as usize];
        let mut space = vec![MaybeUninit::uninit(); 4096];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let message = [IoSlice::new(&record)];
        sendmsg(session.connection(), &message, &mut control, SendFlags::empty()).unwrap();
        let answer = session.hear();
        assert!(refused(&answer).is_some(), "{count}: {answer:?}");
    }
    let pending = daemon.metric("statecopy_descriptors_pending");
    assert!((pending - f64::from(3 * half)).abs() < f64::EPSILON, "{pending}");
    drop(session);
    until("all are closed", || {
        Footprint::of(daemon.supervisor()).descriptors <= baseline.descriptors
    });
}

#[test]
fn random_records_never_disturb_other_sessions() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let before = [(daemon.supervisor(), Footprint::of(daemon.supervisor()))];
    let mut random = Random::new(8);
    for round in 0..200 {
        let connection = dial(&daemon);
        let mut message = random_bytes(round, 1 + random.below(80));
        if round % 2 == 0 && message.len() > 7 {
            // Past magic and version, so that the kinds are reached.
            message[..8].copy_from_slice(b"scds\x01\0\x01\0");
            message[6] = u8::try_from(1 + random.below(3)).unwrap();
        }
        let answer = Session::exchange(&connection, &message, &[]);
        assert!(!matches!(answer, Some(DaemonRecord::Attached)), "{message:?}");
    }
    session.share(&Shared::new(vec![0; 4096]));
    drop(session);
    Footprint::wait_for(&before);
}
