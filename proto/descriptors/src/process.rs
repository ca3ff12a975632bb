//! Whether a process is dead, known from its pidfd and never guessed from its number.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags, getpid};

use crate::doorbell::poll_one;

/// A pidfd of this process, to send to a peer: it becomes readable when this process is dead.
///
/// # Errors
/// When no descriptor is left.
pub fn open_pidfd_self() -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(getpid(), PidfdFlags::empty())?)
}

/// A pidfd of another process. Only a parent, who has not waited for it yet, knows that `pid` still names the process it means.
///
/// # Errors
/// ESRCH when there is none; EINVAL when `pid` is 0 or no process id.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::from(rustix::io::Errno::INVAL))?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Whether the process of a pidfd is dead. A zombie is: it runs nothing and writes nothing any more.
///
/// # Errors
/// What the kernel says.
pub fn has_exited(pidfd: impl AsFd) -> io::Result<bool> {
    wait_for_exit(pidfd, Some(Duration::ZERO))
}

/// Waits until the process of a pidfd is dead; false when the time is over first. `None` waits for ever.
///
/// # Errors
/// What the kernel says.
pub fn wait_for_exit(pidfd: impl AsFd, timeout: Option<Duration>) -> io::Result<bool> {
    let pidfd: BorrowedFd<'_> = pidfd.as_fd();
    poll_one(pidfd, PollFlags::IN, timeout)
}
