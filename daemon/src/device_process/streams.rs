//! What the streams of one session order: its lanes and its graphs.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::Refusal;
use statecopy_session::SessionMemory;

use crate::counters::Counters;

use super::counts::RingCounts;
use super::graphs::Graphs;
use super::lanes::Lanes;
use super::sessions::Sessions;
use super::station::{Trouble, Turn};
use super::table::SessionTable;

/// How streams are served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Service {
    /// Only what runs goes on.
    pub(super) paused: bool,
    /// The daemon drains: requests that come are refused.
    pub(super) closed: bool,
}

/// The lanes and the graphs of one session.
#[derive(Debug)]
pub(super) struct Streams<D: Device> {
    lanes: Lanes<D>,
    pub(super) graphs: Graphs<D>,
}

impl<D: Device> Streams<D> {
    /// Those of a session memory, if it has any. `resumed`: an earlier executor, whose process is dead, served it.
    ///
    /// # Errors
    /// When the device cannot reach the words.
    pub(super) fn open(
        device: &D,
        memory: &SessionMemory,
        resumed: bool,
        counts: &Arc<RingCounts>,
    ) -> Result<Option<Self>, Refusal> {
        let words = memory.parameters().pair_words();
        if words.is_empty() {
            return Ok(None);
        }
        let words = Arc::new(device.share_words(memory.mapping(), words)?);
        let lanes = Lanes::open(memory.clone(), Arc::clone(&words), resumed, Arc::clone(counts));
        let graphs = Graphs::new(memory.clone(), words, Arc::clone(counts));
        Ok(Some(Self { lanes, graphs }))
    }

    /// Whether a copy runs.
    pub(super) fn is_busy(&self) -> bool {
        self.lanes.is_busy() || self.graphs.is_busy()
    }

    /// Whether a copy runs, or would if it were looked for.
    pub(super) fn is_due(&self) -> bool {
        self.lanes.is_due() || self.graphs.is_due()
    }

    /// Whether a bell may ring: it wakes nobody, and is looked for.
    pub(super) fn awaits_bell(&self) -> bool {
        self.lanes.awaits_bell() || self.graphs.awaits_bell()
    }

    /// Whether nothing runs and nothing is to be taken. After the fence of the ring's own hand-shake.
    pub(super) fn may_sleep(&self) -> bool {
        self.lanes.may_sleep() && !self.graphs.is_busy()
    }

    /// Does one bounded thing for the lanes, and one for the graphs.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn turn(
        &mut self,
        launcher: &mut D::Launcher,
        (sessions, table): (&Sessions<D>, Option<&Arc<SessionTable<D>>>),
        counters: &Counters,
        Service { paused, closed }: Service,
    ) -> Result<Turn, Trouble> {
        let graphs = self.graphs.turn(launcher, (sessions, table), counters, paused)?;
        let lanes = self.lanes.turn(launcher, (sessions, table), counters, (paused, closed))?;
        Ok(graphs.max(lanes))
    }

    /// Prepares for one copy whose bell may ring soon. False: there is none that was not prepared for.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        &mut self,
        launcher: &mut D::Launcher,
        table: Option<&Arc<SessionTable<D>>>,
        hook_epoch: u64,
    ) -> Result<bool, DeviceFault> {
        Ok(self.lanes.expect(launcher, table, hook_epoch)?
            || self.graphs.expect(launcher, table, hook_epoch)?)
    }

    /// What was prepared for is gone.
    pub(super) fn expect_again(&mut self) {
        self.lanes.expect_again();
        self.graphs.expect_again();
    }

    /// The device failed.
    pub(super) fn lose(&mut self, counters: &Counters) {
        self.lanes.lose(counters);
        self.graphs.lose(counters);
    }
}
