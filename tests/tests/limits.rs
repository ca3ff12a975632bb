//! Limits and users: who may come, and how much one may have.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use statecopy_descriptors::SealedMemory;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::OpenRequest;
use statecopy_proto::{DataType, PROTOCOL_NEWEST, Refusal, RefusalCode};
use statecopy_tests::{
    Daemon, DaemonOptions, Footprint, Session, Shared, binary, layer_spec, until,
};

fn is_quota(refusal: &Refusal, setting: &str) {
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded, "{refusal}");
    assert!(refusal.sentence().contains(setting), "names {setting}: {refusal}");
}

#[test]
fn each_limit_is_told_when_a_session_opens_and_named_when_it_is_reached() {
    let daemon = DaemonOptions::default()
        .setting("limits.regions_max", "3")
        .setting("limits.layers_max", "2")
        .setting("limits.region_bytes_max", "1048576")
        .setting("limits.selected_max", "64")
        .start();
    let mut session = Session::open(daemon.wire());
    let limits = session.opened.limits.unwrap();
    assert_eq!((limits.regions_max, limits.layers_max), (3, 2));
    assert_eq!((limits.region_bytes_max, limits.selected_max), (1 << 20, 64));

    let large = SealedMemory::create("large", (1 << 20) + 4096).unwrap();
    let refusal = session.offer(large.as_fd(), large.bytes()).unwrap_err();
    is_quota(&refusal, "limits.region_bytes_max");

    let memory = Shared::new(vec![0; 1 << 20]);
    let regions: Vec<u64> = (0..3).map(|_| session.share(&memory)).collect();
    let refusal = session.offer(memory.descriptor(), memory.bytes()).unwrap_err();
    is_quota(&refusal, "limits.regions_max");
    session.release_region(regions[2]).unwrap();
    session.share(&memory);

    let layout = CacheLayout::with_page_stride(DataType::Float32, [4, 1, 1, 16], 16).unwrap();
    let layers = |count: u64, max_selected| {
        let place = |at: u64| layout.place(at << 12, 1 << 20).unwrap();
        let spec =
            |at| layer_spec(usize::try_from(at).unwrap(), &place(at), regions[0], max_selected);
        (0..count).map(spec).collect::<Vec<_>>()
    };
    let refusal = session.register_layers(layers(3, 64), Vec::new()).unwrap_err();
    is_quota(&refusal, "limits.layers_max");
    let refusal = session.register_layers(layers(2, 65), Vec::new()).unwrap_err();
    is_quota(&refusal, "limits.selected_max");
    session.register_layers(layers(2, 64), Vec::new()).unwrap();
}

#[test]
fn sessions_that_come_and_go_leave_nothing() {
    let daemon = DaemonOptions::default().setting("limits.sessions_max", "8").start();
    let request = OpenRequest { protocol_version: PROTOCOL_NEWEST, ..OpenRequest::default() };
    let mut before = Vec::new();
    for round in 0..40 {
        let mut sessions: Vec<Session> = (0..8).map(|_| Session::open(daemon.wire())).collect();
        let refusal = Session::open_as(daemon.wire(), request.clone()).unwrap_err();
        is_quota(&refusal, "limits.sessions_max");
        for session in &mut sessions {
            session.share(&Shared::new(vec![0; 4096]));
        }
        drop(sessions);
        until("all are gone", || daemon.inspect().sessions.is_empty());
        if round == 0 {
            let processes = [daemon.supervisor(), daemon.device_process()];
            before.extend(processes.map(|pid| (pid, Footprint::of(pid))));
        }
    }
    Footprint::wait_for(&before);
}

/// Another user than the one that runs the tests.
const STRANGER: u32 = 54_321;

/// A worker process of another user opens a session: what it says, or why it died.
fn stranger(folder: &Path, daemon: &Daemon) -> Result<String, String> {
    let program = folder.join("worker");
    fs::copy(binary("statecopy-tests", "statecopy-test-worker"), &program).unwrap();
    let mut command = Command::new(&program);
    command.arg(daemon.control_socket()).uid(STRANGER).gid(STRANGER);
    let orders = folder.join("orders");
    fs::write(&orders, "open\n").unwrap();
    let output = command.stdin(fs::File::open(&orders).unwrap()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn another_user_is_refused_unless_the_configuration_allows_it() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a worker of another user");
        return;
    }
    let folder = tempfile::Builder::new().prefix("sc").tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let start = |name: &str, allowed: &str| {
        let options = DaemonOptions::default().runtime(&folder.path().join(name));
        options.setting("allow_uids", allowed).start()
    };
    let alone = start("alone", "[]");
    stranger(folder.path(), &alone).unwrap_err();
    // Where somebody else is allowed, the sockets can be reached, and the refusal is the daemon's.
    let other = start("other", &format!("[{}]", STRANGER + 1));
    let said = stranger(folder.path(), &other).unwrap_err();
    assert!(said.contains("PERMISSION_DENIED") && said.contains("54321"), "{said}");
    assert!(other.inspect().sessions.is_empty());
    let allowing = start("allowing", &format!("[{STRANGER}]"));
    let session = stranger(folder.path(), &allowing).unwrap();
    assert!(session.trim().parse::<u64>().is_ok(), "{session}");
}
