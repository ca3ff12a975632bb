//! Keeps a device process alive: starts it, asks it, and when it dies starts the next and tells it everything again.
//!
//! ```text
//! starting ──ready──> serving ──death──> starting … ──tenth death in a minute──> failed
//!                        └──shutdown──> ended
//! ```
//!
//! * *ready*: every record has been told again, in order, but those of sessions that wait to be closed: nothing of a dead
//!   worker runs again. Only then do copies flow.
//! * *death*: what was asked and not answered is asked again; copies as `copies` says.
//! * *failed*: everything is answered UNAVAILABLE, and the daemon ends.
//!
//! One task owns all of it. Requests of the link go out one at a time.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_kernels::device::DeviceDescription;
use statecopy_proto::{Incarnation, Refusal, RefusalCode};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use crate::config::{DeviceSettings, SelfProgram};
use crate::counters::Counters;
use crate::link::{LinkError, Reply, Request};
use crate::machine::Found;

use super::device::{Command, DeviceChannels, DeviceHandle, DeviceState};
use calls::{Call, Outcome, Replayed};
use copies::Copies;
use process::{DeviceProcess, Setup, Spawner, StartError};
use records::Records;
use restarts::{Decision, Restarts};

mod calls;
mod copies;
mod process;
mod records;
mod restarts;

/// Copies that wait for a place in the ring.
const COPIES_WAITING_MAX: usize = 4096;
/// Other requests that wait for the device process, beside one for each session that is to be closed.
const CALLS_WAITING_MAX: usize = 1024;
/// How long a device process may take to end by itself.
const END_MAX: Duration = Duration::from_secs(3);
/// How long the reading of what a device process said last may take.
const LAST_WORDS_MAX: Duration = Duration::from_millis(100);

/// Starts the device process and the task that keeps it.
///
/// # Errors
/// Why it does not serve: PREPARE_FAILED, HOOK_PRESENT or what the device itself says.
pub async fn start(
    settings: DeviceSettings,
    incarnation: Incarnation,
    lock: Arc<OwnedFd>,
    program: SelfProgram,
    waiting: watch::Sender<Arc<Found>>,
) -> Result<(DeviceHandle, JoinHandle<()>), Refusal> {
    let (memory, counters) = Counters::create()
        .map_err(|error| Refusal::new(RefusalCode::PrepareFailed, error.to_string()))?;
    let setup = Setup { settings, counters: memory, lock, incarnation };
    let spawner = Spawner::new(program).map_err(|error| error.to_refusal())?;
    let (process, description) = first(&spawner, &setup, &waiting).await?;
    let state = DeviceState {
        pid: process.pid,
        ready: true,
        footprint: process.footprint,
        found: Arc::clone(&process.found),
        ..DeviceState::default()
    };
    let (handle, channels) = DeviceHandle::new(Arc::new(description), Arc::new(counters), state);
    channels.process.send_replace(Some(process.pidfd()));
    let keeper = Keeper {
        spawner: Arc::new(spawner),
        setup: Arc::new(setup),
        channels,
        records: Records::default(),
        calls: VecDeque::new(),
        copies: Copies::new(COPIES_WAITING_MAX),
        ending: None,
    };
    Ok((handle, tokio::spawn(keeper.run(process))))
}

/// The first device process. One whose driver does not answer is no refusal: whoever is in the way may go, so the next one is
/// tried, as after a death. `waiting` shows meanwhile what was found.
async fn first(
    spawner: &Spawner,
    setup: &Setup,
    waiting: &watch::Sender<Arc<Found>>,
) -> Result<(DeviceProcess, DeviceDescription), Refusal> {
    let mut restarts = Restarts::default();
    let mut earlier = Arc::<Found>::default();
    loop {
        let error = match DeviceProcess::start(spawner, setup).await {
            Ok((process, description)) => {
                process.found.log_beside(&earlier);
                waiting.send_replace(Arc::default());
                return Ok((process, description));
            }
            Err(error) => error,
        };
        let StartError::Silent { found, .. } = &error else { return Err(error.to_refusal()) };
        found.log_beside(&earlier);
        earlier = Arc::clone(found);
        waiting.send_replace(Arc::clone(found));
        match restarts.died(Instant::now()) {
            Decision::StartAfter(pause) => tokio::time::sleep(pause).await,
            Decision::GiveUp => return Err(error.to_refusal()),
        }
    }
}

struct Keeper {
    spawner: Arc<Spawner>,
    setup: Arc<Setup>,
    channels: DeviceChannels,
    records: Records,
    /// The front one has been sent if its `sent` says so.
    calls: VecDeque<Call>,
    copies: Copies,
    /// Set once the daemon wants the device process to end.
    ending: Option<Ending>,
}

/// Who asked for the end: a caller that waits, or nobody, because every handle is gone.
type Ending = Option<super::device::Answer<()>>;

/// Why serving stopped.
enum Stop {
    /// The device process is dead, and reaped.
    Died,
    /// It ended because it was asked to.
    Ended,
}

impl Keeper {
    async fn run(mut self, mut process: DeviceProcess) {
        let mut restarts = Restarts::default();
        loop {
            let stop = self.serve(&mut process).await;
            self.channels.process.send_replace(None);
            self.channels.state.send_modify(|state| (state.pid, state.ready) = (0, false));
            self.copies.recover(&mut process.ring);
            if matches!(stop, Stop::Ended) {
                break;
            }
            match self.restart(&mut restarts).await {
                Some(next) => process = next,
                None => break,
            }
        }
        self.finish();
    }

    fn finish(&mut self) {
        self.copies.abandon();
        for call in self.calls.drain(..) {
            call.abandon();
        }
        if let Some(Some(answer)) = self.ending.take() {
            drop(answer.send(Ok(())));
        }
    }

    /// Serves until the device process is dead.
    async fn serve(&mut self, process: &mut DeviceProcess) -> Stop {
        loop {
            self.copies.submit(&mut process.ring);
            if let Err(error) = self.send_next(process).await {
                warn!(%error, pid = process.pid, "The link to the device process failed");
                self.hear_last_words(process).await;
                return self.bury(process).await;
            }
            let deadline = self.copies.next_deadline();
            tokio::select! {
                command = self.channels.commands.recv(), if self.ending.is_none() => self.take(command),
                received = process::receive(&process.link) => {
                    if let Err(error) = received.and_then(|reply| self.hear(reply)) {
                        if !self.shutdown_sent() {
                            warn!(%error, pid = process.pid, "The device process is lost");
                        }
                        if matches!(error, LinkError::SameNumber) {
                            process.kill();
                        }
                        return self.bury(process).await;
                    }
                }
                rung = process.answers.wait() => {
                    let sound = self.copies.collect(&mut process.ring);
                    if rung.is_err() || !sound {
                        error!(pid = process.pid, "The ring of the device process is broken");
                        return self.bury(process).await;
                    }
                }
                () = sleep_until(deadline) => self.copies.expire(Instant::now()),
                status = &mut process.exit => {
                    self.hear_last_words(process).await;
                    self.log_exit(process.pid, status.ok());
                    return self.stopped();
                }
            }
        }
    }

    /// Makes sure that the process is dead: only then may its copies run elsewhere.
    async fn bury(&mut self, process: &mut DeviceProcess) -> Stop {
        self.channels.state.send_modify(|state| state.ready = false);
        let status = match tokio::time::timeout(END_MAX, &mut process.exit).await {
            Ok(status) => status.ok(),
            Err(_) => {
                warn!(pid = process.pid, "The device process does not end, killing it");
                process.kill();
                (&mut process.exit).await.ok()
            }
        };
        self.log_exit(process.pid, status);
        self.stopped()
    }

    /// Reads what the device process had still said before it ended: why stands there. The link ends with the process, so this
    /// waits for nobody, unless it lives yet or somebody else holds its end.
    async fn hear_last_words(&mut self, process: &DeviceProcess) {
        let reading = async {
            loop {
                let heard =
                    process::receive(&process.link).await.and_then(|reply| self.hear(reply));
                if let Err(error) = heard {
                    return error;
                }
            }
        };
        if let Ok(error @ LinkError::DeviceFailed(_)) =
            tokio::time::timeout(LAST_WORDS_MAX, reading).await
        {
            warn!(%error, pid = process.pid, "The device process is lost");
        }
    }

    fn stopped(&self) -> Stop {
        if self.ending.is_some() { Stop::Ended } else { Stop::Died }
    }

    fn log_exit(&self, pid: u32, status: Option<std::process::ExitStatus>) {
        let status = status.map_or_else(|| "unknown".to_owned(), |status| status.to_string());
        if self.ending.is_some() {
            info!(pid, status, "The device process ended");
        } else {
            error!(pid, status, "The device process died");
        }
    }

    /// Whether the end was asked for, answered or not: then the link closes as it should.
    fn shutdown_sent(&self) -> bool {
        self.ending.is_some() && !self.calls.iter().any(|call| !call.sent && call.is_shutdown())
    }

    fn take(&mut self, command: Option<Command>) {
        match command {
            None => self.end(None),
            Some(Command::Shutdown(answer)) => self.end(Some(answer)),
            Some(Command::Copy(copy, answer)) => self.copies.push(copy, answer),
            Some(command) => {
                if let Some(call) = Call::new(command) {
                    // A session is closed once, and nobody would ask again.
                    if self.calls.len() < CALLS_WAITING_MAX || call.closing().is_some() {
                        self.calls.push_back(call);
                    } else {
                        call.overloaded();
                    }
                }
            }
        }
    }

    fn end(&mut self, answer: Ending) {
        self.ending = Some(answer);
        self.calls.push_back(Call::shutdown());
    }

    /// Sends what the front call has to say now. The shutdown goes last, after every copy.
    async fn send_next(&mut self, process: &mut DeviceProcess) -> Result<(), LinkError> {
        let Some(call) = self.calls.front_mut() else { return Ok(()) };
        if !call.sent {
            if call.is_shutdown() && !self.copies.is_empty() {
                return Ok(());
            }
            call.begin(process.next_id())?;
        }
        match call.next_part() {
            Some(part) => process.send(call.id, &part).await,
            None => Ok(()),
        }
    }

    fn hear(&mut self, (id, reply): (u64, Reply)) -> Result<(), LinkError> {
        if let Reply::RingBroken { session, reason } = reply {
            self.channels.broken_rings.tell(session, reason);
            return Ok(());
        }
        if let Reply::DeviceFailed { reason } = reply {
            return Err(LinkError::DeviceFailed(reason));
        }
        let Some(call) = self.calls.front_mut().filter(|call| call.sent && call.id == id) else {
            return Err(LinkError::OutOfTurn("an answer that nobody waits for"));
        };
        match call.hear(reply)? {
            Outcome::More => {}
            Outcome::Final if call.wants_another_process() => return Err(LinkError::SameNumber),
            Outcome::Final => {
                if let Some(call) = self.calls.pop_front() {
                    call.finish(&mut self.records);
                }
            }
        }
        Ok(())
    }

    /// Starts the next device process, with growing pauses; `None` when there will be none.
    async fn restart(&mut self, restarts: &mut Restarts) -> Option<DeviceProcess> {
        if let Some(call) = self.calls.front_mut().filter(|call| call.sent) {
            call.survived_death();
            call.sent = false;
        }
        self.calls.retain(|call| !call.is_spent());
        loop {
            let Decision::StartAfter(pause) = restarts.died(Instant::now()) else {
                error!("The device process died ten times in a minute, giving up");
                self.channels.state.send_modify(|state| state.failed = true);
                return None;
            };
            match self.start_next(pause).await {
                Some(Ok(process)) => {
                    self.channels.state.send_modify(|state| {
                        process.found.log_beside(&state.found);
                        *state = DeviceState {
                            pid: process.pid,
                            ready: true,
                            restarts: state.restarts + 1,
                            failed: false,
                            footprint: process.footprint,
                            found: Arc::clone(&process.found),
                        };
                    });
                    info!(pid = process.pid, "The device process was started again");
                    return Some(process);
                }
                Some(Err(error)) => {
                    error!(error = %error.to_refusal(), "The device process did not start");
                }
                None => return None,
            }
        }
    }

    /// Starts a device process and tells it every record, while commands and deadlines are still heard. `None` when the
    /// daemon ends meanwhile.
    async fn start_next(&mut self, pause: Duration) -> Option<Result<DeviceProcess, StartError>> {
        let (spawner, setup) = (Arc::clone(&self.spawner), Arc::clone(&self.setup));
        let starting = async {
            tokio::time::sleep(pause).await;
            DeviceProcess::start(&spawner, &setup).await
        };
        let mut process = match self.meanwhile(starting).await? {
            Ok((process, _)) => process,
            Err(error) => return Some(Err(error)),
        };
        // Before it hears of a ring: a worker whose daemon dies now must know who may run its copies.
        self.channels.process.send_replace(Some(process.pidfd()));
        if let Err(error) = self.replay(&mut process).await? {
            // It may serve rings already: only once it is dead may another.
            process.kill();
            self.bury(&mut process).await;
            self.channels.process.send_replace(None);
            return Some(Err(error));
        }
        Some(Ok(process))
    }

    /// Tells a new device process every record, but those of sessions that wait to be closed. `None` when the daemon ends
    /// meanwhile.
    async fn replay(&mut self, process: &mut DeviceProcess) -> Option<Result<(), StartError>> {
        let requests = match self.records.replay() {
            Ok(requests) => requests,
            Err(error) => return Some(Err(error.into())),
        };
        let mut replayed = Replayed::default();
        for (session, messages) in requests {
            if self.calls.iter().any(|call| call.closing() == Some(session)) {
                continue;
            }
            let telling = calls::replay(process, session, messages, &mut replayed);
            if let Err(error) = self.meanwhile(telling).await? {
                return Some(Err(error));
            }
        }
        for (session, region, refusal) in replayed.lost {
            error!(%session, %region, %refusal, "A region did not come back");
            self.records.drop_region(session, region);
        }
        for (session, refusal) in replayed.refused {
            error!(%session, %refusal, "A session's layers did not come back");
            self.records.withdraw(session);
        }
        for (session, found) in replayed.broken {
            self.channels.broken_rings.tell(session, found);
        }
        Some(Ok(()))
    }

    /// Waits for that, while commands and deadlines are still heard. `None` when the daemon ends meanwhile.
    async fn meanwhile<T>(&mut self, what: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(what);
        while self.ending.is_none() {
            tokio::select! {
                done = &mut what => return Some(done),
                command = self.channels.commands.recv() => self.take(command),
                () = sleep_until(self.copies.next_deadline()) => self.copies.expire(Instant::now()),
            }
        }
        None
    }
}

/// Never, when there is no deadline.
async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// The message that ends a device process.
fn shutdown_message() -> records::Message {
    (Request::Shutdown, Vec::new())
}

#[cfg(test)]
mod tests;
