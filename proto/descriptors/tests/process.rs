//! Whether a peer is dead, whatever its children hold; and doorbells.
#![expect(clippy::unwrap_used, reason = "a test panics when its set-up fails")]

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getgid, getpid, getuid, waitid};
use statecopy_descriptors::{
    Doorbell, DoorbellError, Peer, PeerError, has_exited, open_pidfd_self, pidfd_open, wait_any,
    wait_for_exit,
};

/// How long a test waits for what must come.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// A child that lives until its input ends.
fn child() -> (Child, ChildStdin) {
    let mut child =
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let input = child.stdin.take().unwrap();
    (child, input)
}

#[test]
fn a_killed_child_is_dead_and_still_is_as_a_zombie() {
    let (mut child, _input) = child();
    let pidfd = pidfd_open(child.id()).unwrap();
    assert!(!has_exited(&pidfd).unwrap());
    assert!(!wait_for_exit(&pidfd, Some(Duration::from_millis(1))).unwrap());
    child.kill().unwrap();
    assert!(wait_for_exit(&pidfd, PATIENCE).unwrap());
    // Nobody has waited for it: it is a zombie now.
    let pid = Pid::from_child(&child);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::Pid(pid), options).unwrap().unwrap();
    assert_eq!(status.terminating_signal(), Some(Signal::KILL.as_raw()));
    assert!(has_exited(&pidfd).unwrap());
    child.wait().unwrap();
    assert!(has_exited(&pidfd).unwrap(), "and dead it stays");
}

#[test]
fn this_process_is_not_dead_and_no_process_has_no_pidfd() {
    assert!(!has_exited(open_pidfd_self().unwrap()).unwrap());
    assert!(pidfd_open(0).is_err());
    assert!(pidfd_open(u32::MAX).is_err());
}

#[test]
fn a_peer_is_known_by_its_credentials() {
    let (one, _other) = UnixStream::pair().unwrap();
    let peer = Peer::of(&one).unwrap();
    assert_eq!((peer.uid, peer.gid), (getuid().as_raw(), getgid().as_raw()));
    assert_eq!(peer.pid, u32::try_from(getpid().as_raw_pid()).ok());
    if let Some(exit) = peer.exit {
        assert!(!has_exited(exit).unwrap());
    }
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Peer::of(&reader), Err(PeerError::Unreadable(_))));
}

/// A worker in Python that connects, forks a child which keeps the socket, says so, and waits.
const WORKER: &str = "
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
connection.send(b'x')
sys.stdin.read()
";

#[test]
fn a_forked_child_that_holds_the_socket_does_not_hide_its_parents_death() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut worker = Command::new("python3");
    worker.args(["-c", WORKER]).arg(&path).stdin(Stdio::piped());
    let mut worker = worker.spawn().unwrap();
    let mut input = worker.stdin.take().unwrap();
    let (connection, _) = listener.accept().unwrap();
    connection.set_nonblocking(true).unwrap();
    let peer = Peer::of(&connection).unwrap();
    assert_eq!(peer.pid, Some(worker.id()));
    let Some(exit) = peer.exit else {
        println!("skipped: the kernel has no SO_PEERPIDFD");
        worker.kill().unwrap();
        worker.wait().unwrap();
        return;
    };
    // One byte: the child has been forked.
    assert!(wait_any(&[connection.as_fd()], PATIENCE).unwrap().is_some());
    let mut byte = [0];
    assert_eq!(std::io::Read::read(&mut &connection, &mut byte).unwrap(), 1);
    assert!(!has_exited(&exit).unwrap());

    worker.kill().unwrap();
    assert!(wait_for_exit(&exit, PATIENCE).unwrap());
    let open = std::io::Read::read(&mut &connection, &mut byte).unwrap_err();
    assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the child holds the socket open");
    worker.wait().unwrap();
    // The grandchild ends with its input.
    input.flush().unwrap();
    drop(input);
    connection.set_nonblocking(false).unwrap();
    assert_eq!(std::io::Read::read(&mut &connection, &mut byte).unwrap(), 0);
}

#[test]
fn any_number_of_rings_is_one_ring_and_none_is_lost() {
    let bell = Doorbell::create().unwrap();
    assert!(!bell.clear().unwrap());
    assert!(!bell.wait(Some(Duration::ZERO)).unwrap());
    bell.ring();
    bell.ring();
    assert!(bell.clear().unwrap());
    assert!(!bell.clear().unwrap());
    let ringer = bell.try_clone().unwrap();
    let other = thread::spawn(move || ringer.ring());
    assert!(bell.wait(PATIENCE).unwrap());
    other.join().unwrap();
}

#[test]
fn a_peer_cannot_make_a_look_at_a_doorbell_block() {
    let bell = Doorbell::create().unwrap();
    let peer = bell.try_clone_fd().unwrap();
    fcntl_setfl(&peer, fcntl_getfl(&peer).unwrap().difference(OFlags::NONBLOCK)).unwrap();
    assert!(!fcntl_getfl(&bell).unwrap().contains(OFlags::NONBLOCK), "the flags are shared");
    assert!(!bell.clear().unwrap());
    assert!(!bell.wait(Some(Duration::from_millis(1))).unwrap());
    bell.ring();
    assert!(bell.clear().unwrap());
}

#[test]
fn a_full_doorbell_rings_all_the_same() {
    let bell = Doorbell::create().unwrap();
    let peer = bell.try_clone_fd().unwrap();
    rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    bell.ring();
    assert!(bell.clear().unwrap());
}

#[test]
fn only_an_eventfd_is_a_doorbell() {
    let bell = Doorbell::create().unwrap();
    let again = Doorbell::from_fd(bell.try_clone_fd().unwrap()).unwrap();
    again.ring();
    assert!(bell.clear().unwrap());
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let others: [OwnedFd; 2] = [reader, open_pidfd_self().unwrap()];
    for other in others {
        let refused = Doorbell::from_fd(other);
        assert!(matches!(refused, Err(DoorbellError::NotEventfd { .. })), "{refused:?}");
    }
}

#[test]
fn waiting_for_many_tells_the_first_that_is_ready() {
    let bells: Vec<Doorbell> = (0..3).map(|_| Doorbell::create().unwrap()).collect();
    let descriptors: Vec<_> = bells.iter().map(AsFd::as_fd).collect();
    assert_eq!(wait_any(&descriptors, Some(Duration::ZERO)).unwrap(), None);
    bells[2].ring();
    assert_eq!(wait_any(&descriptors, PATIENCE).unwrap(), Some(2));
    bells[1].ring();
    assert_eq!(wait_any(&descriptors, None).unwrap(), Some(1));
    // An end is a reason to wake up too.
    let (one, other) = UnixStream::pair().unwrap();
    drop(other);
    assert_eq!(wait_any(&[one.as_fd()], PATIENCE).unwrap(), Some(0));
}
