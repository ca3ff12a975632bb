//! The executor: the one thread that copies. It goes round the rings, one bounded step each, so that nobody waits for more
//! than one launch of everybody else.
//!
//! In the request path it waits for nobody, and it allocates, locks and logs nothing. What it looks requests up in is made
//! by the preparing thread and goes back to it to be dropped.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use statecopy_descriptors::{Connection, Doorbell, DoorbellSet};
use statecopy_kernels::device::{Device, DeviceFault, Launcher as _};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::cpus_allowed;
use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::{Executor as Ring, RingBroken};

use crate::config::DeviceSettings;
use crate::counters::{Counter, Counters};
use crate::link::Reply;
use crate::sync::AtomicU64;

use super::commands::{Command, ExecutorHandle, Outcome};
use super::copying::Inline;
use super::graphs::Graphs;
use super::guard_export::GuardExport;
use super::news::News;
use super::sessions::Sessions;
use super::station::{Scope, Station, Trouble, Turn};
use super::{EXIT_DEVICE_FAILED, reply};

/// The token of the supervisor's doorbell, by which commands come too. Sessions count from 1.
const SUPERVISOR_TOKEN: u64 = 0;

/// How the executor waits for work.
#[derive(Debug, Clone, Copy)]
pub(super) enum Waiting {
    /// It never sleeps.
    BusyPoll,
    /// It spins so long after the last work, then sleeps.
    SpinThenSleep(Duration),
}

impl Waiting {
    /// Spinning where fewer than two CPUs may be used would only keep the workers from running.
    pub(super) fn of(settings: &DeviceSettings) -> Self {
        match cpus_allowed().get() {
            0 | 1 => Self::SpinThenSleep(Duration::ZERO),
            _ if settings.busy_poll => Self::BusyPoll,
            _ => Self::SpinThenSleep(Duration::from_micros(settings.spin_us)),
        }
    }
}

/// Looks between two questions of what time it is, and of commands: each costs as much as several looks, and a request waits
/// meanwhile.
const LOOKS: u32 = 32;

/// For how long there has been nothing to do.
#[derive(Debug, Default)]
struct Idling {
    looks: u32,
    since: Option<Instant>,
}

impl Idling {
    /// One look, and no spinning, before the next sleep.
    fn look_once(&mut self) {
        self.looks = LOOKS - 1;
    }

    /// Counts a look that found nothing; whether to look again before sleeping.
    fn may_spin(&mut self, waiting: Waiting) -> bool {
        self.looks = (self.looks + 1) % LOOKS;
        let spin = match waiting {
            Waiting::BusyPoll => return true,
            Waiting::SpinThenSleep(spin) => spin,
        };
        if spin.is_zero() {
            return false;
        }
        if self.looks > 0 {
            return true;
        }
        let now = Instant::now();
        now.duration_since(*self.since.get_or_insert(now)) < spin
    }
}

/// Why a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// A doorbell rang, there was no sleep, or there was time enough for anything to come.
    ForSomething,
    /// It is time to look at the bells of lanes again.
    ToLook,
}

/// The longest sleep between two looks at bells: a device's write wakes no CPU.
const PAUSE_MAX: Duration = Duration::from_micros(50);

/// How long to sleep between two looks at bells: longer the longer none rings.
#[derive(Debug)]
struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_micros(1))
    }
}

impl Pause {
    fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(PAUSE_MAX);
        now
    }
}

/// What the executor is started with.
pub(super) struct Setup {
    /// The supervisor's ring.
    pub(super) ring: Ring,
    /// The doorbell of that ring and of commands.
    pub(super) bell: Doorbell,
    pub(super) counters: Counters,
    pub(super) guard: Arc<ServingGuard>,
    /// For news that nobody asked for: never waited for by the executor.
    pub(super) link: Arc<Connection>,
    pub(super) settings: DeviceSettings,
}

/// The executor thread's state.
struct Executor<D: Device> {
    stations: Vec<(Station<D>, Doorbell)>,
    bells: DoorbellSet,
    launcher: D::Launcher,
    sessions: Sessions<D>,
    commands: Receiver<Command<D>>,
    /// A command that waits for a running copy of its session.
    deferred: Option<Command<D>>,
    tell: SyncSender<Outcome>,
    counters: Counters,
    export: GuardExport,
    news: News,
    /// For last words.
    link: Arc<Connection>,
    waiting: Waiting,
    pause: Pause,
    /// Whether there may be a copy to prepare for.
    may_expect: bool,
    /// When the device was last asked whether it lives.
    checked: Instant,
    ending: bool,
}

/// Starts the executor's thread.
///
/// # Errors
/// PREPARE_FAILED when it cannot be started, or the device has no launcher.
pub(super) fn start<D: Device>(device: &D, setup: Setup) -> Result<ExecutorHandle<D>, Refusal> {
    let Setup { ring, bell, counters, guard, link, settings } = setup;
    let (commands, inbox) = sync_channel(1);
    let (tell, outcomes) = sync_channel(1);
    let hook_epoch = Arc::new(AtomicU64::new(0));
    let selected_max = usize::try_from(settings.selected_max).unwrap_or(usize::MAX);
    let station = Station::new(Scope::Supervisor, ring, Inline::new(selected_max), Arc::default());
    let own_bell = bell.try_clone().map_err(|error| not_started(&error))?;
    let bells = DoorbellSet::create().map_err(|error| not_started(&error))?;
    bells.add(&own_bell, SUPERVISOR_TOKEN).map_err(|error| not_started(&error))?;
    let news_bell = bell.try_clone().map_err(|error| not_started(&error))?;
    let news = News::start(Arc::clone(&link), news_bell).map_err(|error| not_started(&error))?;
    let executor = Executor {
        stations: vec![(station, own_bell)],
        bells,
        launcher: device.launcher()?,
        sessions: Sessions::new(Arc::clone(&hook_epoch)),
        commands: inbox,
        deferred: None,
        tell,
        counters,
        export: GuardExport::new(guard),
        news,
        link,
        waiting: Waiting::of(&settings),
        pause: Pause::default(),
        may_expect: true,
        checked: Instant::now(),
        ending: false,
    };
    let cpu = settings.executor_cpu.map(usable).transpose()?;
    let thread = thread::Builder::new()
        .name("executor".to_owned())
        .spawn(move || {
            pin_to(cpu);
            executor.run();
        })
        .map_err(|error| not_started(&error))?;
    Ok(ExecutorHandle::new((commands, outcomes), bell, hook_epoch, thread))
}

impl<D: Device> Executor<D> {
    fn run(mut self) {
        let mut idle = Idling::default();
        loop {
            // Commands are rare: not at every look, but at once after work and before sleep.
            let moved_on = (idle.looks == 0 || self.deferred.is_some()) && self.heed();
            match self.round() {
                Turn::Progressed => {
                    idle = Idling::default();
                    self.pause = Pause::default();
                }
                Turn::Waiting => std::hint::spin_loop(),
                Turn::Idle if moved_on => {}
                Turn::Idle if self.ending => {
                    self.acknowledge(Outcome::Done(None));
                    return;
                }
                Turn::Idle => {
                    if idle.may_spin(self.waiting) {
                        std::hint::spin_loop();
                    } else {
                        match self.sleep() {
                            Woken::ForSomething => idle = Idling::default(),
                            Woken::ToLook => idle.look_once(),
                        }
                    }
                }
            }
        }
    }

    /// One step of every ring.
    fn round(&mut self) -> Turn {
        let Self { stations, launcher, sessions, counters, deferred, news, .. } = self;
        let paused = deferred.as_ref().and_then(Command::waits_for);
        let mut overall = Turn::Idle;
        let mut failed = None;
        for (station, _) in stations {
            // Only what runs goes on there, so that the command's turn comes.
            let paused = paused.is_some_and(|session| station.serves(session));
            let turn = match station.turn(launcher, sessions, counters, paused) {
                Ok(turn) => turn,
                Err(Trouble::Ring(broken)) if tell_broken(news, station.scope(), broken) => {
                    station.note_told();
                    counters.add(Counter::RingsBroken, 1);
                    Turn::Progressed
                }
                // It is offered again once the doorbell has told of a place.
                Err(Trouble::Ring(_)) => Turn::Idle,
                Err(Trouble::Device(fault)) => {
                    failed = Some(fault);
                    break;
                }
            };
            overall = overall.max(turn);
        }
        if let Some(fault) = failed {
            self.give_up(&fault);
        }
        match overall {
            Turn::Progressed => {
                self.may_expect = true;
                self.export.publish(&self.counters);
            }
            // Of what nobody waits for, one step a round, and none while a command does.
            Turn::Idle if self.may_expect && self.deferred.is_none() => self.expect(),
            Turn::Idle | Turn::Waiting => {}
        }
        overall
    }

    /// Prepares for one copy whose bell may ring soon.
    fn expect(&mut self) {
        let Self { stations, launcher, sessions, may_expect, .. } = self;
        *may_expect = false;
        if launcher.hooked() {
            // What was sealed before it is refused: by the next request that looks for it.
            return;
        }
        for (station, _) in stations {
            match station.expect(launcher, sessions) {
                Ok(false) => {}
                Ok(true) => {
                    *may_expect = true;
                    return;
                }
                Err(fault) => self.give_up(&fault),
            }
        }
    }

    /// The device failed: answers what it was given, says so, and ends the process. The supervisor starts the next one.
    #[expect(
        clippy::disallowed_methods,
        reason = "a drop would free what the device may still write to"
    )]
    fn give_up(&mut self, fault: &DeviceFault) -> ! {
        for (station, _) in &mut self.stations {
            station.lose(&self.counters);
        }
        self.export.publish(&self.counters);
        // Whoever does not hear it learns it from the exit code.
        reply(&self.link, 0, Reply::DeviceFailed { reason: fault.0.clone() }).ok();
        std::process::exit(EXIT_DEVICE_FAILED)
    }

    /// Carries out one command, if there is one and its session's running copy has ended.
    fn heed(&mut self) -> bool {
        let command = match self.deferred.take() {
            Some(command) => command,
            None => match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {
                    self.ending = true;
                    return false;
                }
            },
        };
        let runs = |session| self.stations.iter().any(|(station, _)| station.works_for(session));
        let waits = match command {
            // Every ring is told, also behind one that is not empty yet.
            Command::Drain => self
                .stations
                .iter_mut()
                .fold(false, |waits, (station, _)| !station.close() || waits),
            _ => command.waits_for().is_some_and(runs),
        };
        if waits {
            self.deferred = Some(command);
            return false;
        }
        if let Some(outcome) = self.carry_out(command) {
            self.export.publish(&self.counters);
            self.acknowledge(outcome);
        }
        true
    }

    /// `None`: acknowledged later.
    fn carry_out(&mut self, command: Command<D>) -> Option<Outcome> {
        match command {
            Command::Drain => Some(Outcome::Done(None)),
            Command::Fail(fault) => self.give_up(&fault),
            Command::End => {
                self.ending = true;
                None
            }
            Command::Open(station, bell) => {
                let token = match station.scope() {
                    Scope::Supervisor => SUPERVISOR_TOKEN,
                    Scope::Session(session) => session.0,
                };
                let added = self.bells.add(&bell, token);
                assert!(added.is_ok(), "A worker's doorbell cannot be listened to: {added:?}");
                self.stations.push((*station, bell));
                Some(Outcome::Done(None))
            }
            Command::Move(session, table, inline) if self.is_rung(session) => {
                Some(Outcome::Rung(Some(Box::new((table, inline)))))
            }
            Command::Install(session, table, inline) | Command::Move(session, table, inline) => {
                self.expect_again();
                let old = self.sessions.install(session, table);
                let old_inline = match self.station_of(session) {
                    Some(at) => self.stations[at].0.fit(inline),
                    None => inline,
                };
                Some(Outcome::Done(Some(Box::new((old, old_inline)))))
            }
            Command::Arm(session, slots, resumed) => {
                if let Some(graphs) = self.graphs_of(session) {
                    graphs.arm(&slots, resumed);
                }
                self.may_expect = true;
                Some(Outcome::Done(Some(Box::new(slots))))
            }
            Command::Disarm(session, pair) => {
                let disarmed = self.graphs_of(session).and_then(|graphs| graphs.disarm(pair));
                Some(Outcome::Done(Some(Box::new(disarmed))))
            }
            Command::Close(session) => {
                self.expect_again();
                let old = self.sessions.remove(session);
                let station = self.station_of(session).map(|at| self.stations.swap_remove(at));
                if let Some((_, bell)) = &station {
                    self.bells.remove(bell).ok();
                }
                Some(Outcome::Done(Some(Box::new((old, station)))))
            }
        }
    }

    /// Nothing that is prepared outlives the tables that it was made by: they are dropped elsewhere, and with them their kernels.
    fn expect_again(&mut self) {
        self.may_expect = true;
        self.launcher.expect_nothing();
        for (station, _) in &mut self.stations {
            station.expect_again();
        }
    }

    fn station_of(&self, session: SessionId) -> Option<usize> {
        self.stations.iter().position(|(station, _)| station.scope() == Scope::Session(session))
    }

    fn graphs_of(&mut self, session: SessionId) -> Option<&mut Graphs<D>> {
        let at = self.station_of(session)?;
        self.stations[at].0.graphs()
    }

    /// Whether a stream of a session waits for a copy.
    fn is_rung(&self, session: SessionId) -> bool {
        self.station_of(session).is_some_and(|at| self.stations[at].0.is_rung())
    }

    fn acknowledge(&self, outcome: Outcome) {
        // The preparing thread waits for it; when it is gone, so is this process in a moment.
        self.tell.send(outcome).ok();
    }

    /// Sleeps until a doorbell rings, or it is time to look at the bells of lanes, or to ask whether the device lives.
    fn sleep_on_bells(&mut self) -> Woken {
        let mut rung = false;
        let look = self.stations.iter().any(|(station, _)| station.awaits_bell());
        let pause = look.then(|| self.pause.next());
        let slept = self.bells.wait(pause.or(self.launcher.check_every()), |_| rung = true);
        assert!(slept.is_ok(), "The executor cannot sleep: {slept:?}");
        if look {
            self.counters.add(Counter::BellLooks, 1);
        }
        if !rung
            && self.is_check_due(look)
            && let Err(fault) = self.launcher.check()
        {
            self.give_up(&fault);
        }
        if look && !rung { Woken::ToLook } else { Woken::ForSomething }
    }

    /// Whether to ask now: after each sleep of that length, or once in so long where sleeps are short.
    fn is_check_due(&mut self, short_sleep: bool) -> bool {
        let Some(every) = self.launcher.check_every() else { return false };
        let now = Instant::now();
        let due = !short_sleep || now.duration_since(self.checked) >= every;
        if due {
            self.checked = now;
        }
        due
    }

    /// Sleeps until a ring or a command comes. A command always rings, and so does whoever submits after the rings were told
    /// of the sleep: none is missed between the look and the sleep.
    fn sleep(&mut self) -> Woken {
        self.export.publish(&self.counters);
        let idle = self.stations.iter_mut().all(|(station, _)| station.prepare_sleep());
        let woken = if idle { self.sleep_on_bells() } else { Woken::ForSomething };
        for (station, bell) in &mut self.stations {
            station.cancel_sleep();
            // Not where nothing but bells of lanes is looked at next: a command may have rung after the sleep.
            if idle && woken == Woken::ForSomething {
                bell.clear().ok();
            }
        }
        woken
    }
}

/// Whether it is told: there may be no place for the news yet.
fn tell_broken(news: &News, scope: Scope, broken: RingBroken) -> bool {
    match scope {
        // A daemon that cannot trust itself starts over.
        Scope::Supervisor => panic!("The supervisor's ring is broken: {broken}"),
        Scope::Session(session) => news.offer(session, broken),
    }
}

/// A CPU of the configuration that this process may use.
fn usable(cpu: usize) -> Result<CpuSet, Refusal> {
    let allowed = sched_getaffinity(None).map_err(|errno| not_started(&errno.into()))?;
    if cpu >= CpuSet::MAX_CPU || !allowed.is_set(cpu) {
        let sentence = format!("executor_cpu = {cpu} is no CPU that the daemon may use");
        return Err(Refusal::new(RefusalCode::PrepareFailed, sentence)
            .about("executor_cpu")
            .remedied_by(
                "Name a CPU of the daemon's affinity (taskset -p), or leave executor_cpu unset.",
            ));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(set)
}

/// Keeps the calling thread on its CPU, where the configuration names one.
fn pin_to(cpu: Option<CpuSet>) {
    if let Some(cpu) = cpu {
        // It was usable a moment ago; a thread that roams is slower and no worse.
        sched_setaffinity(None, &cpu).ok();
    }
}

fn not_started(error: &io::Error) -> Refusal {
    Refusal::new(RefusalCode::PrepareFailed, format!("The executor could not be started: {error}"))
}
