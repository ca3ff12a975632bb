//! The same for tokio: nothing here blocks its threads. Deadlines are the caller's (`tokio::time::timeout`): every wait here
//! can be dropped, and loses nothing then.

#![expect(unsafe_code, reason = "tokio asks for a promise that a descriptor stays open")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::doorbell::Doorbell;
use crate::process::has_exited;
use crate::seqpacket::{
    ChannelError, Connection, Received, check_message, receive_error, receive_once, send_error,
    send_once,
};

/// How many peers may wait for an accept.
const BACKLOG: i32 = 128;

/// An owner (or a loan) of one descriptor, which tokio watches.
#[derive(Debug)]
struct Watched<T>(T);

/// What may be watched: a type that holds one descriptor from its birth to its drop.
trait Holder: AsFd {}
impl Holder for Connection {}
impl Holder for Doorbell {}
impl Holder for OwnedFd {}
impl Holder for BorrowedFd<'_> {}

impl<T: Holder> AsRawFd for Watched<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

fn watch<T: Holder>(holder: T, interest: Interest) -> io::Result<AsyncFd<Watched<T>>> {
    // SAFETY: a `Holder` keeps one descriptor open, and hands out that very one, as long as it lives; `AsyncFd` owns it
    // and gives it back only after the descriptor is no longer watched.
    let watched = unsafe { AsyncFd::register_with_interest(Watched(holder), interest) };
    Ok(watched?)
}

/// One system call that does not block: again when a signal interrupts it, WouldBlock when tokio is to wait.
fn attempt<T>(call: impl FnMut() -> Result<T, Errno>) -> io::Result<T> {
    Ok(retry_on_intr(call)?)
}

/// The kernel's number in an error that [`attempt`] made.
fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// [`Connection`] for tokio. It does not touch the socket's flags, which other holders share.
#[derive(Debug)]
pub struct AsyncConnection {
    socket: AsyncFd<Watched<Connection>>,
}

impl AsyncConnection {
    /// Watches a connection. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(connection: Connection) -> Result<Self, ChannelError> {
        let socket = watch(connection, Interest::READABLE | Interest::WRITABLE)
            .map_err(|source| ChannelError::Kernel { action: "watch a socket", source })?;
        Ok(Self { socket })
    }

    /// As [`Connection::send`]. A send that is dropped has sent all or nothing.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub async fn send(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        check_message(bytes, descriptors)?;
        self.socket
            .async_io(Interest::WRITABLE, |socket| {
                let flags = SendFlags::DONTWAIT;
                attempt(|| send_once(&socket.0, bytes, descriptors, flags))
            })
            .await
            .map_err(|error| send_error(errno(&error)))
    }

    /// As [`Connection::receive`]. A receive that is dropped has taken no message.
    ///
    /// # Errors
    /// As [`Connection::receive`].
    pub async fn receive(
        &self,
        into: &mut [u8],
        descriptors_max: usize,
    ) -> Result<Received, ChannelError> {
        let arrived = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                attempt(|| receive_once(&socket.0, into, RecvFlags::DONTWAIT))
            })
            .await
            .map_err(|error| receive_error(errno(&error)))?;
        arrived.check(into.len(), descriptors_max)
    }

    /// A message that is there already; `None` when there is none. Any thread may ask, inside a runtime or outside.
    ///
    /// # Errors
    /// As [`Connection::receive`].
    pub fn try_receive(
        &self,
        into: &mut [u8],
        descriptors_max: usize,
    ) -> Result<Option<Received>, ChannelError> {
        let socket = &self.socket.get_ref().0;
        match attempt(|| receive_once(socket, into, RecvFlags::DONTWAIT)) {
            Ok(arrived) => arrived.check(into.len(), descriptors_max).map(Some),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(receive_error(errno(&error))),
        }
    }

    /// The connection, no longer watched.
    #[must_use]
    pub fn into_blocking(self) -> Connection {
        self.socket.into_inner().0
    }
}

impl AsFd for AsyncConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().0.as_fd()
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: AsyncFd<Watched<OwnedFd>>,
}

impl Listener {
    /// Binds a path at which nothing lies. The file gets the mode that the umask leaves, and stays when the listener is
    /// dropped. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`ChannelError::Path`], for example when something lies there.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = SocketAddrUnix::new(path).map_err(ChannelError::path("name", path))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(ChannelError::kernel("make a socket"))?;
        bind(&socket, &address).map_err(ChannelError::path("bind", path))?;
        listen(&socket, BACKLOG).map_err(ChannelError::path("listen on", path))?;
        let socket = watch(socket, Interest::READABLE)
            .map_err(|source| ChannelError::Kernel { action: "watch a socket", source })?;
        Ok(Self { socket })
    }

    /// The next peer.
    ///
    /// # Errors
    /// When no descriptor is left; the peer stays in the queue, and a caller that tries again at once spins.
    pub async fn accept(&self) -> Result<AsyncConnection, ChannelError> {
        let accepted = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                attempt(|| accept_with(&socket.0, SocketFlags::CLOEXEC))
            })
            .await
            .map_err(|error| ChannelError::kernel("accept a connection")(errno(&error)))?;
        AsyncConnection::new(Connection::over(accepted)?)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().0.as_fd()
    }
}

/// [`Doorbell`] for tokio.
#[derive(Debug)]
pub struct AsyncDoorbell {
    bell: AsyncFd<Watched<Doorbell>>,
}

impl AsyncDoorbell {
    /// Watches a doorbell. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(doorbell: Doorbell) -> io::Result<Self> {
        Ok(Self { bell: watch(doorbell, Interest::READABLE)? })
    }

    /// Waits for a ring and takes it away. Look for work after it. A wait that is dropped has taken no ring.
    ///
    /// # Errors
    /// What the kernel says.
    pub async fn wait(&self) -> io::Result<()> {
        self.bell
            .async_io(Interest::READABLE, |bell| {
                if bell.0.clear()? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
            })
            .await
    }

    /// The doorbell, to ring.
    #[must_use]
    pub fn doorbell(&self) -> &Doorbell {
        &self.bell.get_ref().0
    }
}

/// Waits until the process of a pidfd is dead (a zombie is). Call it inside a tokio runtime.
///
/// # Errors
/// What the kernel says.
pub async fn process_exit(pidfd: impl AsFd) -> io::Result<()> {
    let pidfd = watch(pidfd.as_fd(), Interest::READABLE)?;
    pidfd
        .async_io(Interest::READABLE, |pidfd| {
            if has_exited(pidfd.0)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
        })
        .await
}
