//! The supervisor's handle of one device process: what the services call.
//!
//! Calls are answered by the device process that lives at the time. When it dies, the keeper starts the next one, tells
//! it every record again, and submits unanswered copies again; callers see a pause.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use statecopy_kernels::device::{DeviceDescription, Footprint, Moved};
use statecopy_proto::{
    BindingId, DataType, Direction, IndexWidth, Lane, Refusal, RefusalCode, RegionId, SessionId,
    SignatureHash,
};
use statecopy_session::{
    CopyRequest, FlagSource, IndexSource, Indices, MonotonicNs, Packed, PairNumber,
};
use tokio::sync::{mpsc, oneshot, watch};

use crate::counters::Counters;
use crate::machine::Found;
use crate::record::{
    DeviceInspection, Progress, PublishedBinding, RebindRecord, RegionRecord, RegistrationRecord,
    RingRecord, SlotRecord,
};

/// What is known of the device process now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceState {
    /// The process, 0 while there is none.
    pub pid: u32,
    /// Whether it serves.
    pub ready: bool,
    /// How often it was started again.
    pub restarts: u64,
    /// Whether it failed for good and the daemon must end.
    pub failed: bool,
    /// What the one that served last takes of the device.
    pub footprint: Footprint,
    /// What was found of the machine when it was started.
    pub found: Arc<Found>,
}

/// Where a copy's indices are.
#[derive(Debug, Clone)]
pub enum CopyIndices {
    /// Little-endian bytes, `selected` of that width.
    Inline(IndexWidth, Vec<u8>),
    /// In a registered region.
    Shared(IndexWidth, RegionId, u64),
}

/// Where a copy's flags are.
#[derive(Debug, Clone)]
pub enum CopyFlags {
    /// There are none.
    None,
    /// One byte each.
    Inline(Vec<u8>),
    /// In a registered region.
    Shared(RegionId, u64),
}

/// One copy, as a session asks for it. Nothing in it has been checked against the sealed plan.
#[derive(Debug, Clone)]
pub struct Copy {
    /// Who asks.
    pub session: SessionId,
    /// The binding or set.
    pub binding: BindingId,
    /// What the worker believes in.
    pub signature: SignatureHash,
    /// Which way.
    pub direction: Direction,
    /// Rows selected.
    pub selected: u64,
    /// Indices.
    pub indices: CopyIndices,
    /// Flags.
    pub flags: CopyFlags,
    /// The packed buffer: region, offset and size in bytes, and the type that the caller believes in.
    pub packed: (RegionId, u64, u64),
    /// The packed buffer's type.
    pub packed_dtype: DataType,
    /// The lane.
    pub lane: Lane,
    /// When it is too late to start.
    pub deadline: Instant,
}

impl Copy {
    /// The copy as a session memory carries it, with that deadline. What is inline is in this copy alone.
    #[must_use]
    pub fn request(&self, deadline: MonotonicNs, submitted_at: MonotonicNs) -> CopyRequest {
        let (width, source) = match &self.indices {
            CopyIndices::Inline(width, _) => (*width, IndexSource::Inline),
            CopyIndices::Shared(width, region, offset) => {
                (*width, IndexSource::Shared { region: *region, offset: *offset })
            }
        };
        let flags = match &self.flags {
            CopyFlags::None => FlagSource::None,
            CopyFlags::Inline(_) => FlagSource::Inline,
            CopyFlags::Shared(region, offset) => {
                FlagSource::Shared { region: *region, offset: *offset }
            }
        };
        let (region, offset, bytes) = self.packed;
        CopyRequest {
            session: self.session,
            binding: self.binding,
            signature: self.signature,
            direction: self.direction,
            selected: self.selected,
            packed: Packed { region, offset, bytes, dtype: self.packed_dtype.number() },
            indices: Indices { width, source },
            flags,
            lane: self.lane,
            deadline,
            submitted_at,
        }
    }
}

/// What the keeper of the device process is asked. Each carries the way back for its answer.
#[derive(Debug)]
pub(crate) enum Command {
    /// Serve a worker's ring.
    OpenSession(SessionId, RingRecord, Answer<()>),
    /// Map a region.
    ImportRegion(SessionId, RegionRecord, Answer<()>),
    /// Unmap a region.
    DropRegion(SessionId, RegionId, Answer<()>),
    /// Prepare, seal and publish.
    Register(SessionId, RegistrationRecord, mpsc::Sender<Progress>, Answer<Vec<PublishedBinding>>),
    /// Move layers to other memory.
    Rebind(SessionId, Vec<RebindRecord>, Answer<()>),
    /// Withdraw what a session published.
    ReleaseLayers(SessionId, Answer<()>),
    /// Arm a slot of a captured graph.
    ArmGraph(SessionId, SlotRecord, Answer<()>),
    /// Disarm the slots of a pair.
    DisarmGraph(SessionId, PairNumber, Answer<()>),
    /// Forget a session.
    CloseSession(SessionId, Answer<()>),
    /// Submit a copy.
    Copy(Box<Copy>, Answer<Moved>),
    /// Serve what the workers' rings hold, refuse what comes later.
    Drain(Answer<()>),
    /// List the compiled tables.
    Inspect(Answer<DeviceInspection>),
    /// End the device process once everything submitted is answered.
    Shutdown(Answer<()>),
}

/// The way back of one answer.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, Refusal>>;

/// The services' handle of one device. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DeviceHandle {
    description: Arc<DeviceDescription>,
    counters: Arc<Counters>,
    state: watch::Receiver<DeviceState>,
    process: watch::Receiver<Option<Arc<OwnedFd>>>,
    broken_rings: BrokenRings,
    commands: mpsc::Sender<Command>,
}

/// Who is to hear that a worker's ring makes no sense: each session of its own ring, so that no news is lost behind others.
#[derive(Debug, Clone, Default)]
pub(crate) struct BrokenRings(Arc<Mutex<BTreeMap<SessionId, oneshot::Sender<String>>>>);

impl BrokenRings {
    /// What is found in the ring of that session, if it ever breaks. Sessions that listen no more are forgotten here.
    fn listen(&self, session: SessionId) -> oneshot::Receiver<String> {
        let (told, broken) = oneshot::channel();
        let mut listeners = self.lock();
        listeners.retain(|_, listener| !listener.is_closed());
        listeners.insert(session, told);
        broken
    }

    /// Tells a session what was found in its ring. A session that is over has nobody who listens.
    pub(crate) fn tell(&self, session: SessionId, found: String) {
        let listener = self.lock().remove(&session);
        if let Some(listener) = listener {
            listener.send(found).ok();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SessionId, oneshot::Sender<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ends of a handle that its keeper holds.
#[derive(Debug)]
pub(crate) struct DeviceChannels {
    /// What is known of the device process.
    pub(crate) state: watch::Sender<DeviceState>,
    /// The pidfd of the device process, from before it hears of a ring until it is dead; `None` while there is none.
    pub(crate) process: watch::Sender<Option<Arc<OwnedFd>>>,
    /// News of broken rings.
    pub(crate) broken_rings: BrokenRings,
    /// What the services ask.
    pub(crate) commands: mpsc::Receiver<Command>,
}

/// Commands that wait between the services and the keeper.
const COMMANDS_MAX: usize = 256;

impl DeviceHandle {
    pub(crate) fn new(
        description: Arc<DeviceDescription>,
        counters: Arc<Counters>,
        state: DeviceState,
    ) -> (Self, DeviceChannels) {
        let (state, watched_state) = watch::channel(state);
        let (process, watched_process) = watch::channel(None);
        let broken_rings = BrokenRings::default();
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let handle = Self {
            description,
            counters,
            state: watched_state,
            process: watched_process,
            broken_rings: broken_rings.clone(),
            commands,
        };
        (handle, DeviceChannels { state, process, broken_rings, commands: inbox })
    }

    /// What the device says of itself.
    #[must_use]
    pub fn description(&self) -> &DeviceDescription {
        &self.description
    }

    /// What its process counts.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The state now and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<DeviceState> {
        self.state.clone()
    }

    /// The pidfd of the device process now (`None` while there is none) and its changes. Readable means dead.
    #[must_use]
    pub fn process(&self) -> watch::Receiver<Option<Arc<OwnedFd>>> {
        self.process.clone()
    }

    /// What is found in the ring of that session, if it ever breaks. Ask before the ring is served.
    #[must_use]
    pub fn broken_ring(&self, session: SessionId) -> oneshot::Receiver<String> {
        self.broken_rings.listen(session)
    }

    /// Serves a worker's ring from now on, also after a death of the device process, until the session closes.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn open_session(&self, session: SessionId, ring: RingRecord) -> Result<(), Refusal> {
        self.ask(|answer| Command::OpenSession(session, ring, answer)).await
    }

    /// Maps a region and keeps its record until it is dropped or the session closes.
    ///
    /// # Errors
    /// HANDLE_INVALID and HANDLE_UNSUPPORTED from the device, UNAVAILABLE when it is gone for good.
    pub async fn import_region(
        &self,
        session: SessionId,
        region: RegionRecord,
    ) -> Result<(), Refusal> {
        self.ask(|answer| Command::ImportRegion(session, region, answer)).await
    }

    /// Unmaps a region.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn drop_region(&self, session: SessionId, region: RegionId) -> Result<(), Refusal> {
        self.ask(|answer| Command::DropRegion(session, region, answer)).await
    }

    /// Prepares, seals and publishes all layers, in place of what the session had published, or none. Until it
    /// answers, copies of the session are NOT_SEALED.
    ///
    /// # Errors
    /// The refusal that names the layer.
    pub async fn register(
        &self,
        session: SessionId,
        registration: RegistrationRecord,
        progress: mpsc::Sender<Progress>,
    ) -> Result<Vec<PublishedBinding>, Refusal> {
        self.ask(|answer| Command::Register(session, registration, progress, answer)).await
    }

    /// Moves published layers to other memory of the same signature.
    ///
    /// # Errors
    /// STALE_PLAN, SIGNATURE_MISMATCH, REGION_UNKNOWN, OVERLOADED.
    pub async fn rebind(
        &self,
        session: SessionId,
        layers: Vec<RebindRecord>,
    ) -> Result<(), Refusal> {
        self.ask(|answer| Command::Rebind(session, layers, answer)).await
    }

    /// Withdraws what a session published. Answers when no copy of it runs.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn release_layers(&self, session: SessionId) -> Result<(), Refusal> {
        self.ask(|answer| Command::ReleaseLayers(session, answer)).await
    }

    /// Arms a slot of a captured graph until its pair is disarmed or the session closes, also after a death of the device process.
    ///
    /// # Errors
    /// As of a copy; nothing is armed then.
    pub async fn arm_graph(&self, session: SessionId, slot: SlotRecord) -> Result<(), Refusal> {
        self.ask(|answer| Command::ArmGraph(session, slot, answer)).await
    }

    /// Disarms the slots of a pair, and lets its graph go on for good. Answers when no copy of it runs.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn disarm_graph(&self, session: SessionId, pair: PairNumber) -> Result<(), Refusal> {
        self.ask(|answer| Command::DisarmGraph(session, pair, answer)).await
    }

    /// Forgets a session: withdraws, unmaps, drops records. Answers when nothing of it is left.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn close_session(&self, session: SessionId) -> Result<(), Refusal> {
        self.ask(|answer| Command::CloseSession(session, answer)).await
    }

    /// Submits a copy and waits for its one terminal answer. It outlives a death of the device process.
    ///
    /// # Errors
    /// Any refusal of the executor; DEVICE_LOST when the device process died under it twice.
    pub async fn copy(&self, copy: Copy) -> Result<Moved, Refusal> {
        self.ask(|answer| Command::Copy(Box::new(copy), answer)).await
    }

    /// Returns when every request in the workers' rings is answered. What they submit later is DRAINING.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn drain(&self) -> Result<(), Refusal> {
        self.ask(Command::Drain).await
    }

    /// Lists the compiled tables, and what the workers' rings came to.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub async fn inspect(&self) -> Result<DeviceInspection, Refusal> {
        self.ask(Command::Inspect).await
    }

    /// Ends the device process once everything submitted is answered.
    ///
    /// # Errors
    /// UNAVAILABLE when it is gone already.
    pub async fn shutdown(&self) -> Result<(), Refusal> {
        self.ask(Command::Shutdown).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Refusal> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(command(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

fn gone() -> Refusal {
    Refusal::new(RefusalCode::Unavailable, "The device process is gone and is not started again")
}
