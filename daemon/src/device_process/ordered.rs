//! A stream-ordered copy, from its bell to its end: what lanes and graphs share.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::RefusalCode;
use statecopy_session::{Answer, CopyRequest, Fault, MonotonicNs, Subject};

use crate::counters::{Counter, Counters};

use super::copying::{self, Copied, Inline, Order, Progress};
use super::station::{DEATHS_MAX, Trouble, Turn};
use super::table::SessionTable;

/// A copy whose bell rang. It must start in time, counted from when the bell was seen.
#[derive(Debug)]
pub(super) struct OrderedCopy<D: Device> {
    request: CopyRequest,
    running: copying::Running<D>,
    begun: MonotonicNs,
    deadline: MonotonicNs,
}

/// Copies that run, the one that began first first: none is passed over for ever. Each is known by its place in an order.
#[derive(Debug)]
pub(super) struct Running<D: Device, P>(Vec<(P, OrderedCopy<D>)>);

/// A copy that is over: all of it is done, or it could not start in time.
#[derive(Debug)]
pub(super) struct Over<D: Device, P> {
    pub(super) place: P,
    pub(super) copy: OrderedCopy<D>,
    pub(super) result: Result<Copied, Fault>,
}

impl<D: Device, P: Copy> Running<D, P> {
    /// None, and room for so many.
    pub(super) fn with_room(copies: usize) -> Self {
        Self(Vec::with_capacity(copies))
    }

    /// Makes room for so many, where one is more than was thought of.
    pub(super) fn make_room(&mut self, copies: usize) {
        self.0.reserve(copies.saturating_sub(self.0.len()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What runs.
    pub(super) fn places(&self) -> impl Iterator<Item = P> + '_ {
        self.0.iter().map(|(place, _)| *place)
    }

    pub(super) fn push(&mut self, place: P, copy: OrderedCopy<D>) {
        self.0.push((place, copy));
    }

    /// Moves the first that can on by one launch; gives it where it is over.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn step<'a>(
        &mut self,
        launcher: &mut D::Launcher,
        order_of: impl Fn(P) -> Order<'a, D>,
    ) -> Result<(Turn, Option<Over<D, P>>), Trouble> {
        let mut turn = Turn::Idle;
        for at in 0..self.0.len() {
            let (place, copy) = &mut self.0[at];
            match copy.step(launcher, &order_of(*place)).map_err(Trouble::Device)? {
                Step::Waiting => turn = turn.max(Turn::Waiting),
                Step::MovedOn => return Ok((Turn::Progressed, None)),
                Step::Over(result) => {
                    let (place, copy) = self.0.remove(at);
                    return Ok((Turn::Progressed, Some(Over { place, copy, result })));
                }
            }
        }
        Ok((turn, None))
    }

    /// The device failed: what it was given any of. It may still write for those.
    pub(super) fn lost(&self) -> impl Iterator<Item = P> + '_ {
        let begun = self.0.iter().filter(|(_, copy)| copy.running.has_begun());
        begun.map(|(place, _)| *place)
    }
}

/// How far a copy is.
#[derive(Debug)]
enum Step {
    /// It waits for the device.
    Waiting,
    /// A part is done, or was started.
    MovedOn,
    /// It is over.
    Over(Result<Copied, Fault>),
}

impl<D: Device> OrderedCopy<D> {
    /// Holds a request whose bell rang against the sealed plan. `deaths`: executors that began it and died.
    ///
    /// # Errors
    /// The first rule that it breaks; not a byte moved.
    pub(super) fn begin(
        table: Option<&Arc<SessionTable<D>>>,
        request: CopyRequest,
        (patience_ns, deaths): (u64, u8),
        hook_epoch: u64,
    ) -> Result<Self, Fault> {
        if deaths >= DEATHS_MAX {
            return Err(Fault::of(RefusalCode::DeviceLost));
        }
        let begun = MonotonicNs::now();
        let running = copying::Running::check(table, &request, hook_epoch, begun)?;
        // What an executor died under may have started: it must run again, however late.
        let patience_ns = if deaths > 0 { u64::MAX } else { patience_ns };
        let deadline = MonotonicNs(begun.0.saturating_add(patience_ns));
        Ok(Self { request, running, begun, deadline })
    }

    /// Prepares for a request whose bell may ring soon, if it could run now. Nothing of what the request names is held: it may be
    /// gone by then.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        launcher: &mut D::Launcher,
        table: Option<&Arc<SessionTable<D>>>,
        request: &CopyRequest,
        hook_epoch: u64,
    ) -> Result<(), DeviceFault> {
        match copying::Running::check(table, request, hook_epoch, MonotonicNs(0)) {
            Ok(running) => running.expect(launcher, request),
            Err(_) => Ok(()),
        }
    }

    /// Moves it on by at most one launch.
    ///
    /// # Errors
    /// When the device failed.
    fn step(
        &mut self,
        launcher: &mut D::Launcher,
        order: &Order<'_, D>,
    ) -> Result<Step, DeviceFault> {
        let progress = self.running.step(launcher, Inline::none(), &self.request, Some(order))?;
        Ok(match progress {
            Progress::Waiting if self.is_late() => Step::Over(Err(self.late())),
            Progress::Waiting => Step::Waiting,
            Progress::MovedOn => Step::MovedOn,
            Progress::Done(copied) => Step::Over(Ok(copied)),
        })
    }

    /// Counts it, done. Gives the nanoseconds since its bell was seen.
    pub(super) fn count(&self, copied: &Copied, counters: &Counters) -> u64 {
        let executor_ns = self.waited(MonotonicNs::now());
        copied.count(self.request.direction, executor_ns, counters);
        executor_ns
    }

    fn is_late(&self) -> bool {
        !self.running.has_begun() && MonotonicNs::now() >= self.deadline
    }

    fn late(&self) -> Fault {
        Subject::Deadline.fault(self.waited(MonotonicNs::now()), self.waited(self.deadline))
    }

    fn waited(&self, until: MonotonicNs) -> u64 {
        u64::try_from(until.since(self.begun).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What is written of a copy that the device failed under. Its waits are let go by who knows the process dead: until then the device
/// may write.
pub(super) fn lost(counters: &Counters) -> Answer {
    refused(Subject::Device.fault(0, 0), counters)
}

/// Counts a refusal at a bell, and gives what is written of it.
pub(super) fn refused(fault: Fault, counters: &Counters) -> Answer {
    counters.add(Counter::Refusals(fault.code), 1);
    Answer { result: Err(fault), executor_ns: 0 }
}
