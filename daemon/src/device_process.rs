//! The device process: owns what may die. One thread prepares, one copies; a third only sends news.
//!
//! It ends when its link to the supervisor ends, and by PR_SET_PDEATHSIG when the supervisor dies. A panic on either thread
//! ends it at once: half a device process is worse than none.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::process::abort;
use std::sync::Arc;

use nix::sys::signal::{self, SigSet};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::set_name;
use statecopy_descriptors::{
    ChannelError, Connection, Doorbell, MemoryError, SealedMemory, file_bytes,
};
use statecopy_kernels::device::Device;
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostOptions, cpus_allowed};
use statecopy_proto::Refusal;
use statecopy_session::{SessionMemory, SessionMemoryError, Waker};

use crate::config::{DeviceName, DeviceSettings};
use crate::counters::Counters;
use crate::link::{self, LinkError, Reply, Request};
use crate::supervisor::logging;

use executor::Setup;
use preparer::Preparer;
use serving::serve;

mod checks;
mod commands;
mod compiled;
mod copying;
mod counts;
mod cuda;
mod executor;
mod graphs;
mod guard_export;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod ids;
mod lanes;
mod news;
mod ordered;
mod plans;
mod preparer;
mod scratch;
mod serving;
mod sessions;
mod station;
mod streams;
mod table;

/// The exit code of a device process whose device failed: EX_IOERR of sysexits.h.
pub const EXIT_DEVICE_FAILED: i32 = 74;

/// Descriptors of the first message.
const START_DESCRIPTORS: usize = 5;

/// Why a device process ends other than as it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceProcessError {
    /// The link.
    #[error("The link to the supervisor failed")]
    Link(#[from] LinkError),
    /// Standard input is not a link.
    #[error(
        "A device process is started by its supervisor, which hands it a link as standard input"
    )]
    NoLink(#[source] io::Error),
    /// What came with the first message.
    #[error("The supervisor sent memory that cannot be used")]
    Memory(#[from] MemoryError),
    /// The ring.
    #[error("The supervisor sent a ring that cannot be used")]
    Ring(#[from] SessionMemoryError),
    /// A doorbell.
    #[error("The supervisor sent a doorbell that cannot be used")]
    Doorbell(#[source] io::Error),
    /// The device refuses to serve.
    #[error("{0}")]
    Refused(Refusal),
}

/// Runs the device process to its end.
///
/// # Errors
/// When it was not asked to end.
pub fn run() -> Result<(), DeviceProcessError> {
    end_on_panic();
    leave_signals_to_the_supervisor();
    // What `ps` shows in place of "exe". Without it, the process is only harder to find.
    set_name(c"statecopyd-dev").ok();
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| DeviceProcessError::NoLink(errno.into()))?;
    let standard_input =
        io::stdin().as_fd().try_clone_to_owned().map_err(DeviceProcessError::NoLink)?;
    let link = Arc::new(Connection::from_fd(standard_input).map_err(LinkError::from)?);
    let (id, start) = Start::receive(&link)?;
    // The supervisor logs by the same settings. Without a log the device serves all the same.
    logging::start(&start.settings.log).ok();
    match start.settings.device {
        DeviceName::Host => run_device(&link, id, start, open_host),
        DeviceName::Cuda(selector) => {
            let teller = Arc::clone(&link);
            // Where the link fails, the answer to the start finds it too.
            let tell = |event| drop(reply(&teller, id, Reply::Told(event)));
            run_device(&link, id, start, |settings, guard| {
                cuda::open(selector, settings, guard, &tell)
            })
        }
    }
}

/// What the first message brings.
struct Start {
    settings: DeviceSettings,
    ring: SessionMemory,
    executor_bell: Doorbell,
    supervisor_bell: Doorbell,
    counters: Counters,
    /// Held, never used: the next daemon starts when nobody holds the lock any more.
    lock: OwnedFd,
}

impl Start {
    fn receive(link: &Connection) -> Result<(u64, Self), DeviceProcessError> {
        let mut bytes = vec![0; statecopy_descriptors::MESSAGE_BYTES_MAX];
        let received = link.receive(&mut bytes, START_DESCRIPTORS).map_err(LinkError::from)?;
        let message = link::decode::<Request>(&bytes[..received.bytes])?;
        let Request::Start(settings) = message.body else {
            return Err(LinkError::OutOfTurn("a request before the start").into());
        };
        let descriptors: [OwnedFd; START_DESCRIPTORS] = received
            .descriptors
            .try_into()
            .map_err(|_| LinkError::OutOfTurn("a start without its descriptors"))?;
        let [ring, executor_bell, supervisor_bell, counters, lock] = descriptors;
        let bytes = file_bytes(&counters).map_err(DeviceProcessError::Doorbell)?;
        let bell = |fd| {
            Doorbell::from_fd(fd)
                .map_err(|error| DeviceProcessError::Doorbell(io::Error::other(error)))
        };
        let start = Self {
            settings,
            ring: SessionMemory::open(ring)?,
            executor_bell: bell(executor_bell)?,
            supervisor_bell: bell(supervisor_bell)?,
            counters: Counters::open(&SealedMemory::adopt(counters, bytes)?)?,
            lock,
        };
        Ok((message.id, start))
    }
}

fn open_host(settings: &DeviceSettings, guard: &Arc<ServingGuard>) -> Result<HostDevice, Refusal> {
    HostDevice::open(HostOptions {
        copy_threads: settings.copy_threads.unwrap_or_else(cpus_allowed),
        allowed_preloads: settings.allowed_preloads.clone(),
        ..HostOptions::new(Arc::clone(guard))
    })
}

/// Serves the device that `open` opens, until the supervisor asks for the end.
fn run_device<D: Device>(
    link: &Arc<Connection>,
    id: u64,
    start: Start,
    open: impl FnOnce(&DeviceSettings, &Arc<ServingGuard>) -> Result<D, Refusal>,
) -> Result<(), DeviceProcessError> {
    let Start { settings, ring, executor_bell, supervisor_bell, counters, lock } = start;
    let guard = Arc::new(ServingGuard::new(settings.abort_after_seal));
    let opened = open(&settings, &guard).and_then(|device| {
        let device = Arc::new(device);
        let setup = Setup {
            ring: ring.executor(Waker::Doorbell(supervisor_bell)),
            bell: executor_bell,
            counters,
            guard: Arc::clone(&guard),
            link: Arc::clone(link),
            settings: settings.clone(),
        };
        let executor = executor::start(&*device, setup)?;
        Ok((device, executor))
    });
    let (device, executor) = match opened {
        Ok(opened) => opened,
        Err(refusal) => {
            reply(link, id, Reply::Refused((&refusal).into()))?;
            return Err(DeviceProcessError::Refused(refusal));
        }
    };
    let description = device.description().into();
    let footprint = device.footprint().into();
    let mut preparer = Preparer::new(device, guard, executor, settings.launch_bytes_max);
    reply(link, id, Reply::Ready { description, footprint })?;
    let ended = serve(link, &mut preparer);
    drop(lock);
    match ended {
        // The supervisor is gone: so is the reason to live.
        Err(LinkError::Channel(ChannelError::Closed)) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn reply(link: &Connection, id: u64, body: Reply) -> Result<(), LinkError> {
    Ok(link.send(&link::encode(id, body)?, &[])?)
}

/// A service manager and a terminal signal the whole group: the supervisor drains then, and this process must live until
/// everything accepted is answered. It ends with its link.
fn leave_signals_to_the_supervisor() {
    let mut set = SigSet::empty();
    for signal in [signal::SIGTERM, signal::SIGINT, signal::SIGHUP] {
        set.add(signal);
    }
    // Blocked before any other thread exists, so in all of them.
    set.thread_block().ok();
}

fn end_on_panic() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        report(panic);
        abort();
    }));
}

#[cfg(test)]
mod tests;
