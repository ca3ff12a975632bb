//! The plain records from which a session is made anew, and the session of now.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use statecopy_kernels::cuda::CudaExporter;
use statecopy_proto::Refusal;
use tokio::sync::Semaphore;

use crate::address::Address;
use crate::call::{Call, Failure};
use crate::device_memory::open_exporter;
use crate::error::{ArgumentError, Error};
use crate::link::Link;
use crate::lock::lock;
use crate::options::ConnectOptions;
use crate::region::{Region, RegionKey, RegionRecord, Source};
use crate::registration::{Layer, Rebind, Registration};
use crate::socket::Executor;

/// What all clones of a client share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) address: Address,
    pub(crate) options: ConnectOptions,
    /// Whoever holds its one permit opens the next link.
    pub(crate) connecting: Semaphore,
    /// Whoever holds its one permit shares device memory: what several layers lie in is registered once.
    pub(crate) sharing: Semaphore,
    exporter: OnceLock<Arc<CudaExporter>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    link: Option<Arc<Link>>,
    closed: bool,
    /// Who may still run copies of the last session that was let go. Those before it are dead: a device process is started
    /// when the one before was reaped, and a daemon when the one before and its device process are gone.
    executor_left: Option<Executor>,
    /// What the daemon said last that ends a link, until the next one.
    last_refusal: Option<Refusal>,
    pub(crate) regions: BTreeMap<RegionKey, Arc<RegionRecord>>,
    /// How often the region of device memory was asked for. It is given back with the last one.
    users: BTreeMap<RegionKey, u64>,
    pub(crate) registration: Option<RegistrationRecord>,
    last_region: u64,
    last_registration: u64,
    last_link: u64,
}

/// Counts the links of one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkNumber(u64);

/// Counts the registrations of one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegistrationNumber(u64);

/// A registration and its number among those of its client.
#[derive(Debug, Clone)]
pub(crate) struct RegistrationRecord {
    pub(crate) number: RegistrationNumber,
    pub(crate) registration: Arc<Registration>,
}

/// A rebind: the registration after it, and the layers that move.
#[derive(Debug)]
pub(crate) struct Moves {
    pub(crate) after: RegistrationRecord,
    pub(crate) moved: Vec<Layer>,
}

impl Shared {
    pub(crate) fn new(address: Address, options: ConnectOptions) -> Self {
        Self {
            address,
            options,
            connecting: Semaphore::new(1),
            sharing: Semaphore::new(1),
            exporter: OnceLock::new(),
            state: Mutex::default(),
        }
    }

    /// The driver of this process, opened when it is first needed.
    pub(crate) async fn exporter(&self, call: &Call) -> Result<Arc<CudaExporter>, Failure> {
        if let Some(exporter) = self.exporter.get() {
            return Ok(Arc::clone(exporter));
        }
        let opened = open_exporter(&self.options.cuda_driver_library, call).await?;
        Ok(Arc::clone(self.exporter.get_or_init(|| opened)))
    }

    /// The driver, where device memory was registered before.
    pub(crate) fn opened_exporter(&self) -> Option<&CudaExporter> {
        self.exporter.get().map(|exporter| &**exporter)
    }

    /// Registered regions that the bytes at a device address lie in.
    pub(crate) fn device_regions(&self, address: u64, bytes: u64) -> Vec<(Region, u64)> {
        let holds = |record: &Arc<RegionRecord>| {
            let Source::Device(memory) = &record.source else { return None };
            Some((Region { record: Arc::clone(record) }, memory.offset_of(address, bytes)?))
        };
        lock(&self.state).regions.values().filter_map(holds).collect()
    }

    /// Forgets a region. Whether it was on record.
    pub(crate) fn forget_region(&self, key: RegionKey) -> bool {
        lock(&self.state).regions.remove(&key).is_some()
    }

    /// One user less, without asking anybody: with the last one the region is forgotten.
    pub(crate) fn forget(&self, region: &Region) {
        let key = region.record.key;
        if !self.remove_user(key) {
            self.forget_region(key);
        }
    }

    /// One more user of a region of device memory.
    pub(crate) fn add_user(&self, region: &Region) {
        *lock(&self.state).users.entry(region.record.key).or_default() += 1;
    }

    /// One user less. Whether others are left.
    pub(crate) fn remove_user(&self, key: RegionKey) -> bool {
        let mut state = lock(&self.state);
        match state.users.get_mut(&key).map(|users| {
            *users -= 1;
            *users
        }) {
            None => false,
            Some(0) => {
                state.users.remove(&key);
                false
            }
            Some(_) => true,
        }
    }

    pub(crate) fn next_region(&self) -> RegionKey {
        let mut state = lock(&self.state);
        state.last_region += 1;
        RegionKey(state.last_region)
    }

    pub(crate) fn next_registration(&self) -> RegistrationNumber {
        let mut state = lock(&self.state);
        state.last_registration += 1;
        RegistrationNumber(state.last_registration)
    }

    pub(crate) fn next_link(&self) -> LinkNumber {
        let mut state = lock(&self.state);
        state.last_link += 1;
        LinkNumber(state.last_link)
    }

    /// All that a new session is to be told.
    pub(crate) fn records(&self) -> (Vec<Arc<RegionRecord>>, Option<RegistrationRecord>) {
        let state = lock(&self.state);
        (state.regions.values().cloned().collect(), state.registration.clone())
    }

    /// The link of now, dead or alive.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        lock(&self.state).link.clone()
    }

    /// The current link, unless its life is known to be over. A dead one is let go at once, so that the daemon, if it
    /// lives, ends the old session before the next begins.
    pub(crate) fn live_link(&self) -> Result<Option<Arc<Link>>, Error> {
        let link = {
            let state = lock(&self.state);
            if state.closed {
                return Err(Error::Closed);
            }
            state.link.clone()
        };
        let Some(link) = link else { return Ok(None) };
        if link.is_alive() {
            return Ok(Some(link));
        }
        let mut state = lock(&self.state);
        if state.link.as_ref().is_some_and(|current| current.number == link.number) {
            state.let_go();
        }
        Ok(None)
    }

    /// Whether a copy may run yet that nobody waits for any more.
    pub(crate) fn has_stray_copies(&self) -> bool {
        let link = {
            let mut state = lock(&self.state);
            if state.executor_left.as_ref().is_some_and(Executor::is_known_dead) {
                state.executor_left = None;
            }
            if state.executor_left.is_some() {
                return true;
            }
            state.link.clone()
        };
        link.is_some_and(|link| link.has_stray_copies())
    }

    /// Makes a link the current one.
    pub(crate) fn adopt(&self, link: Arc<Link>) -> Result<Arc<Link>, Error> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Error::Closed);
        }
        state.link = Some(Arc::clone(&link));
        state.last_refusal = None;
        Ok(link)
    }

    /// Notes what the daemon said, if that may be why it is gone soon.
    pub(crate) fn hear(&self, failure: &Failure) {
        if let Failure::Refused(refusal) = failure
            && failure.is_passing()
        {
            lock(&self.state).last_refusal = Some(refusal.clone());
        }
    }

    /// The error of a call on a session, with what the daemon had said before it went away.
    pub(crate) fn error(&self, call: &Call, failure: Failure) -> Error {
        self.hear(&failure);
        let error = call.error(&self.address, failure);
        match lock(&self.state).last_refusal.as_ref() {
            Some(refusal) => error.after(refusal),
            None => error,
        }
    }

    /// Puts on record what a link was told. A link that was opened meanwhile was not told: it is given up, and the next
    /// one is opened from the whole record.
    pub(crate) fn record(&self, told: &Link, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        if let Some(current) = state.link.as_ref().filter(|current| current.number != told.number) {
            current.retire();
        }
    }

    /// Forgets the registration, whatever any link was told.
    pub(crate) fn withdraw(&self) {
        lock(&self.state).registration = None;
    }

    /// Forgets everything, for good, and hands out the link of now.
    pub(crate) fn close(&self) -> Option<Arc<Link>> {
        let mut state = lock(&self.state);
        state.closed = true;
        state.registration = None;
        state.regions.clear();
        state.let_go()
    }

    /// The registration of now with some layers moved.
    pub(crate) fn moves(&self, moves: &[Rebind]) -> Result<Moves, Error> {
        let missing = |name: &str| ArgumentError::NoSuchLayer { name: name.to_owned() };
        let first = moves.first().map_or("", |first| &first.layer);
        let current = lock(&self.state).registration.clone().ok_or_else(|| missing(first))?;
        let mut after = Registration::clone(&current.registration);
        let mut moved = Vec::with_capacity(moves.len());
        for step in moves {
            let layer = after.layers.iter_mut().find(|layer| layer.name == step.layer);
            let layer = layer.ok_or_else(|| missing(&step.layer))?;
            layer.region = step.region.clone();
            layer.offset_bytes = step.offset_bytes;
            moved.push(layer.clone());
        }
        let (number, registration) = (current.number, Arc::new(after));
        Ok(Moves { after: RegistrationRecord { number, registration }, moved })
    }
}

impl State {
    /// Lets the link of now go.
    fn let_go(&mut self) -> Option<Arc<Link>> {
        let link = self.link.take()?;
        if let Some(executor) = link.executor_left() {
            self.executor_left = Some(executor);
        }
        Some(link)
    }

    /// Layers moved, unless their registration was replaced meanwhile.
    pub(crate) fn moved(&mut self, moves: Moves) {
        if let Some(current) = &mut self.registration
            && current.number == moves.after.number
        {
            *current = moves.after;
        }
    }
}
