//! The asynchronous client.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use statecopy_kernels::cuda::CudaGuest;
use statecopy_proto::v1;
use tokio::time::timeout_at;

use crate::address::Address;
use crate::admin::Admin;
use crate::attempt::{Attempts, Effect, register_layers};
use crate::call::{Call, Failure, Verdict};
use crate::device_memory::{DeviceMemory, open_guest};
use crate::error::{ArgumentError, Error, ProtocolError};
use crate::events::Events;
use crate::link::{Binding, Bound, Link, Session};
use crate::memory::Memory;
use crate::options::ConnectOptions;
use crate::plan::{Plan, PlanRecord};
use crate::populate::{payload_pages, populate, whole};
use crate::records::{Moves, RegistrationNumber, RegistrationRecord, Shared};
use crate::region::{Region, RegionRecord, Slice, Source, Use};
use crate::registration::{Bindings, Layer, Progress, Rebind, Registration};

/// A worker's client. Clones share one session; it ends with [`Client::close`] or with the last of them and of their
/// plans.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
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
        let shared = Shared::new(address, options);
        Attempts::new(&shared, call, Effect::Session).connect(until).await?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What was agreed on when the session was opened; `None` while there is none.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        self.shared.link().map(|link| link.session.clone())
    }

    /// The daemon's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// The session's CUDA device, as this process uses it; `None` for a session of another kind of device.
    ///
    /// # Errors
    /// DEVICE_NOT_VISIBLE when there is no driver, or this process does not see the device.
    pub async fn cuda_guest(&self) -> Result<Option<CudaGuest>, Error> {
        let call = Call::new("open the driver", self.shared.options.call_timeout);
        let link = Attempts::new(&self.shared, call, Effect::Session).link().await?;
        let device = &link.session.device;
        if device.kind != "cuda" {
            return Ok(None);
        }
        let failed = |failure| call.error(&self.shared.address, failure);
        let malformed = |_| failed(ProtocolError::Field("device.uuid").into());
        let selector = device.uuid.parse().map_err(malformed)?;
        let exporter = self.shared.exporter(&call).await.map_err(failed)?;
        open_guest(exporter, selector, &call).await.map(Some).map_err(failed)
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

    /// Registers device memory of this process: the `bytes` bytes at a device address, from whatever allocator. The driver is
    /// asked how the memory there can be shared; what is registered is the whole allocation, or the pieces of virtual memory
    /// that hold the range. The answer is the place of the address in that region.
    ///
    /// Memory that lies in a region of an earlier call is not registered again, so that all layers of one allocation share
    /// one region: where layers interleave in virtual memory, register the whole of it first. The region is given back when
    /// [`Client::release_region`] was called as often as this.
    ///
    /// # Errors
    /// HANDLE_INVALID when there is no such device memory; HANDLE_UNSUPPORTED when it cannot be shared, naming the allocator
    /// and the remedy; DEVICE_NOT_VISIBLE when there is no driver, or the memory is of another device than the session;
    /// QUOTA_EXCEEDED from the daemon.
    pub async fn register_device_memory(&self, address: u64, bytes: u64) -> Result<Slice, Error> {
        let call = Call::new("register device memory", self.shared.options.call_timeout);
        let failed = |failure| call.error(&self.shared.address, failure);
        // The client owns the semaphore and never closes it.
        let turn = timeout_at(call.deadline, self.shared.sharing.acquire()).await;
        let _turn = turn.map_err(|_| failed(Failure::Late))?;
        for (region, offset) in self.shared.device_regions(address, bytes) {
            let Source::Device(memory) = &region.record.source else { continue };
            // An allocation that came and went at the same address is another one.
            if memory.export(&call).await.is_ok() {
                self.shared.add_user(&region);
                return Ok(region.at(offset));
            }
        }
        let exporter = self.shared.exporter(&call).await.map_err(failed)?;
        let found = DeviceMemory::find(exporter, address, bytes, &call).await;
        let memory = found.map_err(failed)?;
        let offset = memory.offset_of(address, bytes).unwrap_or_default();
        let region = self.add_region(memory.bytes(), Source::Device(memory), Use::Cache).await?;
        self.shared.add_user(&region);
        Ok(region.at(offset))
    }

    async fn add_region(&self, bytes: u64, source: Source, purpose: Use) -> Result<Region, Error> {
        let key = self.shared.next_region();
        let region = Region { record: Arc::new(RegionRecord { key, bytes, source }) };
        if purpose == Use::Packed && self.shared.options.populate {
            self.populate(&region, 0..bytes).await?;
        }
        let mut attempts = self.attempts("register region");
        loop {
            let link = attempts.link().await?;
            match link.register_region(&region.record, &attempts.call).await {
                Ok(()) => {
                    let record = Arc::clone(&region.record);
                    self.shared.record(&link, |state| {
                        state.regions.insert(key, record);
                    });
                    return Ok(region);
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
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
                self.populate_layer(layer).await?;
            }
        }
        let number = self.shared.next_registration();
        let call = Call::new("register layers", self.shared.options.register_timeout);
        let mut attempts = Attempts::new(&self.shared, call, Effect::Session);
        loop {
            let link = attempts.link().await?;
            let done =
                register_layers(&link, &attempts.call, number, registration, &mut on_progress)
                    .await;
            match done {
                Ok(bound) => return Ok(self.publish(&link, number, registration, bound)),
                Err(failure) => {
                    self.withdraw_if_refused(&link, &failure);
                    attempts.failed(&link, failure)?;
                }
            }
        }
    }

    fn publish(
        &self,
        link: &Link,
        number: RegistrationNumber,
        registration: &Registration,
        bound: Bound,
    ) -> Bindings {
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
        let record = RegistrationRecord { number, registration: Arc::new(registration.clone()) };
        self.shared.record(link, |state| state.registration = Some(record));
        bindings
    }

    /// A refused registration withdraws the earlier one, here as there.
    fn withdraw_if_refused(&self, link: &Link, failure: &Failure) {
        if matches!(failure, Failure::Refused(_)) && failure.verdict() == Verdict::Final {
            link.bind(Bound::default());
            self.shared.record(link, |state| state.registration = None);
        }
    }

    async fn populate_layer(&self, layer: &Layer) -> Result<(), Error> {
        let (region, at) = (&layer.region, layer.offset_bytes);
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
        let mut attempts = self.attempts("rebind");
        let moves = self.shared.moves(moves)?;
        for layer in &moves.moved {
            if self.shared.options.populate {
                self.populate_layer(layer).await?;
            }
        }
        loop {
            let link = attempts.link().await?;
            match rebind_on(&link, &attempts.call, &moves).await {
                Ok(()) => {
                    self.shared.record(&link, |state| state.moved(moves));
                    return Ok(());
                }
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    /// A layer as it is registered now, its memory given back or not.
    #[must_use]
    pub fn layer(&self, name: &str) -> Option<Layer> {
        let (_, registration) = self.shared.records();
        let layers = &registration?.registration;
        layers.layers.iter().find(|layer| layer.name == name).cloned()
    }

    /// Withdraws every published layer of this client. Regions stay.
    ///
    /// # Errors
    /// When the daemon cannot be asked.
    pub async fn release_layers(&self) -> Result<(), Error> {
        self.shared.withdraw();
        let mut attempts = self.attempts("release layers");
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

    /// Whether a copy that was sent may still run though nobody waits for it: it was given up, or the daemon went away before
    /// the answer, and the device process that has it is not known to be dead. While it is so, the bytes of packed buffers and
    /// rows may yet change. The copies that other callers wait for now do not count.
    #[must_use]
    pub fn has_stray_copies(&self) -> bool {
        self.shared.has_stray_copies()
    }

    /// Gives a region back; one of device memory with the last of those who registered it.
    ///
    /// # Errors
    /// REGION_UNKNOWN when it was given back before.
    pub async fn release_region(&self, region: Region) -> Result<(), Error> {
        let key = region.record.key;
        if self.shared.remove_user(key) {
            return Ok(());
        }
        // Forgotten first: a session that is opened meanwhile need not have it, and could not have memory that is gone.
        let was_on_record = self.shared.forget_region(key);
        let mut attempts = self.attempts("release region");
        loop {
            let link = attempts.link().await?;
            if was_on_record && link.region(&region).is_err() {
                return Ok(());
            }
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
        let Some(link) = self.shared.close().filter(|link| link.is_alive()) else { return Ok(()) };
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
        let mut attempts = self.attempts("events");
        loop {
            let link = attempts.link().await?;
            match Events::open(&link, &attempts.call, &self.shared.address).await {
                Ok(events) => return Ok(events),
                Err(failure) => attempts.failed(&link, failure)?,
            }
        }
    }

    fn attempts(&self, name: &'static str) -> Attempts<'_> {
        let call = Call::new(name, self.shared.options.call_timeout);
        Attempts::new(&self.shared, call, Effect::Session)
    }

    /// Calls that need no session, on this client's connection.
    ///
    /// # Errors
    /// When there is no daemon.
    pub async fn admin(&self) -> Result<Admin, Error> {
        let link = self.attempts("admin").link().await?;
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

async fn rebind_on(link: &Arc<Link>, call: &Call, moves: &Moves) -> Result<(), Failure> {
    let RegistrationRecord { number, registration } = &moves.after;
    if link.bound(|bound| bound.registration != Some(*number)) {
        // A session that began while the layers slept.
        let bound = register_layers(link, call, *number, registration, &mut |_| {}).await?;
        link.bind(bound);
        return Ok(());
    }
    let layers = moves.moved.iter().map(|layer| {
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

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.shared.address).finish_non_exhaustive()
    }
}
