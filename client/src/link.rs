//! One session with one life of the daemon.
//!
//! A [`Link`] is opened, used, and thrown away when that life ends; the client's own records outlive it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use statecopy_kernels::device::PieceHandle;
use statecopy_kernels::signature::{DeviceUuid, Signature};
use statecopy_proto::descriptor_socket::{DESCRIPTORS_MAX, Token};
use statecopy_proto::{
    BindingId, Incarnation, MESSAGE_BYTES_MAX, ProtocolVersion, Refusal, RefusalCode, RegionId,
    SessionId, SignatureHash, v1,
};
use statecopy_session::Identity;
use tonic::transport::{Channel, Endpoint};
use v1::registry_service_client::RegistryServiceClient;
use v1::session_service_client::SessionServiceClient;

use crate::address::Address;
use crate::call::{Call, Failure};
use crate::device_memory::{self, DeviceMemory};
use crate::error::{ArgumentError, ProtocolError};
use crate::lock::lock;
use crate::options::{ConnectOptions, Transport};
use crate::records::{LinkNumber, RegistrationNumber};
use crate::region::{Region, RegionKey, RegionRecord, Slice, Source};
use crate::registration::{Layer, Registration};
use crate::ring::RingCopies;
use crate::socket::{DescriptorSocket, Executor, Silence, path_seen_here};
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::transport::{Carrier, GrpcCopies, ResolvedSlice};

/// What the two sides agreed on when the session was opened.
#[derive(Debug, Clone)]
pub struct Session {
    /// The daemon's life.
    pub incarnation: Incarnation,
    /// The session's number in it.
    pub id: SessionId,
    /// The protocol version that is spoken.
    pub version: ProtocolVersion,
    /// The device.
    pub device: v1::DeviceDescription,
    /// The daemon's limits.
    pub limits: v1::Limits,
    /// What carries its copies: gRPC where the daemon serves no ring, whatever was asked for.
    pub transport: Transport,
}

/// A link with a ring is believed alive for so long after its socket was seen open, and for the clock's tick longer.
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) number: LinkNumber,
    pub(crate) session: Session,
    pub(crate) carrier: Carrier,
    device: DeviceUuid,
    channel: Channel,
    socket: Arc<DescriptorSocket>,
    tables: Mutex<Tables>,
    /// This life is known to be over.
    retired: AtomicBool,
    /// When the socket was last seen open, in nanoseconds of [`coarse_now`]; 0 before the first look.
    looked_at: AtomicU64,
}

#[derive(Debug, Default)]
struct Tables {
    regions: BTreeMap<RegionKey, RegionId>,
    bindings: Bound,
    last_tag: u64,
}

/// The clock's last tick: a few milliseconds behind, at a quarter of the price.
fn coarse_now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::MonotonicCoarse)).unwrap_or_default()
}

/// What one registration got from this life of the daemon, by name.
#[derive(Debug, Default)]
pub(crate) struct Bound {
    /// `None` when nothing is bound.
    pub(crate) registration: Option<RegistrationNumber>,
    pub(crate) layers: HashMap<String, Binding>,
    pub(crate) sets: HashMap<String, Binding>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) id: BindingId,
    pub(crate) signature: SignatureHash,
    pub(crate) plan: v1::PlanKind,
}

/// A channel to the daemon's gRPC socket.
pub(crate) async fn channel(address: &Address, call: &Call) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(address.to_string())
        .map_err(|error| Failure::NotSent(error.into()))?
        .connect_timeout(call.left().ok_or(Failure::Late)?);
    match tokio::time::timeout_at(call.deadline, endpoint.connect()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(Failure::NotSent(error.into())),
        Err(_) => Err(Failure::Late),
    }
}

impl Link {
    /// Opens a session and attaches to it.
    pub(crate) async fn open(
        number: LinkNumber,
        address: &Address,
        options: &ConnectOptions,
        call: &Call,
    ) -> Result<Self, Failure> {
        let channel = channel(address, call).await?;
        let reply = open_session(&channel, options, call).await?;
        let field = ProtocolError::Field;
        let mut session = Session {
            incarnation: Incarnation::parse(&reply.incarnation)
                .map_err(|_| field("OpenReply.incarnation"))?,
            id: SessionId(reply.session_id),
            version: ProtocolVersion::agree(reply.protocol_version)?,
            device: reply.device.ok_or(field("OpenReply.device"))?,
            limits: reply.limits.ok_or(field("OpenReply.limits"))?,
            transport: Transport::Grpc,
        };
        let device = session.device.uuid.parse().map_err(|_| field("OpenReply.device.uuid"))?;
        let token = Token::parse(&reply.token).ok_or(field("OpenReply.token"))?;
        let path = path_seen_here(address.socket(), &reply.descriptor_socket);
        let (socket, ring) = DescriptorSocket::attach(&path, token, call).await?;
        let socket = Arc::new(socket);
        let carrier = match ring.filter(|_| options.transport == Transport::Ring) {
            Some(ring) => {
                session.transport = Transport::Ring;
                let identity = Identity { incarnation: session.incarnation, session: session.id };
                let socket = Arc::clone(&socket);
                Carrier::Ring(RingCopies::open(ring, identity, options.spin, socket)?)
            }
            None => Carrier::Grpc(GrpcCopies::new(channel.clone(), reference(&session))),
        };
        Ok(Self {
            number,
            carrier,
            session,
            device,
            channel,
            socket,
            tables: Mutex::default(),
            retired: AtomicBool::new(false),
            looked_at: AtomicU64::new(0),
        })
    }

    /// Whether this life of the daemon is not known to be over.
    pub(crate) fn is_alive(&self) -> bool {
        // SYNC: nothing is handed over by either word: each says when to look again, and nothing more.
        if self.retired.load(Ordering::Relaxed) {
            return false;
        }
        if matches!(self.carrier, Carrier::Ring(_)) {
            // A copy on the ring costs no system call: a daemon that just went away is found by whoever waits for it.
            let now = u64::try_from(coarse_now().as_nanos()).unwrap_or(u64::MAX);
            let looked_at = self.looked_at.load(Ordering::Relaxed);
            if looked_at != 0 && u128::from(now.saturating_sub(looked_at)) < LOOK_EVERY.as_nanos() {
                return true;
            }
            self.looked_at.store(now, Ordering::Relaxed);
        }
        self.socket.is_open()
    }

    /// Remembers that this life is over.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Who may still run a copy of this session, when it is let go: nobody where each was answered.
    pub(crate) fn executor_left(&self) -> Option<Executor> {
        self.carrier.has_unanswered().then(|| self.socket.executor())
    }

    /// Whether a copy may run yet that nobody waits for any more.
    pub(crate) fn has_stray_copies(&self) -> bool {
        self.carrier.has_given_up() && !matches!(self.socket.silence(), Some(Silence::DaemonGone))
    }

    pub(crate) fn reference(&self) -> v1::SessionRef {
        reference(&self.session)
    }

    pub(crate) fn sessions(&self) -> SessionServiceClient<Channel> {
        sessions(&self.channel)
    }

    pub(crate) fn registry(&self) -> RegistryServiceClient<Channel> {
        RegistryServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Every answer carries the incarnation of the daemon that gave it.
    pub(crate) fn same_life(&self, incarnation: &[u8]) -> Result<(), ProtocolError> {
        if incarnation == self.session.incarnation.as_bytes() {
            return Ok(());
        }
        self.retire();
        Err(ProtocolError::Incarnation)
    }

    /// Sends a region's descriptors and registers it.
    pub(crate) async fn register_region(
        &self,
        region: &RegionRecord,
        call: &Call,
    ) -> Result<(), Failure> {
        let tag = {
            let mut tables = lock(&self.tables);
            tables.last_tag += 1;
            tables.last_tag
        };
        let memory = match &region.source {
            Source::Memory(memory) => self.pass_file(tag, memory.as_fd(), call).await?,
            Source::Descriptor(descriptor) => self.pass_file(tag, descriptor.as_fd(), call).await?,
            Source::Device(memory) => match self.pass_device_memory(tag, memory, call).await {
                Ok(memory) => memory,
                Err(failure) => {
                    self.give_up(tag, call).await;
                    return Err(failure);
                }
            },
        };
        let session = Some(self.reference());
        let size_bytes = region.bytes;
        let request = call.request(v1::RegisterRegionRequest { session, size_bytes, ..memory })?;
        let reply = call.answer(self.registry().register_region(request)).await?;
        self.same_life(&reply.incarnation)?;
        lock(&self.tables).regions.insert(region.key, RegionId(reply.region_id));
        Ok(())
    }

    async fn pass_file(
        &self,
        tag: u64,
        file: BorrowedFd<'_>,
        call: &Call,
    ) -> Result<v1::RegisterRegionRequest, Failure> {
        self.socket.pass(tag, &[file], call).await?;
        Ok(v1::RegisterRegionRequest {
            kind: v1::HandleKind::Memfd.into(),
            descriptors: Some(v1::DescriptorRef { tag, count: 1 }),
            ..v1::RegisterRegionRequest::default()
        })
    }

    /// Shares device memory, a bounded number of pieces at a time: this process holds no more descriptors of it at once.
    async fn pass_device_memory(
        &self,
        tag: u64,
        memory: &DeviceMemory,
        call: &Call,
    ) -> Result<v1::RegisterRegionRequest, Failure> {
        let mut export = memory.export(call).await?;
        if export.device() != self.device {
            return Err(self.of_another_device(export.device()).into());
        }
        let announced = memory.announced();
        let mut passed = 0;
        let mut pieces = Vec::with_capacity(announced.pieces);
        loop {
            let batch;
            (export, batch) =
                device_memory::next_pieces(export, DESCRIPTORS_MAX as usize, call).await?;
            if batch.is_empty() {
                break;
            }
            let mut descriptors = Vec::new();
            for piece in batch {
                let handle = match piece.handle {
                    PieceHandle::Value(value) => value.into_vec(),
                    PieceHandle::Descriptor(descriptor) => {
                        descriptors.push(descriptor);
                        Vec::new()
                    }
                };
                let (size_bytes, buffer_id) = (piece.bytes, piece.buffer);
                pieces.push(v1::RegionPiece { size_bytes, buffer_id, handle });
            }
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            self.socket.pass(tag, &borrowed, call).await?;
            passed += u32::try_from(descriptors.len()).unwrap_or(DESCRIPTORS_MAX);
        }
        Ok(v1::RegisterRegionRequest {
            kind: announced.kind.to_message().into(),
            descriptors: (passed > 0).then_some(v1::DescriptorRef { tag, count: passed }),
            pieces,
            ..v1::RegisterRegionRequest::default()
        })
    }

    /// Lets the daemon close what it was sent under a tag: it does whenever it refuses the registration.
    async fn give_up(&self, tag: u64, call: &Call) {
        let request = call.request(v1::RegisterRegionRequest {
            session: Some(self.reference()),
            descriptors: Some(v1::DescriptorRef { tag, count: 0 }),
            ..v1::RegisterRegionRequest::default()
        });
        if let Ok(request) = request {
            // It is refused, as it should be; where nobody answers, the session's end closes them.
            call.answer(self.registry().register_region(request)).await.ok();
        }
    }

    fn of_another_device(&self, device: DeviceUuid) -> Refusal {
        let ours = self.device;
        let sentence =
            format!("The memory lives on device {device}; the session is for device {ours}");
        Refusal::new(RefusalCode::DeviceNotVisible, sentence)
            .remedied_by("Connect with the UUID of the memory's device (ConnectOptions::device).")
    }

    pub(crate) fn forget_region(&self, key: RegionKey) {
        lock(&self.tables).regions.remove(&key);
    }

    /// The id of a region in this session.
    pub(crate) fn region(&self, region: &Region) -> Result<RegionId, Refusal> {
        lock(&self.tables).regions.get(&region.record.key).copied().ok_or_else(|| {
            Refusal::new(
                RefusalCode::RegionUnknown,
                format!("Region {} of this client was given back", region.record.key.0),
            )
        })
    }

    /// Whether the memory of all layers is registered in this session.
    pub(crate) fn has_memory_of(&self, registration: &Registration) -> bool {
        let tables = lock(&self.tables);
        let mut keys = registration.layers.iter().map(|layer| layer.region.record.key);
        keys.all(|key| tables.regions.contains_key(&key))
    }

    pub(crate) fn slice(&self, at: &Slice) -> Result<ResolvedSlice, Refusal> {
        Ok(ResolvedSlice { region: self.region(&at.region)?, offset: at.offset })
    }

    /// The signature that this worker believes in; `None` for a layout that is not valid, which the daemon refuses.
    pub(crate) fn signature(&self, layer: &Layer) -> Option<SignatureHash> {
        let layout = layer.layout().ok()?;
        Some(Signature::new(self.device, layout, layer.offset_bytes).hash())
    }

    /// The message that registers these layers in this session.
    pub(crate) fn registration_message(
        &self,
        registration: &Registration,
    ) -> v1::RegisterLayersRequest {
        let layers = registration.layers.iter().map(|layer| v1::LayerSpec {
            name: layer.name.clone(),
            layout: Some(layer.layout_message()),
            // A region that was given back: the daemon refuses, and withdraws what was published before.
            region_id: self.region(&layer.region).map_or(u64::MAX, |id| id.0),
            offset_bytes: layer.offset_bytes,
            max_selected: layer.max_selected,
            signature: self.signature(layer).map_or(0, |hash| hash.0),
            check_unique: layer.check_unique,
        });
        let sets = registration
            .sets
            .iter()
            .map(|set| v1::BindingSetSpec { name: set.name.clone(), layers: set.layers.clone() });
        v1::RegisterLayersRequest {
            session: Some(self.reference()),
            layers: layers.collect(),
            sets: sets.collect(),
        }
    }

    /// Replaces what this session has bound.
    pub(crate) fn bind(&self, bound: Bound) {
        lock(&self.tables).bindings = bound;
    }

    /// Looks into what this session has bound.
    pub(crate) fn bound<T>(&self, look: impl FnOnce(&Bound) -> T) -> T {
        look(&lock(&self.tables).bindings)
    }
}

fn reference(session: &Session) -> v1::SessionRef {
    v1::SessionRef { incarnation: session.incarnation.to_vec(), session_id: session.id.0 }
}

fn sessions(channel: &Channel) -> SessionServiceClient<Channel> {
    SessionServiceClient::new(channel.clone())
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Asks for the newest version first, and for older ones while the daemon speaks none so new.
async fn open_session(
    channel: &Channel,
    options: &ConnectOptions,
    call: &Call,
) -> Result<v1::OpenReply, Failure> {
    let mut refused = None;
    for version in options.versions.clone().rev() {
        let request = call.request(v1::OpenRequest {
            protocol_version: version,
            device_uuid: options.device.clone().unwrap_or_default(),
            label: options.label.clone(),
        })?;
        match call.answer(sessions(channel).open(request)).await {
            Err(Failure::Refused(refusal)) if refusal.code() == RefusalCode::VersionMismatch => {
                // The refusal of the newest version says most.
                refused.get_or_insert(refusal);
            }
            other => return other,
        }
    }
    match refused {
        Some(refusal) => Err(Failure::Refused(refusal)),
        None => Err(Failure::Local(ArgumentError::NoVersion.into())),
    }
}

/// What the daemon published, compared with what was registered.
pub(crate) fn read_published(
    link: &Arc<Link>,
    number: RegistrationNumber,
    registration: &Registration,
    published: v1::Published,
) -> Result<Bound, ProtocolError> {
    let mut bound = Bound { registration: Some(number), ..Bound::default() };
    for binding in published.bindings {
        let (id, signature) = (BindingId(binding.binding_id), SignatureHash(binding.signature));
        let plan = v1::PlanKind::try_from(binding.plan).unwrap_or_default();
        bound.layers.insert(binding.name, Binding { id, signature, plan });
    }
    for layer in &registration.layers {
        let missing = || ProtocolError::MissingBinding { name: layer.name.clone() };
        let binding = bound.layers.get(&layer.name).ok_or_else(missing)?;
        let computed = link.signature(layer).ok_or_else(missing)?;
        if binding.signature != computed {
            return Err(ProtocolError::Signature {
                name: layer.name.clone(),
                client: computed.to_string(),
                daemon: binding.signature.to_string(),
            });
        }
    }
    for set in published.sets {
        let (id, signature) = (BindingId(set.binding_id), SignatureHash(set.signature));
        let first = registration.sets.iter().find(|spec| spec.name == set.name);
        let plan = first
            .and_then(|spec| spec.layers.first())
            .and_then(|layer| bound.layers.get(layer))
            .map(|layer| layer.plan)
            .unwrap_or_default();
        bound.sets.insert(set.name, Binding { id, signature, plan });
    }
    for set in &registration.sets {
        if !bound.sets.contains_key(&set.name) {
            return Err(ProtocolError::MissingBinding { name: set.name.clone() });
        }
    }
    Ok(bound)
}
