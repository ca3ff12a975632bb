//! Copies in the order of a worker's stream: what comes after them starts when the bytes are there, and the host waits for nothing.
//!
//! A chain is what a step does around a copy: a short kernel, the copy, a short kernel, then one synchronise. It is asked of the
//! worker's stream, or recorded once and replayed; the copy is the daemon's, or the same kernel launched on that stream.

mod work;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use statecopy_client::Transport;
use statecopy_client::blocking::Admin;
use statecopy_kernels::cuda::MANAGEMENT_LIBRARY;
use statecopy_kernels::cuda::probe::Probe;
use statecopy_kernels::device::Device as _;
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::signature::DeviceUuid;
use statecopyd::config::Settings;

use self::work::{Chain, Worker};
use super::machine::cpu_time;
use super::memory::BenchMemory;
use super::paths::{Daemon, InProcess};
use super::plan::{Case, Kind, Operation, Work};
use super::statistics::to_nanoseconds;
use super::target::{Cuda, Target as _};
use crate::ask::ADMIN_TIMEOUT;
use crate::cli::BenchRunOptions;
use crate::spawn::OwnDaemon;
use crate::workload::preset::Preset;
use crate::workload::random::Random;

/// Rows of 0.75 MiB of each chain's copy.
pub(super) const SELECTED: [u64; 3] = [1, 8, 64];
/// Chains of each that are not timed.
const WARM_UP: usize = 20;
/// How a chain gets on the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Each operation is asked for.
    Stream,
    /// All of it was recorded, and is replayed.
    Graph,
}

impl How {
    pub(super) const ALL: [Self; 2] = [Self::Stream, Self::Graph];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Graph => "graph",
        }
    }
}

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The daemon.
    Daemon,
    /// The daemon a second time.
    Control,
    /// This process.
    InProcess,
}

impl Who {
    pub(super) const ALL: [Self; 3] = [Self::Daemon, Self::Control, Self::InProcess];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Control => "control",
            Self::InProcess => "inproc",
        }
    }
}

/// What was seen, with raw samples.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct StreamOrder {
    /// Whether processes share the device through MPS, as the driver says. Without it the device's turn goes from one process to
    /// the other and back in each chain.
    pub(super) mps: Option<bool>,
    /// Wall time of a chain: by its way and its rows, then by who copies.
    pub(super) chain_us: BTreeMap<String, BTreeMap<String, Vec<f64>>>,
    /// Time that the caller is not free, of a stream-ordered gather: the request, its check, and the stream's two operations.
    pub(super) enqueue_us: BTreeMap<String, Vec<f64>>,
    /// CPU time of the device process in percent of one CPU, for each of [`Idle`].
    pub(super) idle_cpu_percent: BTreeMap<String, f64>,
}

/// What nobody asks anything of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    /// A session with lanes, nothing of which waits.
    Open,
    /// Graphs that are not replayed.
    Armed,
    /// A copy that was accepted and whose bell does not ring.
    Unrung,
}

impl Idle {
    pub(super) const ALL: [Self; 3] = [Self::Open, Self::Armed, Self::Unrung];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Armed => "armed",
            Self::Unrung => "unrung",
        }
    }
}

/// The name of a chain in the record.
pub(super) fn chain_name(how: How, selected: u64) -> String {
    format!("{}/s{selected}", how.label())
}

/// Measures chains and idle executors, by a daemon of its own.
///
/// # Errors
/// When a chain cannot run, or copies wrong bytes.
pub(super) fn measure(
    cuda: &Cuda,
    settings: &Settings,
    guard: &Arc<ServingGuard>,
    options: &BenchRunOptions,
    variables: &[(String, String)],
) -> anyhow::Result<StreamOrder> {
    let work = Work::Copy {
        preset: Preset::KimiK3Tp8,
        selected: SELECTED[SELECTED.len() - 1],
        operation: Operation::Gather,
    };
    let case = Case { kind: Kind::Cuda, work, rival: false };
    let memory = BenchMemory::allocate(cuda, &[case], options.cache_rows, options.seed)?;
    let daemon = OwnDaemon::start_with(variables)?;
    let uuid = cuda.device().description().uuid;
    let served = Daemon::register(daemon.address(), uuid, Transport::Ring, &memory)?;
    let admin = Admin::connect(daemon.address().clone(), ADMIN_TIMEOUT)?;
    let process = admin.inspect()?.devices.first().context("A device")?.device_process_pid;
    let mps = is_shared_by_mps(&settings.cuda.driver_library, uuid)?;
    let mut seen = StreamOrder { mps, ..StreamOrder::default() };
    {
        guard.open();
        let own = InProcess::prepare(cuda, Arc::clone(guard), &memory)?;
        let mut worker = Worker::new(cuda, settings, &memory, &served, own)?;
        let mut random = Random::new(options.seed);
        for selected in SELECTED {
            for how in How::ALL {
                let chain = worker.chain(how, selected)?;
                let samples = chains(&mut worker, &chain, options.trials, &mut random)?;
                seen.chain_us.insert(chain_name(how, selected), samples);
            }
            let enqueues = worker.enqueues(selected, options.trials)?;
            seen.enqueue_us.insert(format!("s{selected}"), enqueues);
        }
        for idle in Idle::ALL {
            let _kept = worker.idle(idle)?;
            let percent = watch(process, Duration::from_millis(options.idle_ms))?;
            seen.idle_cpu_percent.insert(idle.label().to_owned(), percent);
        }
        worker.settle()?;
    }
    served.close()?;
    daemon.stop()?;
    Ok(seen)
}

/// Each way once a trial, in an order of its own; every path's bytes are checked before.
fn chains(
    worker: &mut Worker<'_>,
    chain: &Chain,
    trials: u64,
    random: &mut Random,
) -> anyhow::Result<BTreeMap<String, Vec<f64>>> {
    for who in Who::ALL {
        worker.check(chain, who)?;
        for _ in 0..WARM_UP {
            worker.run(chain, who)?;
        }
    }
    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for _ in 0..trials {
        let mut order = Who::ALL;
        random.shuffle(&mut order);
        for who in order {
            // What another path left behind is this path's before the interval.
            worker.run(chain, who)?;
            let took = worker.run(chain, who)?;
            samples.entry(who.label().to_owned()).or_default().push(microseconds(took));
        }
    }
    Ok(samples)
}

fn watch(process: u32, time: Duration) -> anyhow::Result<f64> {
    // The executor spins for a while after the last copy.
    thread::sleep(time / 8);
    let (before, start) = (cpu_time(process)?, Instant::now());
    thread::sleep(time);
    let used = cpu_time(process)?.saturating_sub(before);
    Ok(to_nanoseconds(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64()))
}

fn is_shared_by_mps(driver: &Path, uuid: DeviceUuid) -> anyhow::Result<Option<bool>> {
    let only = uuid.to_string().parse()?;
    let devices = Probe::open(driver, Path::new(MANAGEMENT_LIBRARY))?.devices(Some(only))?;
    Ok(devices.first().and_then(|device| device.shared_by_mps))
}

fn microseconds(time: Duration) -> f64 {
    to_nanoseconds(time.as_secs_f64() * 1e6)
}
