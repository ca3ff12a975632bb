//! Protocol versions: the daemon serves the newest and the one before it.

use statecopy_proto::v1::OpenRequest;
use statecopy_proto::{PROTOCOL_NEWEST, PROTOCOL_OLDEST, RefusalCode};
use statecopy_tests::{Daemon, Session, Shared};

fn asking(protocol_version: u32) -> OpenRequest {
    OpenRequest { protocol_version, label: "prefill-0".to_owned(), ..OpenRequest::default() }
}

#[test]
fn every_served_version_gets_the_session_it_asked_for() {
    let daemon = Daemon::start();
    for version in PROTOCOL_OLDEST..=PROTOCOL_NEWEST {
        let mut session = Session::open_as(daemon.wire(), asking(version)).unwrap();
        assert_eq!(session.opened.protocol_version, version);
        session.share(&Shared::new(vec![0; 4096]));
        let status = daemon.inspect();
        let shown = status.sessions.iter().find(|it| it.session_id == session.id()).unwrap();
        assert_eq!(shown.protocol_version, version);
        // The field that version 2 added.
        assert_eq!(shown.label, if version == 1 { "" } else { "prefill-0" });
    }
}

#[test]
fn another_version_is_refused_naming_both() {
    let daemon = Daemon::start();
    for version in [0, PROTOCOL_NEWEST + 1, u32::MAX] {
        let refusal = Session::open_as(daemon.wire(), asking(version)).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::VersionMismatch);
        for named in [version, PROTOCOL_OLDEST, PROTOCOL_NEWEST] {
            assert!(refusal.sentence().contains(&named.to_string()), "{refusal}");
        }
    }
    assert!(daemon.inspect().sessions.is_empty());
}
