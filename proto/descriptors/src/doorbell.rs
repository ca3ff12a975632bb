//! Something to sleep on until another thread or process rings.

use std::fs::read_link;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, retry_on_intr, write};

/// Why a descriptor is no doorbell.
#[derive(Debug, thiserror::Error)]
pub enum DoorbellError {
    /// It leads to something else.
    #[error("The descriptor is no eventfd but {found}")]
    NotEventfd {
        /// What it leads to.
        found: String,
    },
    /// It cannot be told without /proc.
    #[error("What the descriptor is cannot be read from /proc")]
    Unknown(#[source] io::Error),
}

/// An eventfd that does not block. Any number of rings before a look are one ring; none is lost.
///
/// A peer that holds it can ring, clear it, and change the flags of the open file. So never ring a doorbell that an untrusted
/// peer holds: with O_NONBLOCK taken away and its counter full, ringing would block. Waiting for it and clearing it never block.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
}

impl Doorbell {
    /// A new doorbell, not rung.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn create() -> io::Result<Self> {
        Ok(Self { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// A doorbell that another process made.
    ///
    /// # Errors
    /// When it is no eventfd, or this process has no /proc to tell by. The descriptor is closed then.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, DoorbellError> {
        let target = read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .map_err(DoorbellError::Unknown)?;
        let found = target.to_string_lossy();
        if found != "anon_inode:[eventfd]" {
            return Err(DoorbellError::NotEventfd { found: found.into_owned() });
        }
        Ok(Self { fd })
    }

    /// Another handle of the same doorbell.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Another descriptor of the same doorbell, to send.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Rings: whoever waits now, or looks next, goes on. A full counter is no failure, since it rings already.
    ///
    /// # Panics
    /// Never: an open eventfd takes eight bytes.
    pub fn ring(&self) {
        match retry_on_intr(|| write(&self.fd, &1_u64.to_ne_bytes())) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(errno) => unreachable!("an eventfd refused a ring: {errno}"),
        }
    }

    /// Takes the ring away; true if there was one. Clear first, look for work after: a ring between the two is kept.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn clear(&self) -> io::Result<bool> {
        loop {
            match self.read_now() {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits for a ring and takes it away; false when the time is over first. `None` waits for ever.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.map(Deadline::after);
        loop {
            if self.clear()? {
                return Ok(true);
            }
            let left = deadline.as_ref().map(Deadline::left);
            if !poll_one(self.as_fd(), PollFlags::IN, left)? {
                return Ok(false);
            }
        }
    }

    /// Reads the counter without blocking, even if a peer took O_NONBLOCK away from the open file.
    fn read_now(&self) -> Result<usize, Errno> {
        /// preadv2 without a position.
        const NO_POSITION: u64 = u64::MAX;
        let mut counter = [0; size_of::<u64>()];
        let mut into = [IoSliceMut::new(&mut counter)];
        match preadv2(&self.fd, &mut into, NO_POSITION, ReadWriteFlags::NOWAIT) {
            // An old kernel's eventfd knows no such flag.
            Err(Errno::OPNOTSUPP) => read(&self.fd, &mut counter),
            done => done,
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of the descriptors can be read (or has failed or ended), and says which is the first of them; `None` when
/// the time is over first. A timeout of `None` waits for ever.
///
/// # Errors
/// What the kernel says.
pub fn wait_any(
    descriptors: &[BorrowedFd<'_>],
    timeout: Option<Duration>,
) -> io::Result<Option<usize>> {
    let mut waiting: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN))
        .collect();
    if !poll_all(&mut waiting, timeout)? {
        return Ok(None);
    }
    Ok(waiting.iter().position(|entry| !entry.revents().is_empty()))
}

/// Waits for one descriptor; false when the time is over first.
pub(crate) fn poll_one(
    descriptor: BorrowedFd<'_>,
    events: PollFlags,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    poll_all(&mut [PollFd::from_borrowed_fd(descriptor, events)], timeout)
}

fn poll_all(waiting: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = timeout.map(Deadline::after);
    loop {
        let left = deadline.as_ref().map(|deadline| timespec(deadline.left()));
        match poll(waiting, left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// A point in time, or never when it is too far away to be told.
struct Deadline(Option<Instant>);

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    fn left(&self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
