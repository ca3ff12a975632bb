//! What a GPU is asked beside the paired trials: waiting beside a large request, starting, registering, times of kernels.

use std::fs;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, DataType, Indices, Layer, Registration, Request, Slice, Strides, Transport, Use,
};
use statecopy_kernels::device::Device as _;
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::plan::KernelClass;
use statecopy_proto::PlanKind;
use statecopyd::config::Settings;

use super::memory::BenchMemory;
use super::order::{self, StreamOrder};
use super::paths::Daemon;
use super::plan::{Case, Kind, Operation, Work};
use super::record::Record;
use super::rival::{KERNEL_ROWS, KernelTimes, Rival};
use super::statistics::to_nanoseconds;
use super::target::{Cuda, Shared, Target};
use crate::cli::{BenchRunOptions, connect_options};
use crate::spawn::OwnDaemon;
use crate::terminal;
use crate::workload::preset::Preset;
use crate::workload::random::Random;

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extra {
    /// A large request and a small one from two workers at once.
    TwoWorkers,
    /// From exec to a 200 of /readyz.
    Start,
    /// Every layer of the batch.
    Register,
    /// The daemon's kernel and the rival's in replayed graphs.
    Kernels,
    /// Copies in the order of a stream.
    Order,
}

impl Extra {
    const ALL: [Self; 5] =
        [Self::TwoWorkers, Self::Start, Self::Register, Self::Kernels, Self::Order];

    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::TwoWorkers => "two_workers",
            Self::Start => "start",
            Self::Register => "register",
            Self::Kernels => "kernels",
            Self::Order => "order",
        }
    }

    /// Those whose name holds one of the parts; all of them without parts. The host has none, and kernels need a rival.
    pub(super) fn chosen(kind: Kind, rival: bool, parts: &[String]) -> Vec<Self> {
        let mut extras = if kind == Kind::Cuda { Self::ALL.to_vec() } else { Vec::new() };
        extras.retain(|extra| {
            let named = parts.iter().any(|part| extra.name().contains(part.as_str()));
            (rival || *extra != Self::Kernels) && (parts.is_empty() || named)
        });
        extras
    }
}

/// Starts and registrations of each kind.
const TIMES: usize = 5;
/// Rows of 0.75 MiB that the large request selects: 4 GiB. Rows may repeat.
const LARGE_SELECTED: u64 = 5_461;
/// Large requests alone.
const LARGE_TIMES: usize = 20;
/// Rows of 24,576 bytes that the small one selects: 1 MB.
const SMALL_SELECTED: u64 = 43;
/// Small requests, alone and beside large ones.
const SMALL_TIMES: usize = 300;
/// Between two small requests, at most: they come at any moment of the large one.
const PAUSE_MAX: Duration = Duration::from_millis(2);

/// Two workers at once. Times are wall times of requests through the ring.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TwoWorkers {
    /// Bytes of the large request.
    pub(super) large_bytes: u64,
    /// Launches that it is split into.
    pub(super) large_launches: u64,
    /// Bytes of the small one.
    pub(super) small_bytes: u64,
    /// Large ones alone.
    pub(super) large_us: Vec<f64>,
    /// Small ones alone.
    pub(super) small_alone_us: Vec<f64>,
    /// Small ones while the other worker asks for one large request after the other.
    pub(super) small_beside_us: Vec<f64>,
}

/// What was seen, each with its raw samples.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Extras {
    /// A large request and a small one.
    pub(super) two_workers: Option<TwoWorkers>,
    /// From the daemon's exec to the first 200 of /readyz, with the device initialised by this process.
    pub(super) start_ms: Vec<f64>,
    /// A session, its regions and 69 layers registered, with the kernels in the store.
    pub(super) register_filled_ms: Vec<f64>,
    /// The same with an empty store. None where there is no compiler.
    pub(super) register_empty_ms: Vec<f64>,
    /// Copies in the order of a stream.
    #[serde(default)]
    pub(super) order: Option<StreamOrder>,
}

/// Measures what was chosen. The daemons that it starts have those settings.
///
/// # Errors
/// When anything of it cannot be measured.
pub(super) fn measure(
    cuda: &Cuda,
    (settings, guard): (&Settings, &Arc<ServingGuard>),
    chosen: &[Extra],
    options: &BenchRunOptions,
    rival: Option<Rival>,
    record: &mut Record,
) -> anyhow::Result<()> {
    if let Some(mut rival) = rival.filter(|_| chosen.contains(&Extra::Kernels)) {
        terminal::note(&format!("Measuring {}", Extra::Kernels.name()));
        record.kernels = Some(kernels(cuda, options, &mut rival)?);
    }
    // The rival is gone: a third process with a context on the device slows two that take turns on it.
    let mut extras = Extras::default();
    let others = chosen.iter().filter(|extra| **extra != Extra::Kernels);
    for extra in others {
        terminal::note(&format!("Measuring {}", extra.name()));
        match extra {
            Extra::TwoWorkers => {
                extras.two_workers = Some(two_workers(cuda, options, settings.launch_bytes_max)?);
            }
            Extra::Start => {
                for _ in 0..TIMES {
                    let (daemon, took) = OwnDaemon::time_to_ready(&variables(options))?;
                    extras.start_ms.push(milliseconds(took));
                    daemon.stop()?;
                }
            }
            Extra::Register => register(cuda, options, &mut extras)?,
            Extra::Order => {
                let variables = variables(options);
                extras.order = Some(order::measure(cuda, settings, guard, options, &variables)?);
            }
            Extra::Kernels => {}
        }
    }
    record.extras = Some(extras);
    Ok(())
}

fn variables(options: &BenchRunOptions) -> Vec<(String, String)> {
    vec![("STATECOPY_DEVICES".to_owned(), options.device.to_string())]
}

fn milliseconds(time: Duration) -> f64 {
    to_nanoseconds(time.as_secs_f64() * 1e3)
}

fn microseconds(time: Duration) -> f64 {
    to_nanoseconds(time.as_secs_f64() * 1e6)
}

// --- two workers ------------------------------------------------------------------------------------------------------

/// A worker with one layer.
struct Worker {
    client: Client,
    plan: Plan,
    packed: Slice,
    indices: Vec<i32>,
    _memory: [Shared<Cuda>; 2],
}

impl Worker {
    fn register(
        cuda: &Cuda,
        address: &Address,
        preset: Preset,
        rows: u64,
        selected: u64,
    ) -> anyhow::Result<Self> {
        let layout = preset.layout(rows)?;
        let cache = cuda.allocate("cache", preset.page_bytes() * rows)?;
        let packed = cuda.allocate("packed", layout.payload_bytes() * selected)?;
        let device = cuda.device().description().uuid.to_string();
        let options = connect_options("bench worker".to_owned(), Some(device));
        let client = Client::connect(address.clone(), options)?;
        let place = Cuda::register(&client, &cache, Use::Cache)?;
        let packed_at = Cuda::register(&client, &packed, Use::Packed)?;
        let layer = Layer {
            name: "layer".to_owned(),
            dtype: DataType::Float32,
            shape: *layout.shape(),
            strides: Strides::Elements(*layout.strides()),
            region: place.region.clone(),
            offset_bytes: place.offset + preset.offset_bytes(0),
            max_selected: selected,
            check_unique: false,
        };
        let bindings = client.register(&Registration::new().layer(layer), |_| {})?;
        let plan = bindings.layer("layer")?.clone();
        let indices = (0..selected).map(|at| i32::try_from(at % rows)).collect::<Result<_, _>>()?;
        Ok(Self { client, plan, packed: packed_at, indices, _memory: [cache, packed] })
    }

    fn gather(&self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.plan.gather(Request::new(Indices::Int32(&self.indices), self.packed.clone()))?;
        Ok(start.elapsed())
    }

    fn gathers(&self, times: usize) -> anyhow::Result<Vec<f64>> {
        (0..times).map(|_| self.gather().map(microseconds)).collect()
    }
}

fn two_workers(
    cuda: &Cuda,
    options: &BenchRunOptions,
    launch_bytes: u64,
) -> anyhow::Result<TwoWorkers> {
    let daemon = OwnDaemon::start_with(&variables(options))?;
    let rows = |usual| options.cache_rows.unwrap_or(usual);
    let large_selected = options.cache_rows.unwrap_or(LARGE_SELECTED);
    let small_selected = SMALL_SELECTED.min(rows(SMALL_SELECTED));
    let preset = Preset::KimiK3Tp8;
    let large = Worker::register(cuda, daemon.address(), preset, rows(512), large_selected)?;
    let small = Worker::register(cuda, daemon.address(), Preset::Tiny, rows(512), small_selected)?;
    let large_bytes = large_selected * preset.state_bytes();
    let rows_a_launch = (launch_bytes / preset.state_bytes()).max(1);
    large.gathers(3)?;
    small.gathers(3)?;
    let mut seen = TwoWorkers {
        large_bytes,
        large_launches: large_selected.div_ceil(rows_a_launch),
        small_bytes: small_selected * Preset::Tiny.state_bytes(),
        large_us: large.gathers(LARGE_TIMES)?,
        small_alone_us: small.gathers(SMALL_TIMES)?,
        small_beside_us: Vec::new(),
    };
    let (end, ended) = mpsc::channel::<()>();
    let mut random = Random::new(options.seed);
    let beside = thread::scope(|scope| {
        let large = &large;
        let busy = scope.spawn(move || {
            while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
                large.gather()?;
            }
            anyhow::Ok(())
        });
        let taken: anyhow::Result<Vec<f64>> = (0..SMALL_TIMES)
            .map(|_| {
                thread::sleep(PAUSE_MAX * u32::try_from(random.below(1000))? / 1000);
                small.gather().map(microseconds)
            })
            .collect();
        drop(end);
        busy.join().map_err(|_| anyhow::anyhow!("The other worker panicked"))??;
        taken
    });
    seen.small_beside_us = beside?;
    large.client.close()?;
    small.client.close()?;
    daemon.stop()?;
    Ok(seen)
}

// --- registering ------------------------------------------------------------------------------------------------------

fn register(cuda: &Cuda, options: &BenchRunOptions, extras: &mut Extras) -> anyhow::Result<()> {
    let batch = Case { kind: Kind::Cuda, work: Work::Batch, rival: false };
    let rows = options.cache_rows.unwrap_or(batch.selected());
    let memory = BenchMemory::allocate(cuda, &[batch], Some(rows), options.seed)?;
    let uuid = cuda.device().description().uuid;
    let once = |variables: &[(String, String)]| {
        let daemon = OwnDaemon::start_with(variables)?;
        let start = Instant::now();
        let registered = Daemon::register(daemon.address(), uuid, Transport::Ring, &memory)?;
        let took = start.elapsed();
        registered.close()?;
        daemon.stop()?;
        anyhow::Ok(milliseconds(took))
    };
    for _ in 0..TIMES {
        extras.register_filled_ms.push(once(&variables(options))?);
    }
    for _ in 0..if cuda.has_compiler() { TIMES } else { 0 } {
        let store = tempfile::tempdir().context("An empty store")?;
        let mut variables = variables(options);
        let path = store.path().display().to_string();
        variables.push(("STATECOPY_ARTIFACT_STORE".to_owned(), path));
        variables.push(("STATECOPY_ARTIFACT_STORES".to_owned(), String::new()));
        extras.register_empty_ms.push(once(&variables)?);
    }
    Ok(())
}

// --- kernels ----------------------------------------------------------------------------------------------------------

fn kernels(
    cuda: &Cuda,
    options: &BenchRunOptions,
    rival: &mut Rival,
) -> anyhow::Result<KernelTimes> {
    let preset = Preset::KimiK3Tp8;
    let case = Case {
        kind: Kind::Cuda,
        work: Work::Copy {
            preset,
            selected: KERNEL_ROWS[KERNEL_ROWS.len() - 1],
            operation: Operation::Gather,
        },
        rival: true,
    };
    let class = KernelClass {
        kind: PlanKind::Fused,
        dtype: DataType::Float32,
        payload_bytes: preset.state_bytes(),
        base_mod_16: preset.offset_bytes(0).to_le_bytes()[0] % 16,
    };
    let directory = tempfile::tempdir().context("A place for machine code")?;
    let file = directory.path().join("kernels.cubin");
    fs::write(&file, cuda.code(&class)?).context("Machine code for the rival")?;
    let rows = options.cache_rows.unwrap_or(case.cache().rows);
    rival.kernels(&file, "gather_int32", rows)
}
