//! A daemon that speaks the protocol and does as it is told, for what a real one cannot be made to show: another
//! incarnation under a living connection, an answer that never comes, an older version, a wrong answer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use statecopy_client::{Address, Refusal, RefusalCode, v1};
use statecopy_descriptors::{AsyncConnection, Listener, SealedMemory};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::signature::{DeviceUuid, Signature};
use statecopy_proto::descriptor_socket::{DaemonRecord, RECORD_BYTES_MAX, WorkerRecord};
use statecopy_proto::{DataType, MESSAGE_BYTES_MAX, PROTOCOL_NEWEST};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use v1::admin_service_server::{AdminService, AdminServiceServer};
use v1::copy_service_server::{CopyService, CopyServiceServer};
use v1::registry_service_server::{RegistryService, RegistryServiceServer};
use v1::session_service_server::{SessionService, SessionServiceServer};

const DEVICE: [u8; 16] = [7; 16];
const TOKEN: [u8; 32] = [9; 32];

/// What the next copy gets instead of an answer.
#[derive(Debug)]
pub(crate) enum Script {
    Refuse(RefusalCode),
    Hang,
}

/// What the daemon saw, and what it is told.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) incarnation: [u8; 16],
    pub(crate) version_newest: u32,
    pub(crate) signature_error: u64,
    pub(crate) scripts: VecDeque<Script>,
    pub(crate) refuse_registration: Option<RefusalCode>,
    /// Names of calls, in the order in which they came.
    pub(crate) calls: Vec<String>,
    pub(crate) copies: Vec<v1::CopyRequest>,
    /// `grpc-timeout` was set, by call.
    pub(crate) timeouts: BTreeSet<String>,
    pub(crate) labels: Vec<String>,
    pub(crate) attached: u64,
    attachable: VecDeque<u64>,
    sessions: BTreeSet<u64>,
    descriptors: BTreeMap<u64, Vec<SealedMemory>>,
    next: u64,
}

impl Seen {
    fn new(incarnation: u8) -> Self {
        Self {
            incarnation: [incarnation; 16],
            version_newest: PROTOCOL_NEWEST,
            signature_error: 0,
            scripts: VecDeque::new(),
            refuse_registration: None,
            calls: Vec::new(),
            copies: Vec::new(),
            timeouts: BTreeSet::new(),
            labels: Vec::new(),
            attached: 0,
            attachable: VecDeque::new(),
            sessions: BTreeSet::new(),
            descriptors: BTreeMap::new(),
            next: 0,
        }
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        // Ids of different lives differ, as the incarnations do.
        u64::from(self.incarnation[0]) * 1000 + self.next
    }

    pub(crate) fn count(&self, call: &str) -> usize {
        self.calls.iter().filter(|seen| *seen == call).count()
    }

    /// Another life begins: nobody's session is known to it.
    pub(crate) fn be_born_again(&mut self) {
        self.incarnation[0] += 1;
        self.incarnation = [self.incarnation[0]; 16];
    }

    /// The sessions are forgotten, the life goes on.
    pub(crate) fn forget_sessions(&mut self) {
        self.sessions.clear();
    }
}

/// A running fake. Dropping it is a SIGKILL: connections break, nothing is answered, the socket files stay.
pub(crate) struct Fake {
    pub(crate) directory: PathBuf,
    seen: Arc<Mutex<Seen>>,
    runtime: Option<Runtime>,
}

impl Fake {
    pub(crate) fn start(directory: &Path, incarnation: u8) -> Self {
        Self::start_told(directory, incarnation, |_| {})
    }

    /// Starts it after it was told what to do.
    pub(crate) fn start_told(
        directory: &Path,
        incarnation: u8,
        tell: impl FnOnce(&mut Seen),
    ) -> Self {
        let mut seen = Seen::new(incarnation);
        tell(&mut seen);
        let seen = Arc::new(Mutex::new(seen));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let fake = Self { directory: directory.to_owned(), seen, runtime: Some(runtime) };
        fake.serve();
        fake
    }

    fn serve(&self) {
        let grpc = self.directory.join("statecopyd.sock");
        let descriptors = self.directory.join("descriptors.sock");
        for path in [&grpc, &descriptors] {
            if path.exists() {
                std::fs::remove_file(path).unwrap();
            }
        }
        let runtime = self.runtime.as_ref().unwrap();
        let _inside = runtime.enter();
        let grpc = UnixListener::bind(grpc).unwrap();
        let descriptors = Listener::bind(descriptors).unwrap();
        runtime.spawn(serve_descriptors(descriptors, Arc::clone(&self.seen)));
        let service = Service { seen: Arc::clone(&self.seen) };
        let server = tonic::transport::Server::builder()
            .add_service(SessionServiceServer::new(service.clone()))
            .add_service(RegistryServiceServer::new(service.clone()))
            .add_service(
                CopyServiceServer::new(service.clone())
                    .max_decoding_message_size(MESSAGE_BYTES_MAX),
            )
            .add_service(AdminServiceServer::new(service));
        runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(grpc)));
    }

    pub(crate) fn address(&self) -> Address {
        Address::in_directory(&self.directory).unwrap()
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    /// Waits until the daemon has seen something.
    pub(crate) fn wait_until(&self, what: &str, seen: impl Fn(&Seen) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !seen(&self.seen()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.seen());
            std::thread::yield_now();
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for its one thread, so that every connection is closed when this returns.
            let stopped =
                std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            stopped.join().unwrap();
        }
    }
}

async fn serve_descriptors(listener: Listener, seen: Arc<Mutex<Seen>>) {
    loop {
        let connection = listener.accept().await.unwrap();
        tokio::spawn(serve_worker(connection, Arc::clone(&seen)));
    }
}

async fn serve_worker(connection: AsyncConnection, seen: Arc<Mutex<Seen>>) {
    let mut session = None;
    let mut bytes = [0; RECORD_BYTES_MAX];
    while let Ok(received) = connection.receive(&mut bytes, 64).await {
        let answer = match WorkerRecord::decode(&bytes[..received.bytes]).unwrap() {
            WorkerRecord::Attach { token } => {
                assert_eq!(token.as_bytes(), &TOKEN);
                let mut seen = seen.lock().unwrap();
                session = seen.attachable.pop_front();
                seen.sessions.extend(session);
                seen.attached += 1;
                DaemonRecord::Attached
            }
            WorkerRecord::Descriptors { tag, count } => {
                assert_eq!(received.descriptors.len(), count as usize);
                let mut seen = seen.lock().unwrap();
                let under = seen.descriptors.entry(tag).or_default();
                for descriptor in received.descriptors {
                    let bytes = statecopy_descriptors::file_bytes(&descriptor).unwrap();
                    under.push(SealedMemory::adopt(descriptor, bytes).unwrap());
                }
                let total = u32::try_from(under.len()).unwrap();
                DaemonRecord::Received { tag, total }
            }
        };
        connection.send(&answer.encode(), &[]).await.unwrap();
    }
    let mut seen = seen.lock().unwrap();
    seen.attached -= 1;
    if let Some(session) = session {
        seen.sessions.remove(&session);
    }
}

#[derive(Clone)]
struct Service {
    seen: Arc<Mutex<Seen>>,
}

impl Service {
    /// Notes a call and checks its session.
    fn enter<T>(
        &self,
        call: &str,
        request: &Request<T>,
        session: Option<&v1::SessionRef>,
    ) -> Result<MutexGuard<'_, Seen>, Status> {
        let mut seen = self.seen.lock().unwrap();
        seen.calls.push(call.to_owned());
        if request.metadata().contains_key("grpc-timeout") {
            seen.timeouts.insert(call.to_owned());
        }
        if let Some(session) = session {
            if session.incarnation != seen.incarnation {
                return Err(refuse(RefusalCode::IncarnationMismatch));
            }
            if !seen.sessions.contains(&session.session_id) {
                return Err(refuse(RefusalCode::SessionUnknown));
            }
        }
        Ok(seen)
    }

    async fn copy(
        &self,
        call: &str,
        request: Request<v1::CopyRequest>,
    ) -> Result<Response<v1::CopyReply>, Status> {
        let script = {
            let session = request.get_ref().session.clone();
            let mut seen = self.enter(call, &request, session.as_ref())?;
            seen.copies.push(request.into_inner());
            seen.scripts.pop_front()
        };
        match script {
            Some(Script::Refuse(code)) => Err(refuse(code)),
            Some(Script::Hang) => std::future::pending().await,
            None => {
                let seen = self.seen.lock().unwrap();
                let copy = seen.copies.last().unwrap();
                Ok(Response::new(v1::CopyReply {
                    incarnation: seen.incarnation.to_vec(),
                    rows_copied: copy.selected,
                    rows_masked: 0,
                }))
            }
        }
    }
}

fn refuse(code: RefusalCode) -> Status {
    Refusal::new(code, "As told").into()
}

#[tonic::async_trait]
impl SessionService for Service {
    async fn open(
        &self,
        request: Request<v1::OpenRequest>,
    ) -> Result<Response<v1::OpenReply>, Status> {
        let mut seen = self.enter("open", &request, None)?;
        let asked = request.into_inner();
        if asked.protocol_version > seen.version_newest {
            return Err(refuse(RefusalCode::VersionMismatch));
        }
        seen.labels.push(asked.label);
        let session_id = seen.next();
        seen.attachable.push_back(session_id);
        Ok(Response::new(v1::OpenReply {
            incarnation: seen.incarnation.to_vec(),
            session_id,
            protocol_version: asked.protocol_version,
            device: Some(v1::DeviceDescription {
                kind: "host".to_owned(),
                uuid: "07".repeat(16),
                name: "fake".to_owned(),
                family: "host".to_owned(),
                fused: vec![v1::DataType::Float32.into()],
            }),
            // Another mount of the directory: the client finds the socket beside the first one.
            descriptor_socket: "/elsewhere/descriptors.sock".to_owned(),
            token: TOKEN.to_vec(),
            attach_timeout_ms: 1000,
            limits: Some(v1::Limits::default()),
        }))
    }

    type EventsStream = Pin<Box<dyn Stream<Item = Result<v1::Event, Status>> + Send>>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let seen = self.enter("events", &request, request.get_ref().session.as_ref())?;
        let incarnation = seen.incarnation.to_vec();
        let events = [
            Some(v1::event::Event::DeviceRestarted(v1::DeviceRestarted {
                device_process_pid: 42,
                restarts: 1,
            })),
            // Something that only a newer daemon says.
            None,
            Some(v1::event::Event::Draining(v1::Draining { grace_ms: 1500 })),
        ];
        let events = tokio_stream::iter(events)
            .map(move |event| Ok(v1::Event { incarnation: incarnation.clone(), event }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn close(
        &self,
        request: Request<v1::CloseRequest>,
    ) -> Result<Response<v1::CloseReply>, Status> {
        let seen = self.enter("close", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::CloseReply { incarnation: seen.incarnation.to_vec() }))
    }
}

#[tonic::async_trait]
impl RegistryService for Service {
    async fn register_region(
        &self,
        request: Request<v1::RegisterRegionRequest>,
    ) -> Result<Response<v1::RegisterRegionReply>, Status> {
        let session = request.get_ref().session.clone();
        let mut seen = self.enter("register_region", &request, session.as_ref())?;
        let asked = request.into_inner();
        let reference = asked.descriptors.unwrap();
        let memory = seen.descriptors.remove(&reference.tag).unwrap();
        assert_eq!(memory.len(), reference.count as usize);
        assert_eq!(memory[0].bytes(), asked.size_bytes);
        let region_id = seen.next();
        let incarnation = seen.incarnation.to_vec();
        Ok(Response::new(v1::RegisterRegionReply { incarnation, region_id }))
    }

    async fn release_region(
        &self,
        request: Request<v1::ReleaseRegionRequest>,
    ) -> Result<Response<v1::ReleaseRegionReply>, Status> {
        let seen = self.enter("release_region", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::ReleaseRegionReply { incarnation: seen.incarnation.to_vec() }))
    }

    type RegisterLayersStream =
        Pin<Box<dyn Stream<Item = Result<v1::RegisterLayersEvent, Status>> + Send>>;

    async fn register_layers(
        &self,
        request: Request<v1::RegisterLayersRequest>,
    ) -> Result<Response<Self::RegisterLayersStream>, Status> {
        use v1::register_layers_event::Event;

        let session = request.get_ref().session.clone();
        let mut seen = self.enter("register_layers", &request, session.as_ref())?;
        if let Some(code) = seen.refuse_registration {
            return Err(refuse(code));
        }
        let asked = request.into_inner();
        let bindings: Vec<v1::Binding> = asked
            .layers
            .iter()
            .map(|layer| v1::Binding {
                name: layer.name.clone(),
                binding_id: seen.next(),
                signature: signature(layer).wrapping_add(seen.signature_error),
                plan: v1::PlanKind::Fused.into(),
            })
            .collect();
        let sets = asked
            .sets
            .iter()
            .map(|set| v1::BindingSet {
                name: set.name.clone(),
                binding_id: seen.next(),
                signature: bindings[0].signature,
                layers: u32::try_from(set.layers.len()).unwrap(),
            })
            .collect();
        let total = u32::try_from(asked.layers.len()).unwrap();
        let progress = |stage: v1::registration_progress::Stage| {
            Event::Progress(v1::RegistrationProgress {
                stage: stage.into(),
                layers_done: total,
                layers_total: total,
            })
        };
        let events = [
            progress(v1::registration_progress::Stage::Preparing),
            progress(v1::registration_progress::Stage::Sealing),
            Event::Published(v1::Published { bindings, sets }),
        ];
        let incarnation = seen.incarnation.to_vec();
        let events = tokio_stream::iter(events).map(move |event| {
            let incarnation = incarnation.clone();
            Ok(v1::RegisterLayersEvent { incarnation, event: Some(event) })
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn rebind(
        &self,
        request: Request<v1::RebindRequest>,
    ) -> Result<Response<v1::RebindReply>, Status> {
        let seen = self.enter("rebind", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::RebindReply { incarnation: seen.incarnation.to_vec() }))
    }

    async fn release_layers(
        &self,
        request: Request<v1::ReleaseLayersRequest>,
    ) -> Result<Response<v1::ReleaseLayersReply>, Status> {
        let seen = self.enter("release_layers", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::ReleaseLayersReply { incarnation: seen.incarnation.to_vec() }))
    }

    async fn arm_graph(
        &self,
        request: Request<v1::ArmGraphRequest>,
    ) -> Result<Response<v1::ArmGraphReply>, Status> {
        let seen = self.enter("arm_graph", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::ArmGraphReply { incarnation: seen.incarnation.to_vec() }))
    }

    async fn disarm_graph(
        &self,
        request: Request<v1::DisarmGraphRequest>,
    ) -> Result<Response<v1::DisarmGraphReply>, Status> {
        let seen = self.enter("disarm_graph", &request, request.get_ref().session.as_ref())?;
        Ok(Response::new(v1::DisarmGraphReply { incarnation: seen.incarnation.to_vec() }))
    }
}

/// The daemon's own opinion of a layer's signature.
fn signature(layer: &v1::LayerSpec) -> u64 {
    let layout = layer.layout.as_ref().unwrap();
    let dtype = DataType::try_from(layout.dtype.cast_unsigned()).unwrap();
    let parsed = CacheLayout::parse(dtype, &layout.shape, &layout.strides).unwrap();
    Signature::new(DeviceUuid(DEVICE), parsed, layer.offset_bytes).hash().0
}

#[tonic::async_trait]
impl CopyService for Service {
    async fn gather(
        &self,
        request: Request<v1::CopyRequest>,
    ) -> Result<Response<v1::CopyReply>, Status> {
        self.copy("gather", request).await
    }

    async fn scatter(
        &self,
        request: Request<v1::CopyRequest>,
    ) -> Result<Response<v1::CopyReply>, Status> {
        self.copy("scatter", request).await
    }

    async fn copy_many(
        &self,
        request: Request<v1::CopyManyRequest>,
    ) -> Result<Response<v1::CopyManyReply>, Status> {
        use v1::copy_answer::Answer;

        let session = request.get_ref().session.clone();
        let mut seen = self.enter("copy_many", &request, session.as_ref())?;
        let incarnation = seen.incarnation.to_vec();
        let answers = request.into_inner().copies.into_iter().map(|directed| {
            let copy = directed.copy.unwrap();
            let answer = match seen.scripts.pop_front() {
                Some(Script::Refuse(code)) => {
                    Answer::Refused(Refusal::new(code, "As told").to_message())
                }
                Some(Script::Hang) | None => Answer::Done(v1::CopyReply {
                    incarnation: incarnation.clone(),
                    rows_copied: copy.selected,
                    rows_masked: 0,
                }),
            };
            seen.copies.push(copy);
            v1::CopyAnswer { answer: Some(answer) }
        });
        let answers = answers.collect();
        Ok(Response::new(v1::CopyManyReply { incarnation, answers }))
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn ping(
        &self,
        request: Request<v1::PingRequest>,
    ) -> Result<Response<v1::PingReply>, Status> {
        let seen = self.enter("ping", &request, None)?;
        let incarnation = seen.incarnation.to_vec();
        Ok(Response::new(v1::PingReply { incarnation, version: "0".to_owned(), uptime_ms: 1 }))
    }

    async fn inspect(
        &self,
        request: Request<v1::InspectRequest>,
    ) -> Result<Response<v1::InspectReply>, Status> {
        let seen = self.enter("inspect", &request, None)?;
        let incarnation = seen.incarnation.to_vec();
        Ok(Response::new(v1::InspectReply { incarnation, ..v1::InspectReply::default() }))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainReply>, Status> {
        let seen = self.enter("drain", &request, None)?;
        let incarnation = seen.incarnation.to_vec();
        Ok(Response::new(v1::DrainReply { incarnation, grace_ms: 1 }))
    }
}
