//! Messages arrive whole with their descriptors, or not at all and the descriptors are closed.
#![expect(clippy::unwrap_used, reason = "a test panics when its set-up fails")]

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::pipe;
use statecopy_descriptors::{
    ChannelError, Connection, DESCRIPTORS_PER_MESSAGE_MAX, MESSAGE_BYTES_MAX,
};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(60);

fn pair() -> (Connection, Connection) {
    let (one, other) = Connection::pair().unwrap();
    other.set_timeout(Some(PATIENCE)).unwrap();
    (one, other)
}

/// Whether every writing end of a pipe is closed.
fn is_closed(reader: &OwnedFd) -> bool {
    let mut reader = std::fs::File::from(reader.try_clone().unwrap());
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    matches!(reader.read(&mut [0]), Ok(0))
}

#[test]
fn a_message_arrives_whole_with_descriptors_of_its_own() {
    let (one, other) = pair();
    let (reader, writer) = pipe().unwrap();
    one.send(b"first", &[writer.as_fd()]).unwrap();
    one.send(b"second", &[]).unwrap();
    drop(writer);
    let mut buffer = [0; 64];
    let received = other.receive(&mut buffer, 1).unwrap();
    assert_eq!(&buffer[..received.bytes], b"first");
    let [descriptor] = received.descriptors.as_slice() else { panic!("one descriptor was sent") };
    assert!(fcntl_getfd(descriptor).unwrap().contains(FdFlags::CLOEXEC));
    rustix::io::write(descriptor, b"x").unwrap();
    assert!(!is_closed(&reader));
    let received = other.receive(&mut buffer, 1).unwrap();
    assert_eq!((&buffer[..received.bytes], received.descriptors.len()), (&b"second"[..], 0));
}

#[test]
fn the_largest_message_fits_with_the_most_descriptors() {
    let (one, other) = pair();
    let message: Vec<u8> = (0..MESSAGE_BYTES_MAX).map(|at| at.to_le_bytes()[0]).collect();
    let descriptors = [one.as_fd(); DESCRIPTORS_PER_MESSAGE_MAX];
    one.send(&message, &descriptors).unwrap();
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let received = other.receive(&mut buffer, DESCRIPTORS_PER_MESSAGE_MAX).unwrap();
    assert_eq!(received.bytes, MESSAGE_BYTES_MAX);
    assert_eq!(received.descriptors.len(), DESCRIPTORS_PER_MESSAGE_MAX);
    assert_eq!(buffer, message);
}

#[test]
fn nothing_too_large_and_nothing_empty_is_sent() {
    let (one, other) = pair();
    assert!(matches!(one.send(&[], &[]), Err(ChannelError::EmptyMessage)));
    let long = one.send(&vec![0; MESSAGE_BYTES_MAX + 1], &[]);
    assert!(matches!(long, Err(ChannelError::MessageTooLong { max: MESSAGE_BYTES_MAX, .. })));
    let many = [one.as_fd(); DESCRIPTORS_PER_MESSAGE_MAX + 1];
    let many = one.send(b"x", &many);
    assert!(matches!(many, Err(ChannelError::TooManyDescriptors { count: 65, max: 64 })));
    drop(one);
    assert!(matches!(other.receive(&mut [0], 0), Err(ChannelError::Closed)));
}

#[test]
fn a_message_longer_than_the_buffer_is_an_error_and_its_descriptors_are_closed() {
    let (one, other) = pair();
    let (reader, writer) = pipe().unwrap();
    one.send(b"long", &[writer.as_fd()]).unwrap();
    one.send(b"next", &[]).unwrap();
    drop(writer);
    let mut buffer = [0; 4];
    let truncated = other.receive(&mut buffer[..3], 1);
    assert!(matches!(truncated, Err(ChannelError::MessageTruncated { max: 3 })));
    assert!(is_closed(&reader));
    assert_eq!(other.receive(&mut buffer, 1).unwrap().bytes, 4, "the connection goes on");
}

#[test]
fn more_descriptors_than_expected_are_an_error_and_closed() {
    let (one, other) = pair();
    for expected in 0..4 {
        let (reader, writer) = pipe().unwrap();
        one.send(b"x", &vec![writer.as_fd(); expected + 1]).unwrap();
        drop(writer);
        let refused = other.receive(&mut [0; 8], expected);
        let Err(ChannelError::TooManyDescriptors { count, max }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!((count, max), (expected + 1, expected));
        assert!(is_closed(&reader));
    }
}

/// Sends what [`Connection::send`] would not.
fn send_raw(socket: &Connection, descriptors: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    let bytes = [std::io::IoSlice::new(b"x")];
    sendmsg(socket, &bytes, &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn control_data_that_was_cut_is_an_error_and_what_came_is_closed() {
    let (one, other) = pair();
    let (reader, writer) = pipe().unwrap();
    send_raw(&one, &vec![writer.as_fd(); 200]);
    drop(writer);
    let cut = other.receive(&mut [0; 8], usize::MAX);
    assert!(matches!(cut, Err(ChannelError::DescriptorsTruncated)), "{cut:?}");
    assert!(is_closed(&reader));
}

#[test]
fn the_end_of_a_connection_is_told_as_such_on_both_sides() {
    let (one, other) = pair();
    one.send(b"last", &[]).unwrap();
    drop(one);
    let mut buffer = [0; 8];
    assert_eq!(other.receive(&mut buffer, 0).unwrap().bytes, 4);
    assert!(matches!(other.receive(&mut buffer, 0), Err(ChannelError::Closed)));
    assert!(matches!(other.send(b"x", &[]), Err(ChannelError::Closed)));
    // A peer that leaves with messages unread is the same.
    let (one, other) = pair();
    other.send(b"unread", &[]).unwrap();
    drop(one);
    assert!(matches!(other.receive(&mut buffer, 0), Err(ChannelError::Closed)));
}

#[test]
fn a_wait_ends_with_its_timeout() {
    let (one, _other) = pair();
    one.set_timeout(Some(Duration::ZERO)).unwrap();
    assert!(matches!(one.receive(&mut [0; 8], 0), Err(ChannelError::TimedOut)));
    let filled = (0..10_000).find_map(|_| one.send(&[0; 4096], &[]).err());
    assert!(matches!(filled, Some(ChannelError::TimedOut)), "{filled:?}");
}

#[test]
fn only_a_seqpacket_unix_socket_becomes_a_connection() {
    let (stream, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(Connection::from_fd(stream.into()), Err(ChannelError::NotSeqpacket)));
    let (reader, _writer) = pipe().unwrap();
    assert!(matches!(Connection::from_fd(reader), Err(ChannelError::NotSeqpacket)));
    let (one, other) = pair();
    let one = Connection::from_fd(one.into_fd()).unwrap();
    one.send(b"x", &[]).unwrap();
    assert_eq!(other.receive(&mut [0], 0).unwrap().bytes, 1);
}

#[test]
fn a_connection_blocks_until_the_other_side_sends() {
    let (one, other) = pair();
    let sender = thread::spawn(move || one.send(b"late", &[]).unwrap());
    assert_eq!(other.receive(&mut [0; 8], 0).unwrap().bytes, 4);
    sender.join().unwrap();
    assert!(other.as_fd().as_raw_fd() >= 0);
}

#[test]
fn nobody_listens_is_told_with_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nobody");
    match Connection::connect(&path) {
        Err(ChannelError::Path { action: "connect to", path: named, .. }) => {
            assert_eq!(named, path);
        }
        other => panic!("{other:?}"),
    }
    let long = folder.path().join("x".repeat(200));
    assert!(matches!(Connection::connect(long), Err(ChannelError::Path { action: "name", .. })));
}
