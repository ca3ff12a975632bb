//! The asynchronous client.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use statecopy_kernels::device::Moved;
use statecopy_proto::{Direction, v1};
use tokio::sync::Semaphore;

use crate::address::Address;
use crate::admin::Admin;
use crate::attempt::{Attempts, register_layers};
use crate::call::{Call, Failure};
use crate::error::{ArgumentError, Error};
use crate::events::Events;
use crate::link::{Binding, Bound, Link, Session};
use crate::lock::lock;
use crate::memory::Memory;
use crate::options::ConnectOptions;
use crate::plan::{Plan, PlanRecord};
use crate::populate::{payload_pages, populate, whole};
use crate::region::{Region, RegionKey, RegionRecord, Source, Use};
use crate::registration::{Bindings, Layer, Progress, Rebind, Registration};
use crate::request::{Flags, Indices, PlannedCopy, Request};
use crate::transport::{ResolvedCopy, ResolvedFlags, ResolvedIndices};

/// A worker's client. Clones share one session; it ends with [`Client::close`] or with the last of them and of their
/// plans and events.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

/// What all clones share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) address: Address,
    pub(crate) options: ConnectOptions,
    /// Whoever holds its one permit opens the next link.
    pub(crate) connecting: Semaphore,
    pub(crate) state: Mutex<State>,
}

/// The plain records from which a session is made anew, and the session of now.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) link: Option<Arc<Link>>,
    pub(crate) closed: bool,
    regions: BTreeMap<RegionKey, Arc<RegionRecord>>,
    registration: Option<(u64, Arc<Registration>)>,
    last_region: u64,
    last_registration: u64,
    last_link: u64,
}

impl Shared {
    pub(crate) fn next_link_number(&self) -> u64 {
        let mut state = lock(&self.state);
        state.last_link += 1;
        state.last_link
    }

    /// The records: regions, and the registration with its number.
    #[expect(clippy::type_complexity, reason = "two records, named by the caller")]
    pub(crate) fn records(&self) -> (Vec<Arc<RegionRecord>>, Option<(u64, Arc<Registration>)>) {
        let state = lock(&self.state);
        (state.regions.values().cloned().collect(), state.registration.clone())
    }
}

impl Client {
    /// Opens a session with the daemon at that address, and waits for it as long as the options say.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no daemon in time; VERSION_MISMATCH, DEVICE_NOT_VISIBLE, PERMISSION_DENIED,
    /// QUOTA_EXCEEDED or DRAINING from the daemon.
    pub async fn connect(address: Address, options: ConnectOptions) -> Result<Self, Error> {
        let call = Call::new("connect", options.wait_for.saturating_add(options.call_timeout));
        let until = call.within(options.wait_for).deadline;
        let shared =
            Shared { address, options, connecting: Semaphore::new(1), state: Mutex::default() };
        Attempts::new(&shared, call, true).connect(until).await?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What was agreed on when the session was opened; `None` while there is none.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        lock(&self.shared.state).link.as_ref().map(|link| link.session.clone())
    }

    /// The daemon's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// Allocates memory that can be registered. The same as [`Memory::allocate`].
    ///
    /// # Errors
    /// When the operating system gives none.
    pub fn allocate(&self, name: impl Into<String>, bytes: u64) -> Result<Memory, Error> {
        Memory::allocate(name, bytes)
    }

    /// Registers memory of [`Client::allocate`].
    ///
    /// # Errors
    /// HANDLE_INVALID or QUOTA_EXCEEDED from the daemon; memory for populating it may be lacking.
    pub async fn register_region(&self, memory: &Memory, purpose: Use) -> Result<Region, Error> {
        self.add_region(memory.bytes(), Source::Memory(memory.clone()), purpose).await
    }

    /// Registers memory of the caller's own: a memfd with F_SEAL_SHRINK and F_SEAL_GROW. The client keeps the
    /// descriptor until the region is released, to register it again with the next daemon.
    ///
    /// # Errors
    /// As [`Client::register_region`].
    pub async fn register_descriptor(
        &self,
        descriptor: OwnedFd,
        bytes: u64,
        purpose: Use,
    ) -> Result<Region, Error> {
        self.add_region(bytes, Source::Descriptor(descriptor), purpose).await
    }

    async fn add_region(&self, bytes: u64, source: Source, purpose: Use) -> Result<Region, Error> {
        let key = {
            let mut state = lock(&self.shared.state);
            state.last_region += 1;
            RegionKey(state.last_region)
        };
        let region = Region { record: Arc::new(RegionRecord { key, bytes, source }) };
        if purpose == Use::Packed && self.shared.options.populate {
            self.populate(&region, 0..bytes).await?;
        }
        let mut attempts = self.attempts("register region", true);
        loop {
            let link = attempts.link().await?;
            match link.register_region(&region.record, &attempts.call).await {
                Ok(()) => break,
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
        lock(&self.shared.state).regions.insert(key, Arc::clone(&region.record));
        Ok(region)
    }

    /// Populates a range of a region, in bytes from its start: the pages are charged to this process's memory group.
    /// For packed buffers that lie in a region registered as [`Use::Cache`].
    ///
    /// # Errors
    /// When the range reaches past the region, or there is no memory.
    pub async fn populate(&self, region: &Region, range: Range<u64>) -> Result<(), Error> {
        if range.end > region.bytes() || range.start > range.end {
            let name = format!("region {}", region.record.key.0);
            let (offset, end, limit) = (range.start, range.end, region.bytes());
            return Err(ArgumentError::OutOfRange { name, offset, end, limit }.into());
        }
        let page = rustix::param::page_size() as u64;
        populate(&region.record, whole(range, page, region.bytes())).await
    }

    /// Prepares, seals and publishes layers, all or none, and replaces what this client had published. Progress is
    /// reported while it runs.
    ///
    /// # Errors
    /// The daemon's refusal, which names the layer. Nothing is published then, and earlier plans of this client are
    /// withdrawn.
    pub async fn register(
        &self,
        registration: &Registration,
        mut on_progress: impl FnMut(Progress) + Send,
    ) -> Result<Bindings, Error> {
        if self.shared.options.populate {
            for layer in &registration.layers {
                self.populate_layer(layer, &layer.region, layer.offset_bytes).await?;
            }
        }
        let number = {
            let mut state = lock(&self.shared.state);
            state.last_registration += 1;
            state.last_registration
        };
        let call = Call::new("register layers", self.shared.options.register_timeout);
        let mut attempts = Attempts::new(&self.shared, call, true);
        loop {
            let link = attempts.link().await?;
            let done =
                register_layers(&link, &attempts.call, number, registration, &mut on_progress)
                    .await;
            match done {
                Ok(bound) => return Ok(self.publish(&link, registration, bound)),
                Err(failure) => {
                    self.withdraw_if_refused(&link, &failure);
                    attempts.failed(&link, failure)?;
                }
            }
        }
    }

    fn publish(&self, link: &Link, registration: &Registration, bound: Bound) -> Bindings {
        let number = bound.registration;
        let plan = |name: &str, is_set: bool, of: &Layer, layers: u64, binding: Binding| {
            let record = PlanRecord {
                name: name.to_owned(),
                is_set,
                dtype: of.dtype,
                payload_bytes: of.layout().map_or(0, |layout| layout.payload_bytes()),
                layers,
                max_selected: of.max_selected,
                registration: number,
                bound: Mutex::new((link.number, binding)),
            };
            (name.to_owned(), Plan::new(self.clone(), record))
        };
        let layers = registration.layers.iter().filter_map(|layer| {
            let binding = *bound.layers.get(&layer.name)?;
            Some(plan(&layer.name, false, layer, 1, binding))
        });
        let sets = registration.sets.iter().filter_map(|set| {
            let first = set.layers.first()?;
            let of = registration.layers.iter().find(|layer| layer.name == *first)?;
            let binding = *bound.sets.get(&set.name)?;
            Some(plan(&set.name, true, of, set.layers.len() as u64, binding))
        });
        let bindings = Bindings::new(layers.collect(), sets.collect());
        link.bind(bound);
        lock(&self.shared.state).registration = Some((number, Arc::new(registration.clone())));
        bindings
    }

    /// A refused registration withdraws the earlier one, here as there.
    fn withdraw_if_refused(&self, link: &Link, failure: &Failure) {
        let refused = matches!(failure, Failure::Refused(_) | Failure::Protocol(_));
        if refused && failure.verdict() == crate::call::Verdict::Final {
            link.bind(Bound::default());
            lock(&self.shared.state).registration = None;
        }
    }

    async fn populate_layer(&self, layer: &Layer, region: &Region, at: u64) -> Result<(), Error> {
        // A layout that is not valid is the daemon's to refuse.
        let Ok(layout) = layer.layout() else { return Ok(()) };
        if layout.place(at, region.bytes()).is_err() {
            return Ok(());
        }
        let page = rustix::param::page_size() as u64;
        populate(&region.record, payload_pages(&layout, at, page, region.bytes())).await
    }

    /// Moves published layers to other memory of the same signature, without preparing again. Their plans go on.
    ///
    /// # Errors
    /// SIGNATURE_MISMATCH, OUT_OF_REGION or another refusal of the daemon; then no layer has moved.
    pub async fn rebind(&self, moves: &[Rebind]) -> Result<(), Error> {
        let mut attempts = self.attempts("rebind", true);
        let registration = self.moved_registration(moves)?;
        for (layer, _) in &registration.moved {
            if self.shared.options.populate {
                self.populate_layer(layer, &layer.region, layer.offset_bytes).await?;
            }
        }
        loop {
            let link = attempts.link().await?;
            match rebind_on(&link, &attempts.call, &registration.moved).await {
                Ok(()) => break,
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
        let mut state = lock(&self.shared.state);
        if let Some((number, now)) = state.registration.as_mut()
            && *number == registration.number
        {
            *now = Arc::new(registration.after);
        }
        Ok(())
    }

    fn moved_registration(&self, moves: &[Rebind]) -> Result<Moves, Error> {
        let current = lock(&self.shared.state).registration.clone();
        let none = || ArgumentError::NoSuchLayer {
            name: moves.first().map(|first| first.layer.clone()).unwrap_or_default(),
        };
        let (number, registration) = current.ok_or_else(none)?;
        let mut after = Registration::clone(&registration);
        let mut moved = Vec::new();
        for step in moves {
            let missing = || ArgumentError::NoSuchLayer { name: step.layer.clone() };
            let layer = after.layers.iter_mut().find(|layer| layer.name == step.layer);
            let layer = layer.ok_or_else(missing)?;
            layer.region = step.region.clone();
            layer.offset_bytes = step.offset_bytes;
            moved.push((layer.clone(), number));
        }
        Ok(Moves { number, after, moved })
    }

    /// Withdraws every published layer of this client. Regions stay.
    ///
    /// # Errors
    /// When the daemon cannot be asked.
    pub async fn release_layers(&self) -> Result<(), Error> {
        lock(&self.shared.state).registration = None;
        let mut attempts = self.attempts("release layers", true);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let session = Some(link.reference());
                let request = attempts.call.request(v1::ReleaseLayersRequest { session })?;
                let mut registry = link.registry();
                let reply = attempts.call.answer(registry.release_layers(request)).await?;
                Ok(link.same_life(&reply.incarnation)?)
            };
            match done.await {
                Ok(()) => {
                    link.bind(Bound::default());
                    return Ok(());
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// Gives a region back.
    ///
    /// # Errors
    /// OVERLAP while a published layer lies in it; REGION_UNKNOWN when it was given back before.
    pub async fn release_region(&self, region: Region) -> Result<(), Error> {
        let key = region.record.key;
        let mut attempts = self.attempts("release region", true);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let region_id = link.region(&region)?.0;
                let session = Some(link.reference());
                let request =
                    attempts.call.request(v1::ReleaseRegionRequest { session, region_id })?;
                let mut registry = link.registry();
                let reply = attempts.call.answer(registry.release_region(request)).await?;
                Ok(link.same_life(&reply.incarnation)?)
            };
            match done.await {
                Ok(()) => {
                    link.forget_region(key);
                    lock(&self.shared.state).regions.remove(&key);
                    return Ok(());
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// Ends the session and gives back everything that it owned. Copies that have started finish first.
    ///
    /// # Errors
    /// When the daemon cannot be asked; the session ends all the same.
    pub async fn close(self) -> Result<(), Error> {
        let link = {
            let mut state = lock(&self.shared.state);
            state.closed = true;
            state.registration = None;
            state.regions.clear();
            state.link.take()
        };
        let Some(link) = link.filter(|link| link.is_alive()) else { return Ok(()) };
        let call = Call::new("close", self.shared.options.call_timeout);
        let done = async {
            let request = call.request(v1::CloseRequest { session: Some(link.reference()) })?;
            let reply = call.answer(link.sessions().close(request)).await?;
            Ok(link.same_life(&reply.incarnation)?)
        };
        done.await.map_err(|failure| call.error(&self.shared.address, failure))
    }

    /// The session's events, from now on. A newer stream of the same session replaces it.
    ///
    /// # Errors
    /// When the daemon cannot be asked.
    pub async fn events(&self) -> Result<Events, Error> {
        let mut attempts = self.attempts("events", true);
        loop {
            let link = attempts.link().await?;
            match Events::open(&link, &attempts.call, &self.shared.address).await {
                Ok(events) => return Ok(events),
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// Several copies in order, each answered by itself: a refused one does not stop the next. The whole is given the
    /// longest deadline of its parts. It is repeated after an unknown outcome only if every part allows it.
    ///
    /// # Errors
    /// When the daemon cannot be asked, or all are refused together.
    pub async fn copy_many(
        &self,
        copies: &[PlannedCopy<'_>],
    ) -> Result<Vec<Result<Moved, Error>>, Error> {
        let deadlines = copies.iter().map(|copy| self.copy_deadline(&copy.request));
        let wait = deadlines.max().unwrap_or(self.shared.options.call_timeout);
        let harmless = copies.iter().all(|copy| copy.request.repeat_unknown);
        let (start, whole) = self.copy_calls("copy many", wait);
        let mut attempts = Attempts::new(&self.shared, whole, harmless);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let resolved = copies.iter().map(|copy| {
                    let call = start.within(self.copy_deadline(&copy.request));
                    resolve(&link, &copy.plan.record, copy.direction, &copy.request, &call)
                });
                let resolved = resolved.collect::<Result<_, _>>()?;
                link.transport.copy_many(&attempts.call, resolved).await
            };
            match done.await {
                Ok(answers) => {
                    return Ok(answers.into_iter().map(|answer| Ok(answer?)).collect());
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    pub(crate) async fn copy(
        &self,
        plan: &PlanRecord,
        direction: Direction,
        request: Request<'_>,
    ) -> Result<Moved, Error> {
        let (start, whole) = self.copy_calls(direction.label(), self.copy_deadline(&request));
        let mut attempts = Attempts::new(&self.shared, whole, request.repeat_unknown);
        loop {
            let link = attempts.link().await?;
            let done = async {
                let resolved = resolve(&link, plan, direction, &request, &start)?;
                link.transport.copy(&attempts.call, resolved).await
            };
            match done.await {
                Ok(moved) => return Ok(moved),
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    fn copy_deadline(&self, request: &Request<'_>) -> Duration {
        request.deadline.unwrap_or(self.shared.options.call_timeout)
    }

    /// The call whose deadline is the copy's start, and the one whose deadline is its answer.
    fn copy_calls(&self, name: &'static str, wait: Duration) -> (Call, Call) {
        let whole = wait.saturating_add(self.shared.options.copy_slack);
        (Call::new(name, wait), Call::new(name, whole))
    }

    fn attempts(&self, name: &'static str, harmless: bool) -> Attempts<'_> {
        let call = Call::new(name, self.shared.options.call_timeout);
        Attempts::new(&self.shared, call, harmless)
    }

    /// Calls that need no session, on this client's connection.
    ///
    /// # Errors
    /// When there is no daemon.
    pub async fn admin(&self) -> Result<Admin, Error> {
        let link = self.attempts("admin", true).link().await?;
        let options = &self.shared.options;
        Ok(Admin::on(self.shared.address.clone(), link.channel(), options.call_timeout))
    }

    /// Asks whether the supervisor lives.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn ping(&self) -> Result<v1::PingReply, Error> {
        self.admin().await?.ping().await
    }

    /// Everything that `statecopy status` shows.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub async fn inspect(&self) -> Result<v1::InspectReply, Error> {
        self.admin().await?.inspect().await
    }

    /// Asks the daemon to finish what it accepted and to end: the same as SIGTERM.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn drain(&self) -> Result<v1::DrainReply, Error> {
        self.admin().await?.drain().await
    }
}

/// A rebind: the registration after it, and the layers that move.
struct Moves {
    number: u64,
    after: Registration,
    moved: Vec<(Layer, u64)>,
}

async fn rebind_on(link: &Link, call: &Call, moved: &[(Layer, u64)]) -> Result<(), Failure> {
    let layers = moved.iter().map(|(layer, _)| {
        let missing = || ArgumentError::NoSuchLayer { name: layer.name.clone() };
        let id = link.bound(|bound| bound.layers.get(&layer.name).map(|binding| binding.id));
        Ok(v1::RebindLayer {
            binding_id: id.ok_or_else(|| Error::from(missing()))?.0,
            layout: Some(layer.layout_message()),
            region_id: link.region(&layer.region)?.0,
            offset_bytes: layer.offset_bytes,
        })
    });
    let layers = layers.collect::<Result<_, Failure>>()?;
    let request = call.request(v1::RebindRequest { session: Some(link.reference()), layers })?;
    let reply = call.answer(link.registry().rebind(request)).await?;
    Ok(link.same_life(&reply.incarnation)?)
}

/// A copy in the words of one session.
fn resolve<'a>(
    link: &Link,
    plan: &PlanRecord,
    direction: Direction,
    request: &Request<'a>,
    start: &Call,
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
        Some(Flags::Bytes(flags)) => ResolvedFlags::Inline(Cow::Borrowed(flags)),
        Some(Flags::Bools(flags)) => {
            ResolvedFlags::Inline(Cow::Owned(flags.iter().copied().map(u8::from).collect()))
        }
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
        deadline: start.left().ok_or(Failure::Late)?,
        lane: request.lane,
    })
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.shared.address).finish_non_exhaustive()
    }
}
