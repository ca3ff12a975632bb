//! Sleeping on many doorbells at once.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::event::{Timespec, epoll::EventData};
use rustix::io::Errno;

use crate::doorbell::Doorbell;

/// Doorbells looked at in one sleep; more are seen in the next one.
const EVENTS_MAX: usize = 64;

/// A set of doorbells, each under a token of its owner's, on which one thread sleeps.
///
/// Whether one doorbell is heard depends on no other: a peer that rings for ever costs wake-ups and hides nobody.
#[derive(Debug)]
pub struct DoorbellSet {
    epoll: OwnedFd,
}

impl DoorbellSet {
    /// An empty set.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn create() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Adds a doorbell. Its token comes back when it rings.
    ///
    /// # Errors
    /// What the kernel says, also when it is in the set already.
    pub fn add(&self, bell: &Doorbell, token: u64) -> io::Result<()> {
        let data = EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, bell.as_fd(), data, epoll::EventFlags::IN)?)
    }

    /// Takes a doorbell out.
    ///
    /// # Errors
    /// What the kernel says, also when it is not in the set.
    pub fn remove(&self, bell: &Doorbell) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, bell.as_fd())?)
    }

    /// Sleeps until a doorbell rings, and says the token of each that does; none when the time is over first. A timeout of
    /// `None` waits for ever. The rings are left in place: clear each, then look for its work.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn wait(&self, timeout: Option<Duration>, mut heard: impl FnMut(u64)) -> io::Result<()> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS_MAX];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((rung, _)) => rung.iter().for_each(|event| heard(event.data.u64())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_hears_exactly_the_doorbells_that_ring() {
        let set = DoorbellSet::create().unwrap();
        let bells: Vec<_> = (0..3).map(|_| Doorbell::create().unwrap()).collect();
        for (token, bell) in (10..).zip(&bells) {
            set.add(bell, token).unwrap();
        }
        let heard = || {
            let mut tokens = Vec::new();
            set.wait(Some(Duration::ZERO), |token| tokens.push(token)).unwrap();
            tokens
        };
        assert_eq!(heard(), [0; 0]);
        bells[2].ring();
        assert_eq!(heard(), [12]);
        assert_eq!(heard(), [12], "a ring stays until it is cleared");
        bells[2].clear().unwrap();
        bells[0].ring();
        bells[1].ring();
        set.remove(&bells[1]).unwrap();
        assert_eq!(heard(), [10]);
    }
}
