//! The descriptor socket, from the worker's side.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use statecopy_descriptors::{AsyncConnection, ChannelError, Connection, has_exited};
use statecopy_proto::descriptor_socket::{
    ATTACHED_DESCRIPTORS, DESCRIPTORS_MAX, DEVICE_PROCESS_DESCRIPTORS, DaemonRecord,
    RECORD_BYTES_MAX, Token, WorkerRecord,
};
use statecopy_proto::{Refusal, RefusalCode};
use statecopy_session::MonotonicNs;
use tokio::sync::Semaphore;
use tokio::time::timeout_at;

use crate::call::{Call, Failure};
use crate::error::{BoxError, ProtocolError};
use crate::lock::lock;

/// A connection to the descriptor socket. The session lives as long as it does.
#[derive(Debug)]
pub(crate) struct DescriptorSocket {
    connection: AsyncConnection,
    /// One conversation at a time: a record, then its answer.
    turn: Semaphore,
    /// A conversation began and its end was not seen: the next answer would be taken for another's.
    broken_off: Mutex<bool>,
    /// A pidfd of the device process that serves the session's ring now.
    device_process: Mutex<Option<OwnedFd>>,
    /// Why the daemon ended the session, once it has said so.
    ended: Mutex<Option<String>>,
}

/// Why no answer comes any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The daemon is gone, and so is its device process.
    DaemonGone,
    /// The daemon lives and ended the session: why.
    SessionEnded(String),
}

/// A device process, by its pidfd; without one it is not known when it ends.
#[derive(Debug)]
pub(crate) struct Executor(Option<OwnedFd>);

impl Executor {
    pub(crate) fn is_known_dead(&self) -> bool {
        self.0.as_ref().is_some_and(|pidfd| has_exited(pidfd).unwrap_or(false))
    }
}

/// The session's ring, as the daemon sends it.
#[derive(Debug)]
pub(crate) struct RingDescriptors {
    pub(crate) memory: OwnedFd,
    pub(crate) executor_bell: OwnedFd,
    /// This process's clock before the daemon was asked for them.
    pub(crate) asked_at: MonotonicNs,
}

impl DescriptorSocket {
    /// Connects and ties the connection to the session of that token. The ring comes with it where the daemon serves one.
    pub(crate) async fn attach(
        path: &Path,
        token: Token,
        call: &Call,
    ) -> Result<(Self, Option<RingDescriptors>), Failure> {
        let socket = Self {
            connection: connect(path, call).await?,
            turn: Semaphore::new(1),
            broken_off: Mutex::default(),
            device_process: Mutex::default(),
            ended: Mutex::default(),
        };
        let asked_at = MonotonicNs::now();
        let (answer, descriptors) = timeout_at(call.deadline, async {
            socket.send(&WorkerRecord::Attach { token }, &[]).await?;
            socket.receive(ATTACHED_DESCRIPTORS).await
        })
        .await
        .map_err(|_| Failure::Unanswered)??;
        match answer {
            DaemonRecord::Attached => {}
            other => return Err(unexpected(other)),
        }
        if descriptors.is_empty() {
            return Ok((socket, None));
        }
        let [memory, executor_bell, device_process]: [OwnedFd; ATTACHED_DESCRIPTORS as usize] =
            descriptors.try_into().map_err(|_| ProtocolError::UnexpectedRecord)?;
        *lock(&socket.device_process) = Some(device_process);
        Ok((socket, Some(RingDescriptors { memory, executor_bell, asked_at })))
    }

    /// A connection that is attached, and the device process behind it.
    #[cfg(test)]
    pub(crate) fn attached(connection: Connection, device_process: OwnedFd) -> Self {
        Self {
            connection: AsyncConnection::new(connection).unwrap(),
            turn: Semaphore::new(1),
            broken_off: Mutex::default(),
            device_process: Mutex::new(Some(device_process)),
            ended: Mutex::default(),
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
                        let ended = matches!(other, DaemonRecord::SessionEnded { .. });
                        let failure = unexpected(other);
                        *lock(&self.broken_off) = ended || !matches!(failure, Failure::Refused(_));
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

    /// The next answer. What the daemon says by itself in between is noted.
    async fn receive(&self, descriptors_max: u32) -> Result<(DaemonRecord, Vec<OwnedFd>), Failure> {
        let mut bytes = [0; RECORD_BYTES_MAX];
        let descriptors_max = descriptors_max.max(DEVICE_PROCESS_DESCRIPTORS) as usize;
        loop {
            let received = self.connection.receive(&mut bytes, descriptors_max).await;
            let mut received = received.map_err(lost)?;
            let record = DaemonRecord::decode(&bytes[..received.bytes]);
            let record = record.map_err(ProtocolError::from)?;
            self.note(&record, &mut received.descriptors);
            if record != DaemonRecord::DeviceProcess {
                return Ok((record, received.descriptors));
            }
        }
    }

    /// Notes what the daemon says by itself.
    fn note(&self, record: &DaemonRecord, descriptors: &mut Vec<OwnedFd>) {
        match record {
            DaemonRecord::DeviceProcess => {
                if let Some(pidfd) = descriptors.pop() {
                    *lock(&self.device_process) = Some(pidfd);
                }
            }
            DaemonRecord::SessionEnded { sentence } => {
                *lock(&self.ended) = Some(sentence.clone());
            }
            DaemonRecord::Attached
            | DaemonRecord::Received { .. }
            | DaemonRecord::Refused { .. } => {}
        }
    }

    /// Why nobody serves the session's ring any more, if nobody does: the daemon said that the session is over, or it is gone,
    /// and so is its device process. While one of the two lives and the session with it, a request may be answered yet, by this
    /// device process or the next. A few system calls.
    pub(crate) fn silence(&self) -> Option<Silence> {
        let open = self.is_open();
        // All that the daemon ever said, if it is gone: nobody else's turn keeps it from being read.
        let read = self.read_news();
        if let Some(sentence) = lock(&self.ended).clone() {
            return Some(Silence::SessionEnded(sentence));
        }
        (read && !open && self.device_process_is_dead()).then_some(Silence::DaemonGone)
    }

    /// Who may run what the session was asked: the device process of now.
    pub(crate) fn executor(&self) -> Executor {
        self.read_news();
        let pidfd = lock(&self.device_process).as_ref().and_then(|pidfd| pidfd.try_clone().ok());
        Executor(pidfd)
    }

    fn device_process_is_dead(&self) -> bool {
        // A pidfd that cannot be asked says nothing; whoever waits has a deadline.
        lock(&self.device_process).as_ref().is_none_or(|pidfd| has_exited(pidfd).unwrap_or(false))
    }

    /// Reads what the daemon said by itself. False while a conversation goes on, which reads it.
    fn read_news(&self) -> bool {
        let Ok(_turn) = self.turn.try_acquire() else { return false };
        let mut bytes = [0; RECORD_BYTES_MAX];
        let most = DEVICE_PROCESS_DESCRIPTORS as usize;
        while let Ok(Some(mut received)) = self.connection.try_receive(&mut bytes, most) {
            // What cannot be read is no news; the next conversation finds the connection as it is.
            if let Ok(record) = DaemonRecord::decode(&bytes[..received.bytes]) {
                self.note(&record, &mut received.descriptors);
            }
        }
        true
    }
}

impl Silence {
    /// The failure of a copy that no executor had begun: nothing moved.
    pub(crate) fn before_start(&self) -> Failure {
        match self {
            Self::DaemonGone => Failure::NotSent(self.cause()),
            Self::SessionEnded(_) => {
                Refusal::new(RefusalCode::SessionUnknown, self.sentence()).about("session").into()
            }
        }
    }

    /// The failure of a copy that may have moved bytes.
    pub(crate) fn after_start(&self) -> Failure {
        Failure::Lost(self.cause())
    }

    fn cause(&self) -> BoxError {
        let kind = match self {
            Self::DaemonGone => io::ErrorKind::NotConnected,
            Self::SessionEnded(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, self.sentence()).into()
    }

    fn sentence(&self) -> String {
        match self {
            Self::DaemonGone => "the daemon and its device process are gone".to_owned(),
            Self::SessionEnded(why) => format!("The daemon ended the session: {why}"),
        }
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
        DaemonRecord::SessionEnded { sentence } => Silence::SessionEnded(sentence).before_start(),
        DaemonRecord::Attached | DaemonRecord::DeviceProcess | DaemonRecord::Received { .. } => {
            ProtocolError::UnexpectedRecord.into()
        }
    }
}
