//! The same under tokio.
#![expect(clippy::unwrap_used, reason = "a test panics when its set-up fails")]
#![cfg(feature = "async")]

use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use statecopy_descriptors::{
    AsyncConnection, AsyncDoorbell, ChannelError, Connection, Doorbell, Listener,
    MESSAGE_BYTES_MAX, Peer, pidfd_open, process_exit,
};

/// Runs a test that must end.
fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.unwrap() })
}

#[test]
fn messages_with_descriptors_pass_between_blocking_and_async_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    run(async {
        let listener = Listener::bind(&path).unwrap();
        let client = std::thread::spawn({
            let path = path.clone();
            move || {
                let connection = Connection::connect(path).unwrap();
                let bell = Doorbell::create().unwrap();
                connection.send(b"hello", &[bell.as_fd()]).unwrap();
                let mut buffer = [0; 16];
                let received = connection.receive(&mut buffer, 0).unwrap();
                assert_eq!(&buffer[..received.bytes], b"welcome");
                assert!(bell.wait(Some(Duration::from_secs(60))).unwrap());
            }
        });
        let connection = listener.accept().await.unwrap();
        assert_eq!(Peer::of(&connection).unwrap().pid, Some(std::process::id()));
        let mut buffer = [0; 16];
        let mut received = connection.receive(&mut buffer, 1).await.unwrap();
        assert_eq!(&buffer[..received.bytes], b"hello");
        connection.send(b"welcome", &[]).await.unwrap();
        Doorbell::from_fd(received.descriptors.pop().unwrap()).unwrap().ring();
        let end = connection.receive(&mut buffer, 0).await;
        assert!(matches!(end, Err(ChannelError::Closed)));
        client.join().unwrap();
        let bound = Listener::bind(&path);
        assert!(matches!(bound, Err(ChannelError::Path { action: "bind", .. })));
    });
}

#[test]
fn a_full_connection_waits_until_the_peer_reads_and_loses_nothing() {
    const MESSAGES: usize = 200;
    run(async {
        let (one, other) = Connection::pair().unwrap();
        let (one, other) =
            (AsyncConnection::new(one).unwrap(), AsyncConnection::new(other).unwrap());
        let sending = async {
            for count in 0..MESSAGES {
                let message = vec![count.to_le_bytes()[0]; MESSAGE_BYTES_MAX];
                one.send(&message, &[]).await.unwrap();
            }
        };
        let receiving = async {
            let mut buffer = vec![0; MESSAGE_BYTES_MAX];
            for count in 0..MESSAGES {
                let received = other.receive(&mut buffer, 0).await.unwrap();
                assert_eq!(received.bytes, MESSAGE_BYTES_MAX);
                assert!(buffer.iter().all(|byte| *byte == count.to_le_bytes()[0]));
            }
        };
        tokio::join!(sending, receiving);
        let blocking = other.into_blocking();
        one.send(b"x", &[]).await.unwrap();
        assert_eq!(blocking.receive(&mut [0; 8], 0).unwrap().bytes, 1);
    });
}

#[test]
fn an_async_doorbell_wakes_once_for_each_look() {
    run(async {
        let bell = AsyncDoorbell::new(Doorbell::create().unwrap()).unwrap();
        for _ in 0..3 {
            let ringer = bell.doorbell().try_clone().unwrap();
            let other = std::thread::spawn(move || ringer.ring());
            bell.wait().await.unwrap();
            other.join().unwrap();
            let silent = tokio::time::timeout(Duration::from_millis(5), bell.wait()).await;
            assert!(silent.is_err(), "a ring was taken away");
        }
    });
}

#[test]
fn the_end_of_a_process_is_awaited() {
    run(async {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        let pidfd = pidfd_open(child.id()).unwrap();
        let alive = tokio::time::timeout(Duration::from_millis(5), process_exit(&pidfd)).await;
        assert!(alive.is_err());
        input.flush().unwrap();
        drop(input);
        process_exit(&pidfd).await.unwrap();
        child.wait().unwrap();
        process_exit(&pidfd).await.unwrap();
    });
}
