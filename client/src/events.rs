//! What the daemon tells a session by itself.

use std::time::Duration;

use statecopy_proto::v1;
use tonic::Streaming;

use crate::address::Address;
use crate::call::{Call, Failure};
use crate::error::Error;
use crate::link::Link;

/// Something that happened to the daemon or to this session.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The daemon finishes what it accepted, and then ends.
    Draining {
        /// How long it takes at most.
        grace: Duration,
    },
    /// The device process died and another one serves; bindings came back by themselves.
    DeviceRestarted {
        /// The new process, as the daemon's PID namespace sees it.
        pid: u32,
        /// Restarts so far.
        restarts: u64,
    },
    /// The daemon ended the session.
    SessionEnded {
        /// Why.
        reason: String,
    },
}

/// The events of one session.
#[derive(Debug)]
pub struct Events {
    stream: Streaming<v1::Event>,
    call: Call,
    address: Address,
}

impl Events {
    pub(crate) async fn open(link: &Link, call: &Call, address: &Address) -> Result<Self, Failure> {
        // The stream is open-ended: no grpc-timeout, only its beginning is waited for.
        let request = v1::EventsRequest { session: Some(link.reference()) };
        let stream = call.answer(link.sessions().events(request)).await?;
        Ok(Self { stream, call: *call, address: address.clone() })
    }

    /// The next event; `None` when the stream has ended. Waits as long as it takes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the daemon is gone. Ask the client for the events of its next session then.
    pub async fn next(&mut self) -> Result<Option<Event>, Error> {
        loop {
            let message = match self.stream.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(status) => {
                    return Err(self.call.error(&self.address, Failure::of(status)));
                }
            };
            if let Some(event) = read(message) {
                return Ok(Some(event));
            }
        }
    }
}

/// `None` for an event of a newer daemon.
fn read(message: v1::Event) -> Option<Event> {
    match message.event? {
        v1::event::Event::Draining(draining) => {
            Some(Event::Draining { grace: Duration::from_millis(draining.grace_ms.into()) })
        }
        v1::event::Event::DeviceRestarted(restarted) => Some(Event::DeviceRestarted {
            pid: restarted.device_process_pid,
            restarts: restarted.restarts,
        }),
        v1::event::Event::SessionEnded(ended) => Some(Event::SessionEnded { reason: ended.reason }),
    }
}
