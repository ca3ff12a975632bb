//! A daemon in a temporary directory, and workers that call it over its real sockets.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use statecopy_descriptors::{AsyncConnection, Connection, SealedMemory};
use statecopy_proto::descriptor_socket::{
    ATTACHED_DESCRIPTORS, DaemonRecord, RECORD_BYTES_MAX, Token, WorkerRecord,
};
use statecopy_proto::v1::admin_service_client::AdminServiceClient;
use statecopy_proto::v1::copy_service_client::CopyServiceClient;
use statecopy_proto::v1::registry_service_client::RegistryServiceClient;
use statecopy_proto::v1::session_service_client::SessionServiceClient;
use statecopy_proto::{PROTOCOL_NEWEST, Refusal, RefusalCode, v1};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt as _;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::device::{ScriptedDevice, scripted_device};
use crate::config::Settings;
use crate::supervisor::{Outcome, SupervisorError, serve};

/// Nothing here takes so long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until something is there.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The code of a refused call.
pub(crate) fn code<T: std::fmt::Debug>(answer: Result<T, Status>) -> RefusalCode {
    let status = answer.unwrap_err();
    let refusal = Refusal::from_status(&status).unwrap_or_else(|| panic!("{status:?}"));
    refusal.code()
}

/// A daemon that serves a scripted device.
pub(crate) struct TestDaemon {
    pub(crate) device: ScriptedDevice,
    pub(crate) signals: mpsc::Sender<&'static str>,
    pub(crate) channel: Channel,
    directory: TempDir,
    outcome: JoinHandle<Result<Outcome, SupervisorError>>,
}

impl TestDaemon {
    /// Starts it and waits until it answers.
    pub(crate) async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = Settings {
            runtime_dir: directory.path().join("run"),
            http_address: "127.0.0.1:0".to_owned(),
            ..Settings::default()
        };
        change(&mut settings);
        let mut device = scripted_device();
        let (handle, answering) = (device.handle.clone(), Mutex::new(Some(device.run())));
        let start = move |_, _, _, _| {
            let answering = answering.lock().unwrap().take().unwrap();
            std::future::ready(Ok((handle.clone(), tokio::spawn(answering))))
        };
        let (signals, told) = mpsc::channel(2);
        let socket = settings.runtime_dir.join("statecopyd.sock");
        let outcome = tokio::spawn(serve(settings, start, told));
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let channel = eventually("the daemon's start", || async {
            assert!(!outcome.is_finished(), "the daemon ended");
            let channel = endpoint.connect().await.ok()?;
            AdminServiceClient::new(channel.clone()).ping(v1::PingRequest {}).await.ok()?;
            Some(channel)
        })
        .await;
        Self { device, signals, channel, directory, outcome }
    }

    pub(crate) fn sessions(&self) -> SessionServiceClient<Channel> {
        SessionServiceClient::new(self.channel.clone())
    }

    pub(crate) fn registry(&self) -> RegistryServiceClient<Channel> {
        RegistryServiceClient::new(self.channel.clone())
    }

    pub(crate) fn copies(&self) -> CopyServiceClient<Channel> {
        CopyServiceClient::new(self.channel.clone())
    }

    pub(crate) fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel.clone())
    }

    pub(crate) async fn inspect(&self) -> v1::InspectReply {
        self.admin().inspect(v1::InspectRequest {}).await.unwrap().into_inner()
    }

    /// Status line and body of an HTTP page.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let address = self.inspect().await.http_address;
        let path = path.to_owned();
        let get = move || {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
        };
        tokio::task::spawn_blocking(get).await.unwrap()
    }

    /// One sample of /metrics.
    pub(crate) async fn metric(&self, sample: &str) -> String {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{sample} is missing")).to_owned()
    }

    /// Opens a session.
    pub(crate) async fn open(&self) -> Result<v1::OpenReply, Status> {
        self.open_as(PROTOCOL_NEWEST).await
    }

    async fn open_as(&self, protocol_version: u32) -> Result<v1::OpenReply, Status> {
        let request = v1::OpenRequest {
            protocol_version,
            device_uuid: String::new(),
            label: "worker".to_owned(),
        };
        self.sessions().open(request).await.map(tonic::Response::into_inner)
    }

    /// A worker with an attached session.
    pub(crate) async fn worker(&self) -> Worker {
        self.worker_of(PROTOCOL_NEWEST).await
    }

    /// The same, of an older protocol version.
    pub(crate) async fn worker_of(&self, protocol_version: u32) -> Worker {
        let opened = self.open_as(protocol_version).await.unwrap();
        let connection = connect(&opened);
        let worker = Worker { session: reference(&opened), connection };
        let token = Token::parse(&opened.token).unwrap();
        let answer = worker.say(&WorkerRecord::Attach { token }, &[]).await;
        assert_eq!(answer, DaemonRecord::Attached);
        worker
    }

    /// How it ended, and the files that it left.
    pub(crate) async fn end(self) -> (Result<Outcome, SupervisorError>, Vec<PathBuf>) {
        let outcome = timeout(PATIENCE, self.outcome).await.unwrap().unwrap();
        let left = std::fs::read_dir(self.directory.path().join("run")).unwrap();
        (outcome, left.map(|entry| entry.unwrap().path()).collect())
    }
}

/// The session of an open reply.
pub(crate) fn reference(opened: &v1::OpenReply) -> v1::SessionRef {
    v1::SessionRef { incarnation: opened.incarnation.clone(), session_id: opened.session_id }
}

/// Connects to the descriptor socket.
pub(crate) fn connect(opened: &v1::OpenReply) -> AsyncConnection {
    AsyncConnection::new(Connection::connect(&opened.descriptor_socket).unwrap()).unwrap()
}

/// A worker: its session, and the connection that the session lives by.
pub(crate) struct Worker {
    pub(crate) session: v1::SessionRef,
    pub(crate) connection: AsyncConnection,
}

impl Worker {
    pub(crate) fn session(&self) -> Option<v1::SessionRef> {
        Some(self.session.clone())
    }

    /// Says a record and hears the answer.
    pub(crate) async fn say(&self, record: &WorkerRecord, descriptors: &[OwnedFd]) -> DaemonRecord {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.connection.send(&record.encode(), &borrowed).await.unwrap();
        self.hear().await.0
    }

    /// Hears a record, and the descriptors beside it.
    pub(crate) async fn hear(&self) -> (DaemonRecord, Vec<OwnedFd>) {
        let mut buffer = [0; RECORD_BYTES_MAX];
        let descriptors_max = ATTACHED_DESCRIPTORS as usize;
        let received = timeout(PATIENCE, self.connection.receive(&mut buffer, descriptors_max));
        let received = received.await.unwrap().unwrap();
        (DaemonRecord::decode(&buffer[..received.bytes]).unwrap(), received.descriptors)
    }

    /// Sends one descriptor under a tag and asks for its region.
    pub(crate) async fn offer(
        &self,
        daemon: &TestDaemon,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<u64, Status> {
        let record = WorkerRecord::Descriptors { tag: 7, count: 1 };
        let answer = self.say(&record, &[descriptor]).await;
        assert_eq!(answer, DaemonRecord::Received { tag: 7, total: 1 });
        let request = v1::RegisterRegionRequest {
            session: self.session(),
            kind: v1::HandleKind::Memfd.into(),
            size_bytes: bytes,
            descriptors: Some(v1::DescriptorRef { tag: 7, count: 1 }),
            pieces: Vec::new(),
        };
        daemon.registry().register_region(request).await.map(|reply| reply.into_inner().region_id)
    }

    /// Registers a region of new memory.
    pub(crate) async fn region(&self, daemon: &TestDaemon, bytes: u64) -> u64 {
        let memory = SealedMemory::create("test", bytes).unwrap();
        self.offer(daemon, memory.try_clone_fd().unwrap(), bytes).await.unwrap()
    }

    /// Registers layers; gives every event of the stream, or its refusal.
    pub(crate) async fn register(
        &self,
        daemon: &TestDaemon,
        layers: Vec<v1::LayerSpec>,
        sets: Vec<v1::BindingSetSpec>,
    ) -> Result<Vec<v1::RegisterLayersEvent>, Status> {
        let request = v1::RegisterLayersRequest { session: self.session(), layers, sets };
        let mut stream = daemon.registry().register_layers(request).await?.into_inner();
        let mut events = Vec::new();
        while let Some(event) = timeout(PATIENCE, stream.next()).await.unwrap() {
            events.push(event?);
        }
        Ok(events)
    }

    /// Registers a region with one layer, and gives its binding.
    pub(crate) async fn publish(&self, daemon: &TestDaemon) -> v1::Binding {
        let region = self.region(daemon, 4096).await;
        let events = self.register(daemon, vec![layer("a", region, 0)], Vec::new()).await.unwrap();
        published(&events).bindings[0].clone()
    }

    /// A gather of two rows.
    pub(crate) fn gather(&self, binding: &v1::Binding) -> v1::CopyRequest {
        v1::CopyRequest {
            session: self.session(),
            binding_id: binding.binding_id,
            signature: binding.signature,
            selected: 2,
            indices: Some(v1::copy_request::Indices::Int32(v1::Int32Indices {
                values: vec![0, -1],
            })),
            packed: Some(v1::RegionSlice { region_id: 1, offset_bytes: 2048 }),
            packed_dtype: v1::DataType::Float32.into(),
            packed_bytes: 64,
            ..v1::CopyRequest::default()
        }
    }
}

/// The last event of a registration.
pub(crate) fn published(events: &[v1::RegisterLayersEvent]) -> v1::Published {
    match events.last().and_then(|last| last.event.clone()) {
        Some(v1::register_layers_event::Event::Published(published)) => published,
        other => panic!("the stream ended with {other:?}"),
    }
}

/// A layer of four rows of 32 bytes, 64 bytes apart.
pub(crate) fn layer(name: &str, region: u64, offset: u64) -> v1::LayerSpec {
    v1::LayerSpec {
        name: name.to_owned(),
        layout: Some(v1::CacheLayout {
            dtype: v1::DataType::Float32.into(),
            shape: vec![4, 1, 2, 4],
            strides: vec![16, 8, 4, 1],
        }),
        region_id: region,
        offset_bytes: offset,
        max_selected: 8,
        ..v1::LayerSpec::default()
    }
}
