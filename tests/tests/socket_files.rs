//! The runtime directory: what lies there, what may lie there, and what the daemon never touches.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::process::{PidfdGetfdFlags, Signal, pidfd_getfd};
use statecopy_descriptors::pidfd_open;
use statecopy_tests::{DaemonOptions, Session, runs, send_signal, until};
use tempfile::TempDir;

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::Builder::new().prefix("sc").tempdir().unwrap();
    let runtime = folder.path().join("run");
    (folder, runtime)
}

fn make(runtime: &Path, mode: u32) {
    fs::create_dir(runtime).unwrap();
    fs::set_permissions(runtime, fs::Permissions::from_mode(mode)).unwrap();
}

/// Starts a daemon that must refuse to start. Gives what it said.
fn refuses(runtime: &Path) -> String {
    let mut daemon = DaemonOptions::default().runtime(runtime).spawn();
    let status = daemon.wait();
    assert!(!status.success(), "{status}");
    daemon.log()
}

/// Names, types and targets of everything in a folder.
fn listing(folder: &Path) -> Vec<String> {
    let mut lines: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            format!(
                "{:?} socket={} link={}",
                entry.file_name(),
                kind.is_socket(),
                kind.is_symlink()
            )
        })
        .collect();
    lines.sort();
    lines
}

#[test]
fn the_sockets_are_for_the_owner_only() {
    let (_folder, runtime) = folder();
    let daemon = DaemonOptions::default().runtime(&runtime).start();
    let session = Session::open(daemon.wire());
    for socket in [daemon.control_socket(), PathBuf::from(&session.opened.descriptor_socket)] {
        assert_eq!(socket.parent(), Some(runtime.as_path()));
        let metadata = fs::symlink_metadata(&socket).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o007, 0, "{}", socket.display());
    }
    assert_eq!(fs::metadata(&runtime).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_missing_runtime_directory_is_made() {
    let (_folder, runtime) = folder();
    let daemon = DaemonOptions::default().runtime(&runtime).start();
    assert_eq!(fs::metadata(&runtime).unwrap().permissions().mode() & 0o777, 0o700);
    drop(daemon);
}

#[test]
fn a_daemon_starts_over_a_dead_ones_sockets() {
    let (_folder, runtime) = folder();
    let mut dead = DaemonOptions::default().runtime(&runtime).start();
    let device = dead.device_process();
    dead.signal(Signal::KILL);
    dead.wait();
    until("its device process ends", || !runs(device));
    assert!(dead.control_socket().exists(), "a killed daemon leaves its socket behind");
    let next = DaemonOptions::default().runtime(&runtime).start();
    drop(Session::open(next.wire()));
}

#[test]
fn a_daemon_refuses_to_start_beside_a_live_one_and_does_not_disturb_it() {
    let (_folder, runtime) = folder();
    let daemon = DaemonOptions::default().runtime(&runtime).start();
    let before = listing(&runtime);
    let said = refuses(&runtime);
    assert!(said.contains(&runtime.display().to_string()), "names the directory: {said}");
    assert_eq!(listing(&runtime), before);
    drop(Session::open(&daemon.connect()));
}

#[test]
fn a_daemon_refuses_to_start_while_a_dead_ones_device_process_lives() {
    let (_folder, runtime) = folder();
    let mut dead = DaemonOptions::default().runtime(&runtime).start();
    // The lock is held by whoever inherited it: here by this test in place of a device process that is still copying.
    let device = dead.device_process();
    let lock = lock_of(device, &runtime);
    dead.signal(Signal::KILL);
    dead.wait();
    until("its device process ends", || !runs(device));
    let said = refuses(&runtime);
    assert!(said.contains(&runtime.display().to_string()), "{said}");
    drop(lock);
    drop(DaemonOptions::default().runtime(&runtime).start());
}

#[test]
fn somebody_elses_file_in_a_sockets_place_is_never_unlinked() {
    for name in ["statecopyd.sock", "statecopyd.fds.sock"] {
        let (folder, runtime) = folder();
        make(&runtime, 0o700);
        let place = runtime.join(name);
        let elsewhere = folder.path().join("precious");
        fs::write(&elsewhere, "precious").unwrap();

        // A file; a folder; links to a file, to nothing, and to a live socket of somebody else.
        fs::write(&place, "precious").unwrap();
        refuses(&runtime);
        assert_eq!(fs::read_to_string(&place).unwrap(), "precious");
        fs::remove_file(&place).unwrap();

        fs::create_dir(&place).unwrap();
        refuses(&runtime);
        fs::remove_dir(&place).unwrap();

        let other = folder.path().join("other.sock");
        let _listener = UnixListener::bind(&other).unwrap();
        for target in [elsewhere.clone(), folder.path().join("nothing"), other] {
            symlink(&target, &place).unwrap();
            refuses(&runtime);
            assert_eq!(fs::read_link(&place).unwrap(), target);
            fs::remove_file(&place).unwrap();
        }
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "precious");

        // A socket on which somebody listens, without our lock.
        let listener = UnixListener::bind(&place).unwrap();
        refuses(&runtime);
        assert!(place.exists());
        drop(listener);

        // Nothing is in the way any more: the socket is stale.
        let daemon = DaemonOptions::default().runtime(&runtime).start();
        drop(Session::open(daemon.wire()));
    }
}

#[test]
fn a_runtime_directory_that_others_may_write_or_that_is_a_link_is_refused() {
    for mode in [0o777, 0o770, 0o702] {
        let (_folder, runtime) = folder();
        make(&runtime, mode);
        let said = refuses(&runtime);
        assert!(said.contains(&runtime.display().to_string()), "{mode:o}: {said}");
        assert!(listing(&runtime).is_empty(), "{mode:o}");
    }
    let (folder, runtime) = folder();
    let real = folder.path().join("real");
    make(&real, 0o700);
    symlink(&real, &runtime).unwrap();
    refuses(&runtime);
    assert!(listing(&real).is_empty());
    let (_folder, runtime) = folder_with_file();
    refuses(&runtime);
}

fn folder_with_file() -> (TempDir, PathBuf) {
    let (folder, runtime) = folder();
    fs::write(&runtime, "a file").unwrap();
    (folder, runtime)
}

/// A descriptor of the very lock that a device process inherited.
fn lock_of(device: u32, runtime: &Path) -> OwnedFd {
    let entries = fs::read_dir(format!("/proc/{device}/fd")).unwrap();
    let inherited = entries
        .map(|entry| entry.unwrap().path())
        .find(|path| fs::read_link(path).is_ok_and(|target| target.starts_with(runtime)));
    let inherited = inherited.expect("the device process holds the lock");
    let number = inherited.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let process = pidfd_open(device).unwrap();
    pidfd_getfd(process, number, PidfdGetfdFlags::empty()).unwrap()
}

#[test]
fn sigint_ends_a_daemon_like_sigterm_and_leaves_nothing() {
    let (_folder, runtime) = folder();
    let mut daemon = DaemonOptions::default().runtime(&runtime).start();
    let entries = daemon.runtime_entries();
    assert!(entries.contains(&"statecopyd.sock".to_owned()), "{entries:?}");
    send_signal(daemon.supervisor(), Signal::INT).unwrap();
    assert!(daemon.wait().success());
    assert_eq!(daemon.runtime_entries(), [""; 0]);
}
