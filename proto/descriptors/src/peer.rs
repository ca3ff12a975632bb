//! Who sits at the other end of a Unix socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};

/// Why a peer's credentials cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It died and was reaped between its connect and now.
    #[error("The peer is already dead")]
    Dead,
    /// The kernel does not say who it is.
    #[error("The peer's credentials cannot be read")]
    Unreadable(#[source] io::Error),
}

/// The process that connected, as the kernel recorded it at that moment. What happens to its descriptors later (a fork, an
/// exec, a transfer) does not change it.
#[derive(Debug)]
pub struct Peer {
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    /// Process id, if this process' PID namespace has one for it. For people to read: it may be used again.
    pub pid: Option<u32>,
    /// A pidfd: readable when the process is dead, though a child of its may still hold the socket. `None` where the kernel
    /// is older than Linux 6.5; then the connection's end must do.
    pub exit: Option<OwnedFd>,
}

impl Peer {
    /// Reads the credentials of a connected Unix socket.
    ///
    /// # Errors
    /// [`PeerError::Dead`], or [`PeerError::Unreadable`] for anything that is no connected Unix socket.
    pub fn of(socket: impl AsFd) -> Result<Self, PeerError> {
        let unreadable = |errno: Errno| PeerError::Unreadable(errno.into());
        let socket = socket.as_fd();
        let credentials = getsockopt(&socket, PeerCredentials).map_err(unreadable)?;
        let exit = match getsockopt(&socket, PeerPidfd) {
            Ok(pidfd) => Some(pidfd),
            Err(Errno::ENOPROTOOPT) => None,
            Err(Errno::ESRCH) => return Err(PeerError::Dead),
            Err(errno) => return Err(unreadable(errno)),
        };
        // The kernel writes 0 for a process that this PID namespace cannot see.
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
        Ok(Self { uid: credentials.uid(), gid: credentials.gid(), pid, exit })
    }
}
