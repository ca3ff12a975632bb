//! News that nobody asked for, on their way to the supervisor.
//!
//! The link may be full, and whoever sends on it waits then. So a thread of its own sends them, and the executor hands them
//! over without waiting: what finds no place is offered again once there is one, which the executor's doorbell says.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;

use statecopy_descriptors::{Connection, Doorbell};
use statecopy_proto::SessionId;
use statecopy_session::RingBroken;

use crate::link::Reply;

use super::reply;

/// News that may wait for the link.
const WAITING_MAX: usize = 64;

/// The executor's hold on the thread that sends.
#[derive(Debug)]
pub(super) struct News {
    waiting: SyncSender<(SessionId, RingBroken)>,
}

impl News {
    /// Starts the thread. It rings `bell` for each one that it sent, and ends with the executor.
    ///
    /// # Errors
    /// When there is no thread.
    pub(super) fn start(link: Arc<Connection>, bell: Doorbell) -> io::Result<Self> {
        let (waiting, inbox) = sync_channel(WAITING_MAX);
        thread::Builder::new()
            .name("news".to_owned())
            .spawn(move || send_all(&link, &bell, &inbox))?;
        Ok(Self { waiting })
    }

    /// Hands over that the ring of that session makes no sense. False when there is no place: offer it again after the
    /// doorbell rang.
    pub(super) fn offer(&self, session: SessionId, broken: RingBroken) -> bool {
        // Without its thread the link has failed, and this process is about to end.
        !matches!(self.waiting.try_send((session, broken)), Err(TrySendError::Full(_)))
    }
}

fn send_all(link: &Connection, bell: &Doorbell, inbox: &Receiver<(SessionId, RingBroken)>) {
    for (session, broken) in inbox {
        let reason = broken.to_string();
        if reply(link, 0, Reply::RingBroken { session, reason }).is_err() {
            // The preparing thread finds the same, and ends the process.
            return;
        }
        bell.ring();
    }
}
