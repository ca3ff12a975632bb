//! The executor: the one thread that copies. It takes requests from the ring, holds each against its sealed plan, launches,
//! and answers.
//!
//! In the request path it never waits for anyone but the device, and it allocates, locks and logs nothing. What it looks
//! requests up in is made by the preparing thread and goes back to it to be dropped.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use statecopy_descriptors::Doorbell;
use statecopy_kernels::device::Device;
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::cpus_allowed;
use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::{Answer, MonotonicNs, Taken};

use crate::config::DeviceSettings;
use crate::counters::{Counter, Counters};
use crate::sync::{AtomicU64, Ordering};

use super::copying::Copier;
use super::guard_export::GuardExport;
use super::serving::executor_gone;
use super::table::SessionTable;

/// Sessions that the executor's map has room for before it grows.
const SESSIONS_ROOM: usize = 1024;

/// What the executor is told at its start.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExecutorSettings {
    /// How long it spins after the last request before it sleeps.
    spin: Duration,
    /// The most rows that a request selects.
    selected_max: usize,
    /// The most payload bytes of one launch.
    launch_bytes_max: u64,
}

impl ExecutorSettings {
    /// Spinning where fewer than two CPUs may be used would only keep the worker from running.
    pub(super) fn of(settings: &DeviceSettings) -> Self {
        let spin_us = if cpus_allowed().get() < 2 { 0 } else { settings.spin_us };
        Self {
            spin: Duration::from_micros(spin_us),
            selected_max: usize::try_from(settings.selected_max).unwrap_or(usize::MAX),
            launch_bytes_max: settings.launch_bytes_max,
        }
    }
}

/// What the preparing thread tells the executor. Each is acknowledged with what it replaced.
enum Command<D: Device> {
    Install(SessionId, Box<SessionTable<D>>),
    Remove(SessionId),
    End,
}

/// A table that the executor no longer uses.
type Retired<D> = Option<Box<SessionTable<D>>>;

/// The preparing thread's hold on the executor.
#[derive(Debug)]
pub(super) struct ExecutorHandle<D: Device> {
    commands: SyncSender<Command<D>>,
    retired: Receiver<Retired<D>>,
    bell: Doorbell,
    hook_epoch: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> ExecutorHandle<D> {
    /// Gives the executor a session's new table. Returns when it uses the old one no more; the old one is dropped here.
    pub(super) fn install(
        &self,
        session: SessionId,
        table: Box<SessionTable<D>>,
    ) -> Result<(), Refusal> {
        self.tell(Command::Install(session, table))
    }

    /// Takes a session away.
    pub(super) fn remove(&self, session: SessionId) -> Result<(), Refusal> {
        self.tell(Command::Remove(session))
    }

    /// How often a hook was seen so far.
    pub(super) fn hook_epoch(&self) -> u64 {
        self.hook_epoch.load(Ordering::Acquire)
    }

    /// Ends the executor once it has answered everything in the ring.
    pub(super) fn end(&mut self) {
        if self.tell(Command::End).is_ok()
            && let Some(thread) = self.thread.take()
        {
            drop(thread.join());
        }
    }

    fn tell(&self, command: Command<D>) -> Result<(), Refusal> {
        self.commands.send(command).map_err(|_| executor_gone())?;
        self.bell.ring();
        self.retired.recv().map(drop).map_err(|_| executor_gone())
    }
}

/// The executor thread's state.
pub(super) struct Executor<D: Device> {
    ring: statecopy_session::Executor,
    bell: Doorbell,
    commands: Receiver<Command<D>>,
    retire: SyncSender<Retired<D>>,
    sessions: HashMap<SessionId, Box<SessionTable<D>>>,
    copier: Copier<D>,
    counters: Counters,
    export: GuardExport,
    spin: Duration,
    ending: bool,
}

impl<D: Device> Executor<D> {
    /// Starts the thread.
    ///
    /// # Errors
    /// PREPARE_FAILED when it cannot be started, or the device has no launcher.
    pub(super) fn start(
        device: &D,
        ring: statecopy_session::Executor,
        bell: Doorbell,
        counters: Counters,
        guard: Arc<ServingGuard>,
        settings: ExecutorSettings,
    ) -> Result<ExecutorHandle<D>, Refusal> {
        let (commands, inbox) = sync_channel(1);
        let (retire, retired) = sync_channel(1);
        let hook_epoch = Arc::new(AtomicU64::new(0));
        let copier = Copier::new(
            device.launcher()?,
            Arc::clone(&hook_epoch),
            settings.selected_max,
            settings.launch_bytes_max,
        );
        let executor = Self {
            ring,
            bell: bell.try_clone().map_err(|error| not_started(&error))?,
            commands: inbox,
            retire,
            sessions: HashMap::with_capacity(SESSIONS_ROOM),
            copier,
            counters,
            export: GuardExport::new(guard),
            spin: settings.spin,
            ending: false,
        };
        let thread = thread::Builder::new()
            .name("executor".to_owned())
            .spawn(move || executor.run())
            .map_err(|error| not_started(&error))?;
        Ok(ExecutorHandle { commands, retired, bell, hook_epoch, thread: Some(thread) })
    }

    fn run(mut self) {
        let mut busy_at = Instant::now();
        loop {
            if self.serve_one() {
                busy_at = Instant::now();
            } else if self.ending {
                self.acknowledge(None);
                return;
            } else if busy_at.elapsed() < self.spin {
                std::hint::spin_loop();
            } else {
                self.sleep();
                busy_at = Instant::now();
            }
        }
    }

    /// Does one thing: true if there was one to do.
    fn serve_one(&mut self) -> bool {
        let heeded = self.heed();
        let taken = match self.ring.take() {
            Ok(taken) => taken,
            // The supervisor's own ring: a daemon that cannot trust itself starts over.
            Err(broken) => panic!("The supervisor's ring is broken: {broken}"),
        };
        let Some(taken) = taken else { return heeded };
        self.serve(&taken);
        self.export.publish(&self.counters);
        true
    }

    fn serve(&mut self, taken: &Taken) {
        let begun = MonotonicNs::now();
        let request = taken.descriptor.parse();
        let result = match &request {
            Ok(request) => {
                let session = self.sessions.get(&request.session).map(|session| &**session);
                self.copier.copy(&mut self.ring, taken.sequence, request, session, begun)
            }
            Err(fault) => Err(*fault),
        };
        let nanoseconds = MonotonicNs::now().since(begun).as_nanos();
        let executor_ns = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        match (&request, &result) {
            (Ok(request), Ok(copied)) => {
                let direction = request.direction;
                self.counters.add(Counter::Copies(direction), 1);
                self.counters.add(Counter::RowsCopied(direction), copied.moved.rows_copied);
                self.counters.add(Counter::RowsMasked(direction), copied.moved.rows_masked);
                self.counters.add(Counter::BytesCopied(direction), copied.bytes);
                self.counters.add(Counter::ExecutorNanoseconds(direction), executor_ns);
                self.counters.add(Counter::Launches(copied.variant), copied.launches);
            }
            (_, Err(fault)) => self.counters.add(Counter::Refusals(fault.code), 1),
            (Err(_), Ok(_)) => {}
        }
        let result = result.map(|copied| copied.moved);
        let lost = matches!(&result, Err(fault) if fault.code == RefusalCode::DeviceLost);
        self.ring.answer(taken.sequence, &Answer { result, executor_ns });
        assert!(!lost, "The device failed under a copy");
    }

    fn heed(&mut self) -> bool {
        match self.commands.try_recv() {
            Ok(Command::Install(session, table)) => {
                let old = self.sessions.insert(session, table);
                self.export.publish(&self.counters);
                self.acknowledge(old);
            }
            Ok(Command::Remove(session)) => {
                let old = self.sessions.remove(&session);
                self.acknowledge(old);
            }
            Ok(Command::End) => self.ending = true,
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => {
                self.ending = true;
                return false;
            }
        }
        true
    }

    fn acknowledge(&self, retired: Retired<D>) {
        // The preparing thread waits for it; when it is gone, so is this process in a moment.
        drop(self.retire.send(retired));
    }

    /// Sleeps until a request or a command comes. A command always rings, so none is missed between the look and the sleep.
    fn sleep(&mut self) {
        self.export.publish(&self.counters);
        if self.ring.prepare_sleep() {
            let waited = self.bell.wait(None);
            assert!(waited.is_ok(), "The executor's doorbell failed: {waited:?}");
        }
        self.ring.cancel_sleep();
    }
}

fn not_started(error: &io::Error) -> Refusal {
    Refusal::new(RefusalCode::PrepareFailed, format!("The executor could not be started: {error}"))
}
