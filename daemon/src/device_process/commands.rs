//! The preparing thread's end of the executor: what it tells it, one thing at a time.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::JoinHandle;

use statecopy_descriptors::Doorbell;
use statecopy_kernels::device::{Device, DeviceFault};
use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::{Executor as Ring, PairNumber};

use crate::record::SlotRecord;
use crate::sync::{AtomicU64, Ordering};

use super::copying::Inline;
use super::counts::RingCounts;
use super::station::{Scope, Station};
use super::streams::Streams;
use super::table::SessionTable;

/// What the preparing thread tells the executor. Each is acknowledged with what it replaced.
pub(super) enum Command<D: Device> {
    /// A worker's ring, the doorbell that the worker rings, and buffers for inline indices and flags.
    Open(Box<Station<D>>, Doorbell),
    /// A session's new table, and buffers for its inline indices and flags.
    Install(SessionId, Arc<SessionTable<D>>, Inline),
    /// The same with layers that lie elsewhere now. Given back while a stream that has rung waits for its copy.
    Move(SessionId, Arc<SessionTable<D>>, Inline),
    /// Slots of a session's graphs, which were checked; and whether an earlier executor had them armed.
    Arm(SessionId, Vec<SlotRecord>, bool),
    /// A graph of a session is gone.
    Disarm(SessionId, PairNumber),
    /// A session is over.
    Close(SessionId),
    /// Serve what was submitted to the workers' rings, refuse what comes later. Acknowledged once nothing is left.
    Drain,
    /// The device failed under the preparing thread. Never acknowledged.
    Fail(DeviceFault),
    /// Answer everything submitted, then end.
    End,
}

impl<D: Device> Command<D> {
    /// The session whose running copy must end first.
    pub(super) fn waits_for(&self) -> Option<SessionId> {
        match self {
            Self::Install(session, ..)
            | Self::Move(session, ..)
            | Self::Disarm(session, _)
            | Self::Close(session) => Some(*session),
            Self::Open(..) | Self::Arm(..) | Self::Drain | Self::Fail(_) | Self::End => None,
        }
    }
}

/// What the executor no longer uses. Whoever gets it drops it.
pub(super) type Retired = Option<Box<dyn Send>>;

/// What became of a command.
pub(super) enum Outcome {
    /// It was carried out.
    Done(Retired),
    /// It was not: copies whose bells rang wait, and would be of other memory than they were rung for.
    Rung(Retired),
}

/// The preparing thread's hold on the executor.
pub(super) struct ExecutorHandle<D: Device> {
    commands: SyncSender<Command<D>>,
    outcomes: Receiver<Outcome>,
    bell: Doorbell,
    hook_epoch: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> ExecutorHandle<D> {
    pub(super) fn new(
        (commands, outcomes): (SyncSender<Command<D>>, Receiver<Outcome>),
        bell: Doorbell,
        hook_epoch: Arc<AtomicU64>,
        thread: JoinHandle<()>,
    ) -> Self {
        Self { commands, outcomes, bell, hook_epoch, thread: Some(thread) }
    }

    /// Gives the executor a worker's ring. It is served from now on, with requests of at most `selected_max` rows until the
    /// session's next table is installed.
    pub(super) fn open(
        &self,
        session: SessionId,
        ring: Ring,
        bell: Doorbell,
        streams: Option<Streams<D>>,
        (selected_max, counts): (usize, Arc<RingCounts>),
    ) -> Result<(), Refusal> {
        let inline = Inline::new(selected_max);
        let station = Station::new(Scope::Session(session), ring, inline, counts);
        let station = station.with_streams(streams);
        self.tell(Command::Open(Box::new(station), bell))
    }

    /// Gives the executor a session's new table. Returns when it uses the old one no more; the old one is dropped here.
    pub(super) fn install(
        &self,
        session: SessionId,
        table: Arc<SessionTable<D>>,
    ) -> Result<(), Refusal> {
        let inline = Inline::new(table.selected_max());
        self.tell(Command::Install(session, table, inline))
    }

    /// The same for a table whose layers lie in other memory than before.
    ///
    /// # Errors
    /// OVERLOADED while a stream that has rung waits for its copy; then the old one stays.
    pub(super) fn install_moved(
        &self,
        session: SessionId,
        table: Arc<SessionTable<D>>,
    ) -> Result<(), Refusal> {
        let inline = Inline::new(table.selected_max());
        self.tell(Command::Move(session, table, inline))
    }

    /// Arms slots of a session's graphs, which were checked. `resumed`: an earlier executor, whose process is dead, had them armed.
    pub(super) fn arm(
        &self,
        session: SessionId,
        slots: Vec<SlotRecord>,
        resumed: bool,
    ) -> Result<(), Refusal> {
        self.tell(Command::Arm(session, slots, resumed))
    }

    /// Disarms a graph of a session. Returns when no copy of it runs.
    pub(super) fn disarm(&self, session: SessionId, pair: PairNumber) -> Result<(), Refusal> {
        self.tell(Command::Disarm(session, pair))
    }

    /// Takes a session away. Returns when nothing of it runs.
    pub(super) fn close(&self, session: SessionId) -> Result<(), Refusal> {
        self.tell(Command::Close(session))
    }

    /// How often a hook was seen so far.
    pub(super) fn hook_epoch(&self) -> u64 {
        self.hook_epoch.load(Ordering::Acquire)
    }

    /// Returns when everything submitted to the workers' rings so far is answered; what comes later is refused.
    pub(super) fn drain(&self) -> Result<(), Refusal> {
        self.tell(Command::Drain)
    }

    /// Ends the process, because the device failed under the preparing thread. Returns only when the executor is gone.
    pub(super) fn fail(&self, reason: &str) {
        self.tell(Command::Fail(DeviceFault(reason.to_owned()))).ok();
    }

    /// Ends the executor once it has answered everything in the rings.
    pub(super) fn end(&mut self) {
        if self.tell(Command::End).is_ok()
            && let Some(thread) = self.thread.take()
        {
            thread.join().ok();
        }
    }

    fn tell(&self, command: Command<D>) -> Result<(), Refusal> {
        self.commands.send(command).map_err(|_| executor_gone())?;
        self.bell.ring();
        match self.outcomes.recv().map_err(|_| executor_gone())? {
            Outcome::Done(_retired) => Ok(()),
            Outcome::Rung(_retired) => Err(rung()),
        }
    }
}

/// The executor's thread is gone: this process ends with it.
fn executor_gone() -> Refusal {
    Refusal::new(RefusalCode::DeviceLost, "The executor is gone")
}

fn rung() -> Refusal {
    let sentence = "Streams of the session have reached copies that are not done";
    Refusal::new(RefusalCode::Overloaded, sentence)
        .remedied_by("Wait for the lanes of the session (synchronise its streams), then rebind.")
}
