//! The descriptor socket, from the worker's side.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use statecopy_descriptors::{AsyncConnection, ChannelError, Connection};
use statecopy_proto::Refusal;
use statecopy_proto::descriptor_socket::{
    ATTACHED_DESCRIPTORS, DESCRIPTORS_MAX, DaemonRecord, RECORD_BYTES_MAX, Token, WorkerRecord,
};
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

use crate::call::{Call, Failure};
use crate::error::ProtocolError;
use crate::lock::lock;

/// A connection to the descriptor socket. The session lives as long as it does.
#[derive(Debug)]
pub(crate) struct DescriptorSocket {
    connection: AsyncConnection,
    /// One conversation at a time: a record, then its answer.
    turn: Semaphore,
    /// A conversation began and its end was not seen: the next answer would be taken for another's.
    broken_off: Mutex<bool>,
}

impl DescriptorSocket {
    /// Connects and ties the connection to the session of that token.
    pub(crate) async fn attach(path: &Path, token: Token, call: &Call) -> Result<Self, Failure> {
        let connection = connect(path, call).await?;
        let socket = Self { connection, turn: Semaphore::new(1), broken_off: Mutex::default() };
        let (answer, _) = timeout_at(call.deadline, async {
            socket.send(&WorkerRecord::Attach { token }, &[]).await?;
            socket.receive(ATTACHED_DESCRIPTORS).await
        })
        .await
        .map_err(|_| Failure::Unanswered)??;
        match answer {
            DaemonRecord::Attached => Ok(socket),
            other => Err(unexpected(other)),
        }
    }

    /// Sends descriptors under a tag, in batches.
    pub(crate) async fn pass(
        &self,
        tag: u64,
        descriptors: &[BorrowedFd<'_>],
        call: &Call,
    ) -> Result<(), Failure> {
        timeout_at(call.deadline, async {
            // The socket owns the semaphore and never closes it.
            let _turn = self.turn.acquire().await;
            if std::mem::replace(&mut *lock(&self.broken_off), true) {
                return Err(Failure::NotSent(ChannelError::Closed.into()));
            }
            for batch in descriptors.chunks(DESCRIPTORS_MAX as usize) {
                let count = u32::try_from(batch.len()).unwrap_or(DESCRIPTORS_MAX);
                self.send(&WorkerRecord::Descriptors { tag, count }, batch).await?;
                match self.receive(0).await?.0 {
                    DaemonRecord::Received { tag: of, .. } if of == tag => {}
                    other => {
                        let failure = unexpected(other);
                        *lock(&self.broken_off) = !matches!(failure, Failure::Refused(_));
                        return Err(failure);
                    }
                }
            }
            *lock(&self.broken_off) = false;
            Ok(())
        })
        .await
        .map_err(|_| Failure::Unanswered)?
    }

    /// Whether the other side is there: one system call.
    pub(crate) fn is_open(&self) -> bool {
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut polled = [PollFd::new(&self.connection, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut polled, Some(&now)) {
            Ok(_) => !polled[0].revents().intersects(gone),
            // A signal came first; the call itself will tell.
            Err(_) => true,
        }
    }

    async fn send(
        &self,
        record: &WorkerRecord,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), Failure> {
        self.connection.send(&record.encode(), descriptors).await.map_err(lost)
    }

    async fn receive(&self, descriptors_max: u32) -> Result<(DaemonRecord, Vec<OwnedFd>), Failure> {
        let mut bytes = [0; RECORD_BYTES_MAX];
        let received = self.connection.receive(&mut bytes, descriptors_max as usize).await;
        let received = received.map_err(lost)?;
        let record = DaemonRecord::decode(&bytes[..received.bytes]);
        Ok((record.map_err(ProtocolError::from)?, received.descriptors))
    }
}

/// The path at which this process finds the descriptor socket: beside the gRPC socket, because the runtime directory
/// may be mounted elsewhere here; as the daemon said, where there is none.
pub(crate) fn path_seen_here(grpc: &Path, said: &str) -> PathBuf {
    let said = PathBuf::from(said);
    match (grpc.parent(), said.file_name()) {
        (Some(directory), Some(name)) if directory.join(name).exists() => directory.join(name),
        _ => said,
    }
}

/// Connecting waits for a place in the daemon's queue, so another thread does it.
async fn connect(path: &Path, call: &Call) -> Result<AsyncConnection, Failure> {
    let not_sent = |error: ChannelError| Failure::NotSent(error.into());
    let (path, timeout) = (path.to_owned(), call.left().ok_or(Failure::Late)?);
    let connecting =
        tokio::task::spawn_blocking(move || Connection::connect_within(path, Some(timeout)));
    let connected = connecting.await.map_err(|stopped| Failure::NotSent(stopped.into()))?;
    AsyncConnection::new(connected.map_err(not_sent)?).map_err(not_sent)
}

fn lost(error: ChannelError) -> Failure {
    Failure::Lost(error.into())
}

fn unexpected(record: DaemonRecord) -> Failure {
    match record {
        DaemonRecord::Refused { code, sentence } => Refusal::new(code, sentence).into(),
        DaemonRecord::Attached | DaemonRecord::DeviceProcess | DaemonRecord::Received { .. } => {
            ProtocolError::UnexpectedRecord.into()
        }
    }
}
