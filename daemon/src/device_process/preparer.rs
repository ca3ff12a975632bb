//! The preparing thread: imports, prepares, seals, binds and tears down, one request of the supervisor at a time.
//!
//! Whatever it makes for the executor it hands over whole, and it takes back what the executor no longer uses: mappings
//! are dropped here, never on the executor's thread.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use statecopy_descriptors::Doorbell;
use statecopy_kernels::device::{AllocationId, Announced, Device, Import as _, Piece, Region};
use statecopy_kernels::guard::ServingGuard;
use statecopy_proto::{Refusal, RefusalCode, RegionId, SessionId};
use statecopy_session::{MonotonicNs, PairNumber, SessionMemory, Waker};

use crate::record::{
    DeviceInspection, LayerRecord, Progress, PublishedBinding, RebindRecord, RegistrationRecord,
    RingInspection, SetRecord, SlotRecord, Stage,
};

use super::checks::check;
use super::commands::ExecutorHandle;
use super::compiled::{CompiledTable, Tables};
use super::counts::RingCounts;
use super::plans::{self, Absent, Published, bind_awake};
use super::scratch::Trials;
use super::streams::Streams;
use super::table::{Bound, Regions, SessionTable, Targets, Terms, awake, selected_max};

/// What the preparing thread keeps of one session.
#[derive(Debug)]
struct Session<D: Device> {
    regions: Regions<D>,
    layers: Vec<(LayerRecord, Arc<CompiledTable<D>>)>,
    sets: Vec<SetRecord>,
    targets: Option<Arc<Targets<D>>>,
    counts: Arc<RingCounts>,
    /// Whether its memory has words for graphs.
    has_graphs: bool,
}

impl<D: Device> Default for Session<D> {
    fn default() -> Self {
        Self {
            regions: Regions::<D>::default(),
            layers: Vec::new(),
            sets: Vec::new(),
            targets: None,
            counts: Arc::default(),
            has_graphs: false,
        }
    }
}

impl<D: Device> Session<D> {
    fn table(&self) -> Arc<SessionTable<D>> {
        Arc::new(SessionTable { regions: self.regions.clone(), targets: self.targets.clone() })
    }
}

/// The preparing thread's state.
pub(super) struct Preparer<D: Device> {
    device: Arc<D>,
    guard: Arc<ServingGuard>,
    executor: ExecutorHandle<D>,
    tables: Tables<D>,
    trials: Trials<D>,
    sessions: HashMap<SessionId, Session<D>>,
    mappings: HashMap<AllocationId, Weak<D::Region>>,
    /// The region that is being mapped. Dropped with a piece that is refused, so that nothing of it stays.
    importing: Option<(SessionId, RegionId, D::Import)>,
    launch_bytes_max: u64,
}

impl<D: Device> Preparer<D> {
    pub(super) fn new(
        device: Arc<D>,
        guard: Arc<ServingGuard>,
        executor: ExecutorHandle<D>,
        launch_bytes_max: u64,
    ) -> Self {
        Self {
            device,
            guard,
            executor,
            tables: Tables::default(),
            trials: Trials::default(),
            sessions: HashMap::new(),
            mappings: HashMap::new(),
            importing: None,
            launch_bytes_max,
        }
    }

    /// Serves a worker's ring. A session whose ring was served by an earlier device process goes on where that one stopped.
    pub(super) fn open_session(
        &mut self,
        session: SessionId,
        memory: &SessionMemory,
        bell: Doorbell,
        resumed: bool,
    ) -> Result<(), Refusal> {
        let ring = match resumed {
            false => memory.executor(Waker::Futex),
            true => memory.resume_executor(Waker::Futex),
        };
        let kept = self.sessions.entry(session).or_default();
        let counts = Arc::clone(&kept.counts);
        let streams = Streams::open(&*self.device, memory, resumed, &counts)?;
        kept.has_graphs = streams.is_some();
        let selected_max = kept.targets.as_deref().map_or(0, selected_max);
        self.executor.open(session, ring, bell, streams, (selected_max, counts))
    }

    /// Maps some pieces of a region; with the last ones it is there, after a refusal nothing of it is. A part of another
    /// region than the one that is being mapped begins that one instead.
    pub(super) fn import_part(
        &mut self,
        (session, region): (SessionId, RegionId),
        announced: Announced,
        pieces: Vec<Piece>,
        last: bool,
    ) -> Result<(), Refusal> {
        let under_way = self.importing.take().filter(|at| (at.0, at.1) == (session, region));
        let mut import = match under_way {
            Some((_, _, import)) => import,
            None => self.device.import(announced)?,
        };
        for piece in pieces {
            import.add(piece)?;
        }
        if last {
            return self.adopt(session, region, import.finish()?);
        }
        self.importing = Some((session, region, import));
        Ok(())
    }

    /// Two regions of one allocation share one mapping.
    fn adopt(
        &mut self,
        session: SessionId,
        region: RegionId,
        imported: D::Region,
    ) -> Result<(), Refusal> {
        let allocation = imported.allocation();
        self.mappings.retain(|_, mapping| mapping.strong_count() > 0);
        let shared = match self.mappings.get(&allocation).and_then(Weak::upgrade) {
            Some(mapping) if mapping.bytes() == imported.bytes() => mapping,
            _ => Arc::new(imported),
        };
        self.mappings.insert(allocation, Arc::downgrade(&shared));
        self.sessions.entry(session).or_default().regions.insert(region, shared);
        self.install(session)
    }

    /// Unmaps a region. Layers in it fall asleep: their tables stay, so that a rebind need not prepare again.
    pub(super) fn drop_region(
        &mut self,
        session: SessionId,
        region: RegionId,
    ) -> Result<(), Refusal> {
        let Some(kept) = self.sessions.get_mut(&session) else { return Ok(()) };
        kept.regions.remove(&region);
        if let Some(targets) = &kept.targets {
            let put_to_sleep = |bound: &Bound<D>| match bound {
                Bound::Awake(target) if target.lies_in(region) => Bound::Asleep,
                bound => bound.clone(),
            };
            let left = targets.iter().map(|(id, bound)| (*id, put_to_sleep(bound))).collect();
            kept.targets = Some(Arc::new(left));
        }
        self.install(session)
    }

    /// Prepares, seals and publishes, in place of what the session had published; on a refusal nothing is published.
    pub(super) fn register(
        &mut self,
        session: SessionId,
        registration: RegistrationRecord,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<PublishedBinding>, Refusal> {
        self.replace(session, registration, progress, Absent::Refused)
    }

    /// Publishes again what an earlier device process had published. A layer whose region was released since sleeps on.
    pub(super) fn restore(
        &mut self,
        session: SessionId,
        registration: RegistrationRecord,
    ) -> Result<(), Refusal> {
        self.replace(session, registration, &mut |_| {}, Absent::Asleep).map(drop)
    }

    fn replace(
        &mut self,
        session: SessionId,
        registration: RegistrationRecord,
        progress: &mut dyn FnMut(Progress),
        absent: Absent,
    ) -> Result<Vec<PublishedBinding>, Refusal> {
        // Held until the new layers have found those that still serve them.
        let earlier = self.sessions.get(&session).map(|kept| kept.layers.clone());
        self.withdraw(session)?;
        self.guard.open();
        let outcome = self.publish(session, registration, progress, absent);
        self.shut_if_serving();
        drop(earlier);
        outcome
    }

    fn publish(
        &mut self,
        session: SessionId,
        registration: RegistrationRecord,
        progress: &mut dyn FnMut(Progress),
        absent: Absent,
    ) -> Result<Vec<PublishedBinding>, Refusal> {
        let prepared = plans::prepare(
            &*self.device,
            (&mut self.tables, &mut self.trials),
            registration,
            progress,
        )?;
        let sealed = prepared.seal(&*self.device, progress)?;
        let total = u32::try_from(sealed.layers()).unwrap_or(u32::MAX);
        progress(Progress { stage: Stage::Publishing, layers_done: 0, layers_total: total });
        let terms = self.terms();
        let kept = self.sessions.entry(session).or_default();
        let Published { targets, layers, sets } =
            sealed.publish(&*self.device, &kept.regions, absent, terms)?;
        let published = plans::published(&targets);
        kept.layers = layers;
        kept.sets = sets;
        kept.targets = Some(Arc::new(targets));
        self.guard.shut();
        self.install(session)?;
        progress(Progress { stage: Stage::Publishing, layers_done: total, layers_total: total });
        Ok(published)
    }

    /// Moves layers to other memory of the same signature, with the tables they have.
    pub(super) fn rebind(
        &mut self,
        session: SessionId,
        moves: &[RebindRecord],
    ) -> Result<(), Refusal> {
        self.guard.open();
        let outcome = self.rebind_layers(session, moves);
        self.shut_if_serving();
        outcome
    }

    fn rebind_layers(&mut self, session: SessionId, moves: &[RebindRecord]) -> Result<(), Refusal> {
        let terms = self.terms();
        let kept = self.sessions.entry(session).or_default();
        let mut layers = kept.layers.clone();
        for moved in moves {
            let (layer, table) = layers
                .iter_mut()
                .find(|(layer, _)| layer.binding == moved.binding)
                .ok_or_else(|| stale(moved))?;
            table.check_signature(&*self.device, &layer.name, &moved.placement)?;
            layer.region = moved.region;
            layer.placement = moved.placement.clone();
        }
        let targets = bind_awake(&*self.device, &kept.regions, &layers, &kept.sets, terms)?;
        let targets = Some(Arc::new(targets));
        let table = SessionTable { regions: kept.regions.clone(), targets: targets.clone() };
        self.executor.install_moved(session, Arc::new(table))?;
        kept.layers = layers;
        kept.targets = targets;
        Ok(())
    }

    /// Arms slots of captured graphs, all or none. `resumed`: an earlier device process had them armed; then they are checked only
    /// when their graphs ring, since layers may sleep.
    pub(super) fn arm(
        &mut self,
        session: SessionId,
        slots: Vec<SlotRecord>,
        resumed: bool,
    ) -> Result<(), Refusal> {
        let kept = self.sessions.get(&session).filter(|kept| kept.has_graphs);
        let kept = kept.ok_or_else(|| no_graphs(session))?;
        if !resumed {
            let (table, hook_epoch) = (kept.table(), self.executor.hook_epoch());
            for slot in &slots {
                check(Some(&table), &slot.request, hook_epoch, MonotonicNs(0))
                    .map_err(|fault| fault.to_refusal())?;
            }
        }
        self.executor.arm(session, slots, resumed)
    }

    /// Disarms a captured graph.
    pub(super) fn disarm(&self, session: SessionId, pair: PairNumber) -> Result<(), Refusal> {
        self.executor.disarm(session, pair)
    }

    /// Withdraws what a session published.
    pub(super) fn withdraw(&mut self, session: SessionId) -> Result<(), Refusal> {
        let Some(kept) = self.sessions.get_mut(&session) else { return Ok(()) };
        kept.targets = None;
        kept.layers = Vec::new();
        kept.sets = Vec::new();
        self.install(session)
    }

    /// Forgets a session; everything it owned is unmapped when this returns.
    pub(super) fn close_session(&mut self, session: SessionId) -> Result<(), Refusal> {
        self.sessions.remove(&session);
        self.executor.close(session)?;
        self.mappings.retain(|_, mapping| mapping.strong_count() > 0);
        Ok(())
    }

    /// Serves what the workers' rings hold, and refuses what comes later.
    pub(super) fn drain(&self) -> Result<(), Refusal> {
        self.executor.drain()
    }

    /// The device failed under this thread: ends the process as it would have ended under a copy.
    pub(super) fn fail(&self, reason: &str) {
        self.executor.fail(reason);
    }

    /// Ends the executor once everything submitted is answered.
    pub(super) fn end(&mut self) {
        self.executor.end();
    }

    /// Lists the compiled tables, and what the workers' rings came to.
    pub(super) fn inspect(&self) -> DeviceInspection {
        let targets = self.sessions.values().filter_map(|session| session.targets.as_deref());
        let targets = targets.flat_map(|targets| awake(targets).map(|(_, target)| target));
        let users = targets.filter(|target| !target.is_set).map(|target| &target.table);
        let rings = self.sessions.iter().map(|(session, kept)| {
            let (copies, refusals) = kept.counts.read();
            RingInspection { session: *session, copies, refusals }
        });
        DeviceInspection { plans: self.tables.inspect(users), rings: rings.collect() }
    }

    fn terms(&self) -> Terms {
        Terms { hook_epoch: self.executor.hook_epoch(), launch_bytes_max: self.launch_bytes_max }
    }

    fn install(&mut self, session: SessionId) -> Result<(), Refusal> {
        let table = self.sessions.entry(session).or_default().table();
        self.executor.install(session, table)
    }

    fn shut_if_serving(&self) {
        if self.sessions.values().any(|session| session.targets.is_some()) {
            self.guard.shut();
        }
    }
}

fn stale(moved: &RebindRecord) -> Refusal {
    Refusal::new(
        RefusalCode::StalePlan,
        format!("Binding {} is not published in this session", moved.binding),
    )
}

fn no_graphs(session: SessionId) -> Refusal {
    let sentence = format!("Session {session} has no session memory with words for graphs");
    Refusal::new(RefusalCode::VersionMismatch, sentence).about("pair")
}
