//! The supervisor: owns what must not die, and never touches a device.
//!
//! It makes no driver call, and no call that blocks runs on its threads. Everything it does is a task that ends with the
//! daemon: sockets, one task a worker, one a registration, one a device.

mod control;
mod control_socket;
mod copy_request;
pub mod device;
mod drain;
pub mod keeper;
mod message;
mod offered;
mod peer;
mod placed;
mod random;
mod readiness;
mod registering;
mod registration;
mod runtime_directory;
mod services;
mod sessions;
mod telemetry;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use statecopy_descriptors::Listener;
use statecopy_proto::{Incarnation, Refusal};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic_health::server::{HealthReporter, HealthService};

use self::control::{Control, Parts};
use self::device::DeviceHandle;
use self::runtime_directory::RuntimeDirectory;
use self::sessions::DescriptorRoom;
use self::telemetry::http::Front;
use self::telemetry::metrics::Metrics;
use crate::config::{ConfigError, DeviceName, DeviceSettings, HttpAddress, SelfProgram, Settings};
use crate::machine::{self, Found};

pub use self::runtime_directory::RuntimeDirectoryError;
pub(crate) use self::telemetry::logging;

/// Descriptors kept for what is no session: scrapes, operators' commands, the next device process.
const DESCRIPTORS_SPARE: u64 = 16;
/// How often recorded durations are folded into their buckets.
const UPKEEP_EVERY: Duration = Duration::from_secs(30);
/// How long connections may take to end after everything is answered.
const CONNECTIONS_END_MAX: Duration = Duration::from_secs(2);
/// Streams of one connection at once.
const STREAMS_MAX: u32 = 256;

/// Why the supervisor does not serve, or no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SupervisorError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The runtime directory cannot be used.
    #[error(transparent)]
    RuntimeDirectory(#[from] RuntimeDirectoryError),
    /// A device does not serve.
    #[error("Device {device} does not serve")]
    Device {
        /// As it was named.
        device: DeviceName,
        /// Why.
        source: Refusal,
    },
    /// Two names stand for one device.
    #[error("Devices {first} and {second} are the same device, {uuid}: name it once")]
    SameDevice {
        /// One name.
        first: DeviceName,
        /// The other.
        second: DeviceName,
        /// Its UUID.
        uuid: String,
    },
    /// A device process died too often.
    #[error("A device process cannot be started again")]
    DeviceFailed,
    /// The address for HTTP cannot be used.
    #[error(
        "HTTP cannot be served on http_address = {address} (--http-address takes another one, or \"off\")"
    )]
    Http {
        /// The address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// A server ended by itself.
    #[error("The {what} ended by itself: {reason}")]
    Server {
        /// Which one.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The system refused something else.
    #[error("Cannot {action}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// How the daemon ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Everything that was accepted was finished.
    Drained,
    /// The grace was over before everything was finished, or a session or a device process did not end.
    Unfinished,
    /// It was told a second time, and ended at once.
    Cut,
}

/// What the supervisor is told from outside: each one is a request to end.
pub(crate) type Signals = mpsc::Receiver<&'static str>;

/// A device that serves, and the task behind its handle.
pub(crate) type StartedDevice = (DeviceHandle, JoinHandle<()>);

/// Where a device that is being started shows why that takes so long.
pub(crate) type Waiting = watch::Sender<Arc<Found>>;

/// Serves until it is drained. `program` are the arguments with which this executable becomes a device process.
///
/// # Errors
/// [`SupervisorError`]; whatever was made is taken away.
pub(crate) async fn run(
    settings: Settings,
    program: SelfProgram,
    signals: Signals,
) -> Result<Outcome, SupervisorError> {
    let start = |settings, incarnation, lock, waiting| {
        keeper::start(settings, incarnation, lock, program.clone(), waiting)
    };
    serve(settings, start, signals).await
}

/// The same with devices from elsewhere. `start` makes a device process of the lock's heirs.
///
/// # Errors
/// [`SupervisorError`]; whatever was made is taken away.
pub(crate) async fn serve<F>(
    settings: Settings,
    start: impl Fn(DeviceSettings, Incarnation, Arc<OwnedFd>, Waiting) -> F,
    mut signals: Signals,
) -> Result<Outcome, SupervisorError>
where
    F: Future<Output = Result<StartedDevice, Refusal>>,
{
    let shared = !settings.allow_uids.is_empty();
    let mut directory = RuntimeDirectory::open(&settings.runtime_dir, shared)?;
    let mut keepers = Vec::with_capacity(settings.devices.len());
    let outcome = serve_in(&mut directory, settings, start, &mut keepers, &mut signals).await;
    if !matches!(outcome, Ok(Outcome::Cut)) {
        for keeper in keepers {
            // A keeper that has not ended is cut off with the runtime, and its device process ends with this one.
            let _ = tokio::time::timeout(CONNECTIONS_END_MAX, keeper).await;
        }
        directory.wait_for_heirs();
    }
    outcome
}

/// The same in a directory that was opened. Once it returns, every device process of `keepers` is told to end.
async fn serve_in<F>(
    directory: &mut RuntimeDirectory,
    settings: Settings,
    start: impl Fn(DeviceSettings, Incarnation, Arc<OwnedFd>, Waiting) -> F,
    keepers: &mut Vec<JoinHandle<()>>,
    signals: &mut Signals,
) -> Result<Outcome, SupervisorError>
where
    F: Future<Output = Result<StartedDevice, Refusal>>,
{
    let mut bytes = [0; 16];
    random::fill(&mut bytes).map_err(system("get random bytes"))?;
    let incarnation = Incarnation::new(bytes);
    // Bound before a device is touched: what cannot be served is known at once. Whoever connects meanwhile waits.
    let mut bound = Bound::bind(&settings, directory).await?;
    let host = machine::host();
    host.iter().for_each(machine::log);
    let (waiting, _) = watch::channel(Arc::<Found>::default());
    let front = Arc::new(
        Front::new(&host, waiting.subscribe())
            .map_err(|error| system("declare the metrics")(io::Error::other(error)))?,
    );
    let mut servers = Servers::new();
    if let Some(listener) = bound.http.take() {
        let front = Arc::clone(&front);
        servers.spawn(async move {
            telemetry::http::serve(listener, front)
                .await
                .map_err(|error| ended("HTTP server", &error))
        });
    }
    let mut devices: Vec<DeviceHandle> = Vec::with_capacity(settings.devices.len());
    for name in &settings.devices {
        let starting =
            start(settings.device(*name), incarnation, directory.lock(), waiting.clone());
        let (device, keeper) = tokio::select! {
            started = starting => started
                .map_err(|source| SupervisorError::Device { device: *name, source })?,
            _ = signals.recv() => return Ok(Outcome::Drained),
        };
        let uuid = device.description().uuid;
        if let Some(at) = devices.iter().position(|other| other.description().uuid == uuid) {
            let (first, uuid) = (settings.devices[at], uuid.to_string());
            return Err(SupervisorError::SameDevice { first, second: *name, uuid });
        }
        devices.push(device);
        keepers.push(keeper);
    }
    let metrics = Metrics::new(&devices, &host)
        .map_err(|error| system("declare the metrics")(io::Error::other(error)))?;
    let control = Arc::new(Control::new(Parts {
        incarnation,
        own_uid: rustix::process::geteuid().as_raw(),
        devices,
        metrics,
        descriptors: descriptor_room().map_err(system("count open files"))?,
        descriptor_socket: directory.descriptor_socket(),
        http_address: bound.http_address.clone(),
        findings: host,
        stopped: front.stopped.clone(),
        settings,
    }));
    front.open(&control);
    tracing::info!(
        control = %directory.control_socket().display(),
        descriptors = %directory.descriptor_socket().display(),
        http = control.http_address,
        devices = control.devices.len(),
        incarnation = %control.incarnation,
        version = env!("CARGO_PKG_VERSION"),
        "serving"
    );
    start_tasks(&control, bound, &mut servers)?;
    let outcome = supervise(&control, servers, signals).await;
    control.stopped.cancel();
    outcome
}

/// How many descriptors the limit of open files leaves for sessions, beside those that are open now.
fn descriptor_room() -> io::Result<DescriptorRoom> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = std::fs::read_dir("/proc/self/fd")?.count() as u64;
    Ok(DescriptorRoom { limit, room: limit.saturating_sub(open + DESCRIPTORS_SPARE) })
}

/// What listens.
struct Bound {
    control: UnixListener,
    descriptors: Listener,
    http: Option<TcpListener>,
    http_address: String,
}

impl Bound {
    async fn bind(
        settings: &Settings,
        directory: &mut RuntimeDirectory,
    ) -> Result<Self, SupervisorError> {
        let (http, http_address) = match settings.http()? {
            HttpAddress::Off => (None, String::new()),
            HttpAddress::At(address) => {
                let refuse =
                    |source| SupervisorError::Http { address: address.to_string(), source };
                let listener = TcpListener::bind(address).await.map_err(refuse)?;
                let bound = listener.local_addr().map_err(refuse)?;
                (Some(listener), bound.to_string())
            }
        };
        let descriptors = directory
            .bind_descriptor(|path: &Path| Listener::bind(path).map_err(io::Error::other))?;
        let control = directory.bind_control(|path: &Path| {
            let listener = StdUnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            UnixListener::from_std(listener)
        })?;
        Ok(Self { control, descriptors, http, http_address })
    }
}

type Servers = JoinSet<Result<(), SupervisorError>>;

/// Starts every task of the supervisor.
fn start_tasks(
    control: &Arc<Control>,
    bound: Bound,
    servers: &mut Servers,
) -> Result<(), SupervisorError> {
    let reporter = HealthReporter::new();
    let health = tonic_health::pb::health_server::HealthServer::new(
        HealthService::from_health_reporter(reporter.clone()),
    );
    let routes = services::routes(control, health)
        .map_err(|error| system("describe the services")(io::Error::other(error)))?;
    let (accepted, connections) = mpsc::channel(control_socket::ACCEPTED_MAX);
    let tasks = &control.tasks;
    tasks.spawn(control_socket::accept(Arc::clone(control), bound.control, accepted));
    tasks.spawn(sessions::serve_descriptors(Arc::clone(control), bound.descriptors));
    tasks.spawn(readiness::keep_health(Arc::clone(control), reporter));
    tasks.spawn(keep_metrics(Arc::clone(control)));
    for device in &control.devices {
        tasks.spawn(readiness::watch_device(Arc::clone(control), device.clone()));
    }
    let stopped = control.stopped.clone();
    servers.spawn(async move {
        Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .add_routes(routes)
            .serve_with_incoming_shutdown(
                ReceiverStream::new(connections),
                stopped.cancelled_owned(),
            )
            .await
            .map_err(|error| ended("gRPC server", &error))
    });
    Ok(())
}

/// Waits for a reason to end, and ends.
async fn supervise(
    control: &Arc<Control>,
    mut servers: Servers,
    signals: &mut Signals,
) -> Result<Outcome, SupervisorError> {
    tokio::select! {
        Some(signal) = signals.recv() => tracing::info!(signal, "told to end"),
        () = control.draining.cancelled() => tracing::info!("told to end over gRPC"),
        () = control.failed.cancelled() => return Err(SupervisorError::DeviceFailed),
        Some(ended) = servers.join_next() => {
            return Err(match ended {
                Ok(Err(error)) => error,
                Ok(Ok(())) => SupervisorError::Server { what: "server", reason: "no reason".to_owned() },
                Err(error) => SupervisorError::Server { what: "server", reason: error.to_string() },
            });
        }
    }
    let end = async {
        let finished = drain::drain(control).await;
        control.tasks.close();
        let tasks = tokio::time::timeout(CONNECTIONS_END_MAX, control.tasks.wait());
        if tasks.await.is_err() {
            tracing::warn!(tasks = control.tasks.len(), "tasks were cut off");
        }
        let all = async { while servers.join_next().await.is_some() {} };
        if tokio::time::timeout(CONNECTIONS_END_MAX, all).await.is_err() {
            tracing::info!("clients kept their connections; they are cut");
        }
        if finished { Outcome::Drained } else { Outcome::Unfinished }
    };
    tokio::select! {
        outcome = end => Ok(outcome),
        Some(signal) = signals.recv() => {
            tracing::warn!(signal, "told to end a second time: ending at once");
            Ok(Outcome::Cut)
        }
    }
}

/// Folds recorded durations into their buckets until the daemon stops.
async fn keep_metrics(control: Arc<Control>) {
    loop {
        tokio::select! {
            () = control.stopped.cancelled() => return,
            () = tokio::time::sleep(UPKEEP_EVERY) => control.metrics.run_upkeep(),
        }
    }
}

fn ended(what: &'static str, error: &dyn std::error::Error) -> SupervisorError {
    SupervisorError::Server { what, reason: error.to_string() }
}

fn system(action: &'static str) -> impl FnOnce(io::Error) -> SupervisorError {
    move |source| SupervisorError::System { action, source }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
