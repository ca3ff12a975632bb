//! Starting one device process, and knowing when it is dead.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, pidfd_send_signal};
use statecopy_descriptors::{
    AsyncConnection, AsyncDoorbell, Connection, Doorbell, MESSAGE_BYTES_MAX, SealedMemory,
    pidfd_open,
};
use statecopy_kernels::device::{DeviceDescription, Footprint};
use statecopy_kernels::findings::told::{Ending, Event};
use statecopy_proto::{Incarnation, Refusal, RefusalCode, SessionId};
use statecopy_session::{
    Identity, LayoutError, Parameters, SessionMemory, SessionMemoryError, Submitter,
};
use tokio::sync::oneshot;

use crate::config::{DeviceName, DeviceSettings, SelfProgram};
use crate::link::{self, LinkError, Reply, Request};
use crate::machine::{self, Found};

use super::records::Message;

/// How long a device process may take until it serves.
const START_MAX: Duration = Duration::from_secs(60);
/// How long a killed one may take to be gone.
const KILLED_MAX: Duration = Duration::from_secs(5);
/// What it may tell before it serves: about fifteen events.
const EVENTS_MAX: usize = 64;
/// How long it may leave a message of the link unread.
const SEND_MAX: Duration = Duration::from_secs(20);

/// Why there is no device process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum StartError {
    /// The program could not be run.
    #[error("The device process could not be started")]
    Spawn(#[source] io::Error),
    /// The thread that starts it is gone.
    #[error("The thread that starts device processes is gone")]
    Keeper,
    /// No memory for the ring.
    #[error(transparent)]
    Memory(#[from] SessionMemoryError),
    /// The ring cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The link failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A descriptor could not be had.
    #[error("No descriptor is left")]
    Descriptor(#[source] io::Error),
    /// It did not serve in time.
    #[error("The device process did not serve within {START_MAX:?}")]
    TimedOut,
    /// A call of its driver did not return, and it was killed.
    #[error("{}", sentence(.found))]
    Silent {
        /// Killed, or stuck.
        ending: Ending,
        /// What it had told, and the cause as far as the machine shows it.
        found: Arc<Found>,
    },
    /// It refused to serve.
    #[error("{0}")]
    Refused(Refusal),
}

impl StartError {
    /// The refusal that a start-up ends with.
    pub(super) fn to_refusal(&self) -> Refusal {
        match self {
            Self::Refused(refusal) => refusal.clone(),
            Self::Silent { found, .. } => {
                let remedy = found.findings.first().map_or("", |finding| &finding.remedy);
                Refusal::new(RefusalCode::PrepareFailed, sentence(found)).remedied_by(remedy)
            }
            other => Refusal::new(RefusalCode::PrepareFailed, describe(other)),
        }
    }
}

/// The worst that was found.
fn sentence(found: &Found) -> &str {
    found.findings.first().map_or("The driver does not answer", |finding| &finding.evidence)
}

fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// A started child: its pid, and the ways by which its end is told.
struct Child {
    pid: u32,
    pidfd: OwnedFd,
    exit: oneshot::Receiver<ExitStatus>,
}

struct SpawnRequest {
    link: OwnedFd,
    /// Variables beside those of the supervisor.
    environment: &'static [(&'static str, &'static str)],
    started: oneshot::Sender<io::Result<Child>>,
}

/// The thread that starts and reaps device processes.
///
/// PR_SET_PDEATHSIG fires when the thread that forked ends, so this one lives as long as the supervisor.
#[derive(Debug)]
pub(super) struct Spawner {
    requests: mpsc::Sender<SpawnRequest>,
}

impl Spawner {
    pub(super) fn new(program: SelfProgram) -> Result<Self, StartError> {
        let (requests, inbox) = mpsc::channel::<SpawnRequest>();
        thread::Builder::new()
            .name("device-keeper".to_owned())
            .spawn(move || {
                for request in inbox {
                    spawn_and_reap(&program, request);
                }
            })
            .map_err(StartError::Spawn)?;
        Ok(Self { requests })
    }

    async fn spawn(&self, link: OwnedFd, device: DeviceName) -> Result<Child, StartError> {
        let (started, answer) = oneshot::channel();
        let request = SpawnRequest { link, environment: device.environment(), started };
        self.requests.send(request).map_err(|_| StartError::Keeper)?;
        answer.await.map_err(|_| StartError::Keeper)?.map_err(StartError::Spawn)
    }
}

fn spawn_and_reap(program: &SelfProgram, request: SpawnRequest) {
    let spawned = Command::new("/proc/self/exe")
        .args(&program.arguments)
        .envs(request.environment.iter().copied())
        .stdin(Stdio::from(request.link))
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            drop(request.started.send(Err(error)));
            return;
        }
    };
    let (exited, exit) = oneshot::channel();
    let pid = child.id();
    let started = pidfd_open(pid).map(|pidfd| Child { pid, pidfd, exit });
    let watched = started.is_ok();
    let wanted = request.started.send(started).is_ok();
    if !(watched && wanted) {
        child.kill().ok();
    }
    if let Ok(status) = child.wait() {
        exited.send(status).ok();
    }
}

/// A device process that does not serve yet. It ends with the wait for it, so that it holds no lock longer than its daemon.
struct Starting(Option<Arc<OwnedFd>>);

impl Starting {
    fn serves(mut self) {
        self.0 = None;
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(pidfd) = &self.0 {
            // One that has ended already needs no signal.
            pidfd_send_signal(pidfd, Signal::KILL).ok();
        }
    }
}

/// What every device process of one keeper is started with.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) settings: DeviceSettings,
    pub(super) counters: SealedMemory,
    /// The runtime directory's lock: held until supervisor and device process are both gone.
    pub(super) lock: Arc<OwnedFd>,
    pub(super) incarnation: Incarnation,
}

/// One living device process.
#[derive(Debug)]
pub(super) struct DeviceProcess {
    pub(super) pid: u32,
    pub(super) ring: Submitter,
    /// Rung by the executor when it answers.
    pub(super) answers: AsyncDoorbell,
    pub(super) exit: oneshot::Receiver<ExitStatus>,
    pub(super) link: AsyncConnection,
    /// What it takes of the device.
    pub(super) footprint: Footprint,
    /// What was found of the machine at its start.
    pub(super) found: Arc<Found>,
    pidfd: Arc<OwnedFd>,
    next_id: u64,
}

impl Setup {
    /// How long the process may be silent before it serves, where it calls a driver that may never return.
    fn silence_max(&self) -> Option<Duration> {
        match self.settings.device {
            DeviceName::Host => None,
            DeviceName::Cuda(_) => {
                Some(Duration::from_millis(self.settings.cuda.driver_timeout_ms.into()))
            }
        }
    }
}

impl DeviceProcess {
    /// Starts a device process and waits until it serves.
    pub(super) async fn start(
        spawner: &Spawner,
        setup: &Setup,
    ) -> Result<(Self, DeviceDescription), StartError> {
        let silence = setup.silence_max();
        let settings = setup.settings.clone();
        // Beside the start, which takes longer.
        let looking =
            silence.map(|_| tokio::task::spawn_blocking(move || machine::look(&settings)));
        let mut told = Vec::new();
        let starting = Self::start_unbounded(spawner, setup, silence, &mut told);
        let limit = START_MAX + silence.unwrap_or_default();
        let started =
            tokio::time::timeout(limit, starting).await.map_err(|_| StartError::TimedOut)?;
        let Some(Ok(circumstances)) = (match looking {
            Some(looking) => Some(looking.await),
            None => None,
        }) else {
            return started;
        };
        match started {
            Ok((mut process, description)) => {
                process.found = Arc::new(Found::of(told, Ending::Lives, &circumstances));
                Ok((process, description))
            }
            Err(StartError::Silent { ending, .. }) => {
                let found = Arc::new(Found::of(told, ending.clone(), &circumstances));
                Err(StartError::Silent { ending, found })
            }
            Err(error) => Err(error),
        }
    }

    async fn start_unbounded(
        spawner: &Spawner,
        setup: &Setup,
        silence: Option<Duration>,
        told: &mut Vec<Event>,
    ) -> Result<(Self, DeviceDescription), StartError> {
        let rows = u32::try_from(setup.settings.selected_max).unwrap_or(u32::MAX);
        let parameters = Parameters::for_rows(setup.settings.slots, rows)?;
        let identity = Identity { incarnation: setup.incarnation, session: SessionId(0) };
        let (memory, session_memory) = SessionMemory::create(parameters, identity)?;
        let executor_bell = Doorbell::create().map_err(StartError::Descriptor)?;
        let answer_bell = Doorbell::create().map_err(StartError::Descriptor)?;
        let ring_bell = executor_bell.try_clone().map_err(StartError::Descriptor)?;
        let mut ring = session_memory.submitter(ring_bell);
        // The supervisor always sleeps on its doorbell: every answer rings.
        ring.prepare_sleep();
        let (ours, theirs) = Connection::pair().map_err(LinkError::from)?;
        let child = spawner.spawn(theirs.into_fd(), setup.settings.device).await?;
        let pidfd = Arc::new(child.pidfd);
        let starting = Starting(Some(Arc::clone(&pidfd)));
        let mut process = Self {
            pid: child.pid,
            ring,
            answers: AsyncDoorbell::new(answer_bell).map_err(StartError::Descriptor)?,
            exit: child.exit,
            link: AsyncConnection::new(ours).map_err(LinkError::from)?,
            footprint: Footprint::default(),
            found: Arc::default(),
            pidfd,
            next_id: 0,
        };
        let id = process.next_id();
        let descriptors = [
            memory.as_fd(),
            executor_bell.as_fd(),
            process.answers.doorbell().as_fd(),
            setup.counters.as_fd(),
            setup.lock.as_fd(),
        ];
        let request = Request::Start(setup.settings.clone());
        send(&process.link, id, &request, &descriptors).await?;
        match process.first_answer(silence, told).await? {
            (_, Reply::Ready { description, footprint }) => {
                process.footprint = footprint.into();
                let description = description.try_into()?;
                starting.serves();
                Ok((process, description))
            }
            (_, Reply::Refused(refusal)) => Err(StartError::Refused(refusal.try_into()?)),
            _ => Err(LinkError::OutOfTurn("an answer before it was ready").into()),
        }
    }

    /// The answer to the start. Before it comes what the process is about to do and saw; one that is silent for too long is
    /// killed: a call of its driver does not return.
    async fn first_answer(
        &mut self,
        silence: Option<Duration>,
        told: &mut Vec<Event>,
    ) -> Result<(u64, Reply), StartError> {
        loop {
            let next = receive(&self.link);
            let answer = match silence {
                None => next.await?,
                Some(longest) => match tokio::time::timeout(longest, next).await {
                    Ok(answer) => answer?,
                    Err(_) => {
                        self.kill();
                        let gone = tokio::time::timeout(KILLED_MAX, &mut self.exit).await.is_ok();
                        let ending =
                            if gone { Ending::Killed(longest) } else { Ending::Stuck(longest) };
                        return Err(StartError::Silent { ending, found: Arc::default() });
                    }
                },
            };
            match answer {
                (_, Reply::Told(event)) if told.len() < EVENTS_MAX => told.push(event),
                answer => return Ok(answer),
            }
        }
    }

    /// A descriptor that is readable once the process is dead.
    pub(super) fn pidfd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.pidfd)
    }

    /// A number for the next request.
    pub(super) fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Sends one message of the request of that number.
    pub(super) async fn send(&self, id: u64, message: &Message) -> Result<(), LinkError> {
        let (request, descriptors) = message;
        let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        send(&self.link, id, request, &descriptors).await
    }

    /// Ends it by force. The exit is told as any other.
    pub(super) fn kill(&self) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It is our child and not reaped before `exit` is told, so the pid is still its own.
            kill_process(pid, Signal::KILL).ok();
        }
    }
}

async fn send(
    connection: &AsyncConnection,
    id: u64,
    request: &Request,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), LinkError> {
    let bytes = link::encode(id, request)?;
    tokio::time::timeout(SEND_MAX, connection.send(&bytes, descriptors))
        .await
        .map_err(|_| LinkError::Unread(SEND_MAX))??;
    Ok(())
}

/// The next reply and the number of its request. Dropping the wait loses nothing.
pub(super) async fn receive(connection: &AsyncConnection) -> Result<(u64, Reply), LinkError> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let received = connection.receive(&mut bytes, 0).await?;
    let message = link::decode::<Reply>(&bytes[..received.bytes])?;
    Ok((message.id, message.body))
}
