//! Messages with descriptors over SOCK_SEQPACKET Unix sockets, blocking.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
    socket_domain, socket_type,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with, socketpair,
};

/// Most descriptors in one message. (The kernel's own limit is 253.)
pub const DESCRIPTORS_PER_MESSAGE_MAX: usize = 64;

/// Most bytes in one message.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;

/// Room for a few of the largest messages on their way. The kernel may give less (net.core.wmem_max), yet its default holds one.
const BUFFER_BYTES: usize = 4 * MESSAGE_BYTES_MAX;

/// Room for the control data of the largest message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE_MAX));

/// Why a message was not sent or received, or a socket not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer closed its end, or is gone.
    #[error("The peer closed the connection")]
    Closed,
    /// The timeout of [`Connection::set_timeout`] is over.
    #[error("The peer did not answer in time")]
    TimedOut,
    /// An empty message looks like the end of the connection.
    #[error("An empty message cannot be sent")]
    EmptyMessage,
    /// Too long to send.
    #[error("A message of {bytes} bytes is longer than {max}")]
    MessageTooLong {
        /// Its size.
        bytes: usize,
        /// The most.
        max: usize,
    },
    /// The message that came is longer than the buffer. It is lost, its descriptors are closed.
    #[error("The peer's message is longer than {max} bytes")]
    MessageTruncated {
        /// Size of the buffer.
        max: usize,
    },
    /// Too many descriptors to send, or more came than expected. Those that came are closed.
    #[error("A message with {count} descriptors has more than {max}")]
    TooManyDescriptors {
        /// How many.
        count: usize,
        /// The most.
        max: usize,
    },
    /// Not all descriptors of a message could be received: it has more than [`DESCRIPTORS_PER_MESSAGE_MAX`], or this process
    /// may have no more (RLIMIT_NOFILE). Those that came are closed.
    #[error(
        "Descriptors of the peer's message were lost: too many in it, or no more are allowed here"
    )]
    DescriptorsTruncated,
    /// The descriptor is no SOCK_SEQPACKET Unix socket.
    #[error("The descriptor is no SOCK_SEQPACKET Unix socket")]
    NotSeqpacket,
    /// The kernel refused to connect to, or to bind, a path.
    #[error("The kernel refused to {action} the socket {}", path.display())]
    Path {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("The kernel refused to {action}")]
    Kernel {
        /// What was tried.
        action: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl ChannelError {
    pub(crate) fn kernel(action: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Kernel { action, source: errno.into() }
    }

    pub(crate) fn path(action: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Path { action, path: path.to_owned(), source: errno.into() }
    }
}

/// A message that came whole.
#[derive(Debug)]
pub struct Received {
    /// How many bytes of the buffer it filled; at least 1.
    pub bytes: usize,
    /// Its descriptors, all with close-on-exec.
    pub descriptors: Vec<OwnedFd>,
}

/// One end of a connection. Messages keep their boundaries and their order.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

impl Connection {
    /// Two ends that are connected.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let kind = SocketType::SEQPACKET;
        let (one, other) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
            .map_err(ChannelError::kernel("make a pair of sockets"))?;
        Ok((Self::over(one)?, Self::over(other)?))
    }

    /// Connects to a listening socket.
    ///
    /// # Errors
    /// [`ChannelError::Path`] when nobody listens there.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ChannelError> {
        Self::connect_within(path, None)
    }

    /// Connects to a listening socket, and waits at most so long for a place in its queue. The timeout stays for all that
    /// follows, as by [`Connection::set_timeout`].
    ///
    /// # Errors
    /// [`ChannelError::Path`] when nobody listens there.
    pub fn connect_within(
        path: impl AsRef<Path>,
        timeout: Option<Duration>,
    ) -> Result<Self, ChannelError> {
        let path = path.as_ref();
        let address = SocketAddrUnix::new(path).map_err(ChannelError::path("name", path))?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(ChannelError::kernel("make a socket"))?;
        let connection = Self::over(socket)?;
        connection.set_timeout(timeout)?;
        connect(&connection.socket, &address).map_err(ChannelError::path("connect to", path))?;
        Ok(connection)
    }

    /// An end that was inherited or received.
    ///
    /// # Errors
    /// [`ChannelError::NotSeqpacket`]; the descriptor is closed then.
    pub fn from_fd(socket: OwnedFd) -> Result<Self, ChannelError> {
        let unix = socket_domain(&socket) == Ok(AddressFamily::UNIX);
        if !unix || socket_type(&socket) != Ok(SocketType::SEQPACKET) {
            return Err(ChannelError::NotSeqpacket);
        }
        Self::over(socket)
    }

    /// A socket that is known to be one.
    pub(crate) fn over(socket: OwnedFd) -> Result<Self, ChannelError> {
        set_socket_send_buffer_size(&socket, BUFFER_BYTES)
            .map_err(ChannelError::kernel("size a socket's send buffer"))?;
        set_socket_recv_buffer_size(&socket, BUFFER_BYTES)
            .map_err(ChannelError::kernel("size a socket's receive buffer"))?;
        Ok(Self { socket })
    }

    /// How long each later send and receive may wait; `None` is for ever. Zero is rounded up to a microsecond.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> Result<(), ChannelError> {
        let timeout = timeout.map(|timeout| timeout.max(Duration::from_micros(1)));
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&self.socket, which, timeout)
                .map_err(ChannelError::kernel("set a socket's timeout"))?;
        }
        Ok(())
    }

    /// Sends one message: 1 to [`MESSAGE_BYTES_MAX`] bytes, up to [`DESCRIPTORS_PER_MESSAGE_MAX`] descriptors. The peer gets
    /// descriptors of its own.
    ///
    /// # Errors
    /// [`ChannelError`]; then nothing was sent.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        check_message(bytes, descriptors)?;
        loop {
            match send_once(&self.socket, bytes, descriptors, SendFlags::empty()) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(send_error(errno)),
            }
        }
    }

    /// Receives one message of at most `into.len()` bytes with at most `descriptors_max` descriptors.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] at the end of the connection; another one when the message was not as expected, which is lost
    /// then and its descriptors closed.
    pub fn receive(
        &self,
        into: &mut [u8],
        descriptors_max: usize,
    ) -> Result<Received, ChannelError> {
        loop {
            match receive_once(&self.socket, into, RecvFlags::empty()) {
                Ok(arrived) => return arrived.check(into.len(), descriptors_max),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(receive_error(errno)),
            }
        }
    }

    /// The socket.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What one recvmsg brought, before it is looked at.
pub(crate) struct Arrived {
    bytes: usize,
    flags: ReturnFlags,
    descriptors: Vec<OwnedFd>,
}

impl Arrived {
    /// Accepts it whole, or drops it with its descriptors.
    pub(crate) fn check(
        self,
        bytes_max: usize,
        descriptors_max: usize,
    ) -> Result<Received, ChannelError> {
        if self.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        if self.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::MessageTruncated { max: bytes_max });
        }
        if self.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ChannelError::DescriptorsTruncated);
        }
        let count = self.descriptors.len();
        let max = descriptors_max.min(DESCRIPTORS_PER_MESSAGE_MAX);
        if count > max {
            return Err(ChannelError::TooManyDescriptors { count, max });
        }
        Ok(Received { bytes: self.bytes, descriptors: self.descriptors })
    }
}

pub(crate) fn check_message(
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), ChannelError> {
    if bytes.is_empty() {
        return Err(ChannelError::EmptyMessage);
    }
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(ChannelError::MessageTooLong { bytes: bytes.len(), max: MESSAGE_BYTES_MAX });
    }
    if descriptors.len() > DESCRIPTORS_PER_MESSAGE_MAX {
        let count = descriptors.len();
        return Err(ChannelError::TooManyDescriptors { count, max: DESCRIPTORS_PER_MESSAGE_MAX });
    }
    Ok(())
}

pub(crate) fn send_once(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let pushed = control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(pushed, "the control buffer holds what check_message lets through");
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(crate) fn receive_once(
    socket: impl AsFd,
    into: &mut [u8],
    flags: RecvFlags,
) -> Result<Arrived, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(
        socket,
        &mut [IoSliceMut::new(into)],
        &mut control,
        flags | RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptors = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(arrived) = ancillary {
            descriptors.extend(arrived);
        }
    }
    Ok(Arrived { bytes: message.bytes, flags: message.flags, descriptors })
}

pub(crate) fn send_error(errno: Errno) -> ChannelError {
    match errno {
        Errno::PIPE | Errno::CONNRESET => ChannelError::Closed,
        Errno::AGAIN => ChannelError::TimedOut,
        errno => ChannelError::kernel("send a message")(errno),
    }
}

pub(crate) fn receive_error(errno: Errno) -> ChannelError {
    match errno {
        // The peer closed its end with messages of ours unread.
        Errno::CONNRESET => ChannelError::Closed,
        Errno::AGAIN => ChannelError::TimedOut,
        errno => ChannelError::kernel("receive a message")(errno),
    }
}
