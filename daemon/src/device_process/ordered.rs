//! A stream-ordered copy, from its bell to its end: what lanes and graphs share.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::RefusalCode;
use statecopy_session::{Answer, CopyRequest, Fault, MonotonicNs, Subject};

use crate::counters::{Counter, Counters};

use super::copying::{Copied, Inline, Order, Progress, Running};
use super::station::DEATHS_MAX;
use super::table::SessionTable;

/// A copy whose bell rang. It must start in time, counted from when the bell was seen.
#[derive(Debug)]
pub(super) struct OrderedCopy<D: Device> {
    request: CopyRequest,
    running: Running<D>,
    begun: MonotonicNs,
    deadline: MonotonicNs,
}

/// How far it is.
#[derive(Debug)]
pub(super) enum Step {
    /// It waits for the device.
    Waiting,
    /// A part is done, or was started.
    MovedOn,
    /// It is over: all of it is done, or it could not start in time.
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
        let running = Running::check(table, &request, hook_epoch, begun)?;
        // What an executor died under may have started: it must run again, however late.
        let patience_ns = if deaths > 0 { u64::MAX } else { patience_ns };
        let deadline = MonotonicNs(begun.0.saturating_add(patience_ns));
        Ok(Self { request, running, begun, deadline })
    }

    /// Moves it on by at most one launch.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn step(
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

    /// Whether the device was asked for any of it.
    pub(super) fn has_begun(&self) -> bool {
        self.running.has_begun()
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

/// Counts a refusal at a bell, and gives what is written of it.
pub(super) fn refused(fault: Fault, counters: &Counters) -> Answer {
    counters.add(Counter::Refusals(fault.code), 1);
    Answer { result: Err(fault), executor_ns: 0 }
}
