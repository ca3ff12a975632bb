//! Copies: from a plan and a request to the words of one session, and what follows a failure.

use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::device::Moved;
use statecopy_proto::Direction;
use tokio::time::Instant;
use zerocopy::IntoBytes;

use crate::attempt::{Attempts, Effect};
use crate::call::{Call, Failure};
use crate::client::Client;
use crate::error::Error;
use crate::in_flight::{Flying, InFlight};
use crate::link::Link;
use crate::plan::PlanRecord;
use crate::request::{Flags, Indices, PlannedCopy, Request};
use crate::transport::{Carrier, ResolvedCopy, ResolvedFlags, ResolvedIndices};

impl Client {
    /// Several copies in order, each answered by itself: a refused one does not stop the next. The whole is given the
    /// longest deadline of its parts. It is repeated after an unknown outcome only if every part allows it.
    ///
    /// # Errors
    /// When the daemon cannot be asked, or all are refused together.
    pub async fn copy_many(
        &self,
        copies: &[PlannedCopy<'_>],
    ) -> Result<Vec<Result<Moved, Error>>, Error> {
        let (start, whole, effect) = self.copy_many_calls(copies);
        let mut attempts = Attempts::new(&self.shared, whole, effect);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let mut answers = Vec::with_capacity(copies.len());
                let mut sent = Vec::new();
                for copy in copies {
                    let call = start.within(self.copy_deadline(&copy.request));
                    let plan = &copy.plan.record;
                    match resolve(&link, plan, copy.direction, &copy.request, call.left()) {
                        Ok(resolved) => {
                            sent.push(resolved);
                            answers.push(None);
                        }
                        Err(Failure::Refused(refusal)) => answers.push(Some(Err(refusal))),
                        Err(failure) => return Err(failure),
                    }
                }
                let done = link.carrier.copy_many(&start, &attempts.call, sent).await?;
                Ok((answers, done))
            };
            match done.await {
                Ok((answers, done)) => {
                    // The transport answers all that was sent, in order.
                    let mut done = done.into_iter();
                    let all =
                        answers.into_iter().filter_map(|answer| answer.or_else(|| done.next()));
                    return Ok(all.map(|answer| answer.map_err(Error::Refused)).collect());
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// The calls of [`Client::copy_many`], as of [`Client::copy_calls`], and what repeating it does.
    pub(crate) fn copy_many_calls(&self, copies: &[PlannedCopy<'_>]) -> (Call, Call, Effect) {
        let deadlines = copies.iter().map(|copy| self.copy_deadline(&copy.request));
        let wait = deadlines.max().unwrap_or(self.shared.options.call_timeout);
        let repeat_unknown = copies.iter().all(|copy| copy.request.repeat_unknown);
        let (start, whole) = self.copy_calls("copy many", wait);
        (start, whole, Effect::Copy { start: start.deadline, repeat_unknown })
    }

    pub(crate) async fn copy(
        &self,
        plan: &PlanRecord,
        direction: Direction,
        request: Request<'_>,
    ) -> Result<Moved, Error> {
        let (start, whole) = self.copy_calls(direction.label(), self.copy_deadline(&request));
        let effect = Effect::Copy { start: start.deadline, repeat_unknown: request.repeat_unknown };
        let mut attempts = Attempts::new(&self.shared, whole, effect);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let resolved = resolve(&link, plan, direction, &request, start.left())?;
                link.carrier.copy(&start, &attempts.call, resolved).await
            };
            match done.await {
                Ok(moved) => return Ok(moved),
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// Submits a copy, once a link is there. It is not repeated by itself once it was sent.
    pub(crate) async fn submit(
        &self,
        plan: &PlanRecord,
        direction: Direction,
        request: Request<'_>,
    ) -> Result<InFlight, Error> {
        let (start, whole) = self.copy_calls(direction.label(), self.copy_deadline(&request));
        let effect = Effect::Copy { start: start.deadline, repeat_unknown: false };
        let mut attempts = Attempts::new(&self.shared, whole, effect);
        loop {
            let link = attempts.link().await?;
            let submitted = async {
                let resolved = resolve(&link, plan, direction, &request, start.left())?;
                Ok(match &link.carrier {
                    Carrier::Ring(ring) => Flying::Ring(ring.submit_task(resolved, &start).await?),
                    Carrier::Grpc(grpc) => Flying::Grpc(tokio::spawn(grpc.copy(whole, resolved))),
                })
            };
            match submitted.await {
                Ok(flying) => return Ok(InFlight::new(flying, link, self.clone(), whole)),
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    pub(crate) fn copy_deadline(&self, request: &Request<'_>) -> Duration {
        request.deadline.unwrap_or(self.shared.options.call_timeout)
    }

    /// The call whose deadline is the copy's start, and the one whose deadline is its answer.
    pub(crate) fn copy_calls(&self, name: &'static str, wait: Duration) -> (Call, Call) {
        self.copy_calls_since(Instant::now(), name, wait)
    }

    /// The same for a copy that began before.
    pub(crate) fn copy_calls_since(
        &self,
        started: Instant,
        name: &'static str,
        wait: Duration,
    ) -> (Call, Call) {
        let slack = self.shared.options.copy_slack;
        let whole = Call::since(name, started, wait.saturating_add(slack));
        (whole.part(wait), whole)
    }
}

/// A copy in the words of one session. `left` is what is left until it must have started.
pub(crate) fn resolve<'a>(
    link: &Link,
    plan: &PlanRecord,
    direction: Direction,
    request: &Request<'a>,
    left: Option<Duration>,
) -> Result<ResolvedCopy<'a>, Failure> {
    let binding = plan.binding(link)?;
    let selected = request.indices.selected();
    let indices = match &request.indices {
        Indices::Int32(values) => ResolvedIndices::Int32(values),
        Indices::Int64(values) => ResolvedIndices::Int64(values),
        Indices::Shared { width, at, .. } => ResolvedIndices::Shared(*width, link.slice(at)?),
    };
    let flags = match &request.flags {
        None => ResolvedFlags::None,
        Some(Flags::Bytes(flags)) => ResolvedFlags::Inline(flags),
        Some(Flags::Bools(flags)) => ResolvedFlags::Inline(flags.as_bytes()),
        Some(Flags::Shared(at)) => ResolvedFlags::Shared(link.slice(at)?),
    };
    Ok(ResolvedCopy {
        direction,
        binding: binding.id,
        signature: binding.signature,
        selected,
        indices,
        flags,
        packed: link.slice(&request.packed)?,
        packed_dtype: plan.dtype,
        packed_bytes: plan.packed_bytes(selected),
        deadline: left.ok_or(Failure::Late)?,
        lane: request.lane,
        max_selected: plan.max_selected,
        held: [
            Some(Arc::clone(&request.packed.region.record)),
            match &request.indices {
                Indices::Shared { at, .. } => Some(Arc::clone(&at.region.record)),
                Indices::Int32(_) | Indices::Int64(_) => None,
            },
            match &request.flags {
                Some(Flags::Shared(at)) => Some(Arc::clone(&at.region.record)),
                Some(Flags::Bytes(_) | Flags::Bools(_)) | None => None,
            },
        ],
    })
}
