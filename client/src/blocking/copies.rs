//! Copies on the calling thread: on the ring without the runtime, over gRPC by driving it.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::device::Moved;
use statecopy_proto::Direction;
use tokio::time::Instant;

use crate::attempt::{Attempts, Effect};
use crate::call::{Call, Failure};
use crate::client::Client;
use crate::copies::resolve;
use crate::error::Error;
use crate::link::Link;
use crate::ring::{Flight, RingCopies};
use crate::transport::{Carrier, each};
use crate::{Plan, PlannedCopy, Request};

use super::Driver;

/// A live link: the one that is there, or a new one, for which the runtime is driven.
pub(super) fn link(attempts: &Attempts<'_>, driver: &Driver) -> Result<Arc<Link>, Error> {
    match attempts.live_link()? {
        Some(link) => Ok(link),
        None => driver.drive(attempts.link()),
    }
}

/// A copy that was submitted, or why it was not, and the link of either.
type Submitted = (Arc<Link>, Result<Flight, Failure>);

/// Submits a copy without a look at the clock, where a link lives and its ring has a place: the common case, in which nothing
/// waits for long enough that a deadline matters. `None` elsewhere; then nothing was submitted.
fn submit_at_once(
    plan: &Plan,
    direction: Direction,
    request: &Request<'_>,
    wait: Duration,
) -> Result<Option<Submitted>, Error> {
    let Some(link) = plan.client().shared.live_link()? else { return Ok(None) };
    let Carrier::Ring(ring) = &link.carrier else { return Ok(None) };
    let left = (!wait.is_zero()).then_some(wait);
    let submitted = resolve(&link, &plan.record, direction, request, left)
        .and_then(|mut copy| ring.try_submit(&mut copy));
    Ok(submitted.transpose().map(|submitted| (link, submitted)))
}

/// A copy that was submitted, or that cannot be without waiting. See [`super::Plan::start`].
///
/// Dropping it gives up waiting and nothing else: the copy may run yet.
#[derive(Debug)]
#[must_use = "a copy that nobody waits for may run at any time"]
pub struct Started<'a> {
    plan: &'a super::Plan,
    direction: Direction,
    request: Request<'a>,
    wait: Duration,
    tried: Option<Submitted>,
}

pub(super) fn start<'a>(
    plan: &'a super::Plan,
    direction: Direction,
    request: Request<'a>,
) -> Result<Started<'a>, Error> {
    let wait = plan.plan.client().copy_deadline(&request);
    let tried = submit_at_once(&plan.plan, direction, &request, wait)?;
    Ok(Started { plan, direction, request, wait, tried })
}

impl Started<'_> {
    /// Waits for the answer on this thread, and first submits what was not.
    ///
    /// # Errors
    /// As [`crate::Plan::gather`].
    pub fn wait(self) -> Result<Moved, Error> {
        let Self { plan: super::Plan { plan, driver }, direction, request, wait, tried } = self;
        finish(plan, driver, direction, (&request, wait), tried)
    }
}

fn finish(
    plan: &Plan,
    driver: &Driver,
    direction: Direction,
    (request, wait): (&Request<'_>, Duration),
    mut tried: Option<Submitted>,
) -> Result<Moved, Error> {
    let client = plan.client();
    let mut started = None;
    if let Some((_, Ok(flight))) = &mut tried {
        match flight.look() {
            Ok(Ok(moved)) => return Ok(moved),
            Ok(Err(failure)) => tried = tried.map(|(link, _)| (link, Err(failure))),
            Err(since) => started = Some(since.into()),
        }
    }
    let started = started.unwrap_or_else(Instant::now);
    let (start, whole) = client.copy_calls_since(started, direction.label(), wait);
    let effect = Effect::Copy { start: start.deadline, repeat_unknown: request.repeat_unknown };
    let mut attempts = Attempts::new(&client.shared, whole, effect);
    loop {
        let (link, outcome) = match tried.take() {
            Some((link, submitted)) => (link, submitted.and_then(|flight| flight.wait_on(&whole))),
            None => {
                let link = link(&attempts, driver)?;
                let resolved = resolve(&link, &plan.record, direction, request, start.left());
                let outcome = resolved.and_then(|resolved| match &link.carrier {
                    Carrier::Ring(ring) => ring.submit(resolved, &start)?.wait(&whole),
                    Carrier::Grpc(grpc) => {
                        driver.drive(async { Ok(grpc.copy(whole, resolved).await) })?
                    }
                });
                (link, outcome)
            }
        };
        match outcome {
            Ok(moved) => return Ok(moved),
            Err(failure) => attempts.failed(&link, failure)?,
        }
    }
}

pub(super) fn copy_many(
    client: &Client,
    driver: &Driver,
    copies: &[PlannedCopy<'_>],
) -> Result<Vec<Result<Moved, Error>>, Error> {
    let (start, whole, effect) = client.copy_many_calls(copies);
    let mut attempts = Attempts::new(&client.shared, whole, effect);
    loop {
        let link = link(&attempts, driver)?;
        let Carrier::Ring(ring) = &link.carrier else {
            return driver.drive(client.copy_many(copies));
        };
        match copy_many_on(&link, ring, client, &start, &whole, copies) {
            Ok(answers) => return Ok(answers),
            Err(failure) => attempts.failed(&link, failure)?,
        }
    }
}

/// As many in flight as there are places.
fn copy_many_on(
    link: &Link,
    ring: &RingCopies,
    client: &Client,
    start: &Call,
    whole: &Call,
    copies: &[PlannedCopy<'_>],
) -> Result<Vec<Result<Moved, Error>>, Failure> {
    let mut answers: Vec<Option<Result<Moved, Error>>> = Vec::with_capacity(copies.len());
    let mut flying: VecDeque<(usize, Flight)> = VecDeque::new();
    for (at, copy) in copies.iter().enumerate() {
        if flying.len() == ring.slots()
            && let Some((at, flight)) = flying.pop_front()
        {
            answers[at] = Some(each(flight.wait(whole))?.map_err(Error::Refused));
        }
        let start = start.within(client.copy_deadline(&copy.request));
        let submitted =
            resolve(link, &copy.plan.record, copy.direction, &copy.request, start.left())
                .and_then(|resolved| ring.submit(resolved, &start));
        answers.push(match submitted {
            Ok(flight) => {
                flying.push_back((at, flight));
                None
            }
            Err(failure) => Some(each(Err(failure))?.map_err(Error::Refused)),
        });
    }
    for (at, flight) in flying {
        answers[at] = Some(each(flight.wait(whole))?.map_err(Error::Refused));
    }
    Ok(answers.into_iter().flatten().collect())
}

pub(super) fn submit(
    plan: &Plan,
    driver: &Arc<Driver>,
    direction: Direction,
    request: &Request<'_>,
) -> Result<InFlight, Error> {
    let client = plan.client();
    let wait = client.copy_deadline(request);
    let mut tried = submit_at_once(plan, direction, request, wait)?;
    let (start, whole) = client.copy_calls(direction.label(), wait);
    let effect = Effect::Copy { start: start.deadline, repeat_unknown: false };
    let mut attempts = Attempts::new(&client.shared, whole, effect);
    loop {
        let (link, submitted) = match tried.take() {
            Some((link, submitted)) => (link, submitted.map(Flying::Ring)),
            None => {
                let link = link(&attempts, driver)?;
                let resolved = resolve(&link, &plan.record, direction, request, start.left());
                let submitted = resolved.and_then(|resolved| match &link.carrier {
                    Carrier::Ring(ring) => ring.submit(resolved, &start).map(Flying::Ring),
                    Carrier::Grpc(grpc) => Ok(Flying::Grpc(Box::pin(grpc.copy(whole, resolved)))),
                });
                (link, submitted)
            }
        };
        match submitted {
            Ok(flying) => {
                let (client, driver) = (client.clone(), Arc::clone(driver));
                return Ok(InFlight { flying, link, client, driver, whole });
            }
            Err(failure) => attempts.failed(&link, failure)?,
        }
    }
}

enum Flying {
    Ring(Flight),
    Grpc(Pin<Box<dyn Future<Output = Result<Moved, Failure>> + Send>>),
}

/// A copy that was submitted: see [`crate::InFlight`]. Over gRPC it is sent when it is waited for, because nothing drives the
/// blocking client's runtime before.
#[must_use = "a copy that nobody waits for may run at any time"]
pub struct InFlight {
    flying: Flying,
    link: Arc<Link>,
    client: Client,
    driver: Arc<Driver>,
    whole: Call,
}

impl InFlight {
    /// Waits for the answer on this thread. See [`crate::InFlight::wait`].
    ///
    /// # Errors
    /// As [`crate::Plan::gather`].
    pub fn wait(self) -> Result<Moved, Error> {
        let Self { flying, link, client, driver, whole } = self;
        let outcome = match flying {
            Flying::Ring(flight) => flight.wait(&whole),
            Flying::Grpc(answer) => driver.drive(async { Ok(answer.await) })?,
        };
        outcome.map_err(|failure| client.gave_up(&link, &whole, failure))
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("call", &self.whole).finish_non_exhaustive()
    }
}
