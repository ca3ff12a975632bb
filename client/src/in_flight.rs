//! Copies that were submitted and are waited for later.

use std::sync::Arc;

use statecopy_kernels::device::Moved;
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use crate::call::{Call, Failure};
use crate::client::Client;
use crate::error::Error;
use crate::link::Link;
use crate::ring::TaskFlight;

/// A copy that was submitted. Several may be in flight at once. On the ring those of one lane run in the order submitted; over
/// gRPC they overtake each other, so wait for one before submitting another that must follow it.
///
/// Dropping it, or the future of [`InFlight::wait`], gives up waiting and nothing else: the copy may run yet, so leave its
/// buffers alone until a later copy of the same lane was answered. Until its answer comes, its place in the ring and the
/// memory that it touches are kept. It also keeps the session.
#[derive(Debug)]
#[must_use = "a copy that nobody waits for may run at any time"]
pub struct InFlight {
    flying: Flying,
    link: Arc<Link>,
    client: Client,
    whole: Call,
}

#[derive(Debug)]
pub(crate) enum Flying {
    Ring(TaskFlight),
    Grpc(JoinHandle<Result<Moved, Failure>>),
}

impl InFlight {
    pub(crate) fn new(flying: Flying, link: Arc<Link>, client: Client, whole: Call) -> Self {
        Self { flying, link, client, whole }
    }

    /// Waits for the answer, until the copy's deadline and [`copy_slack`](crate::ConnectOptions::copy_slack) have passed. It
    /// is not submitted again by itself, whatever became of the daemon.
    ///
    /// # Errors
    /// As [`Plan::gather`](crate::Plan::gather).
    pub async fn wait(self) -> Result<Moved, Error> {
        let Self { flying, link, client, whole } = self;
        let outcome = match flying {
            Flying::Ring(flight) => flight.wait(&whole).await,
            Flying::Grpc(task) => match timeout_at(whole.deadline, task).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(stopped)) => Err(Failure::Lost(stopped.into())),
                Err(_) => Err(Failure::Unanswered),
            },
        };
        outcome.map_err(|failure| client.gave_up(&link, &whole, failure))
    }
}

impl Client {
    /// The error of a copy that is not submitted again.
    pub(crate) fn gave_up(&self, link: &Link, whole: &Call, failure: Failure) -> Error {
        if failure.ends_link() {
            link.retire();
        }
        self.shared.error(whole, failure)
    }
}
