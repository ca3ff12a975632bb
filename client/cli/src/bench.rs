//! `statecopy bench`: what a copy costs through the daemon, beside the same copy in the worker itself.
//!
//! Paired (contract: Performance method): this process is the one worker. In every trial it calls every path once, with the
//! same inputs and the same allocation, in an order of its own; one path is measured twice under two labels.

mod extras;
mod footprint;
mod machine;
mod memory;
mod order;
mod paths;
pub(crate) mod peer;
mod plan;
mod record;
mod report;
mod rival;
mod statistics;
mod target;
mod trial;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use statecopy_client::blocking::Admin;
use statecopy_client::{ConnectOptions, Transport};
use statecopy_kernels::device::Device as _;
use statecopy_kernels::guard::ServingGuard;
use statecopyd::config::{self, DeviceName, Flags, Settings};

use self::extras::Extra;
use self::machine::{CpuPair, DeviceFacts, Machine, Pinned, Thread, load_average};
use self::memory::BenchMemory;
use self::paths::{Daemon, InProcess, SELECTED_MAX};
use self::peer::Peer;
use self::plan::{Case, Kind};
use self::record::{CaseRecord, FORMAT, Output, Record, RunSettings, Source};
use self::rival::Rival;
use self::target::{Cuda, Host, Target};
use self::trial::Bench;
use crate::ask::{ADMIN_TIMEOUT, compiles_while_serving};
use crate::cli::{BenchCommand, BenchOptions, BenchRunOptions};
use crate::failure::Failure;
use crate::spawn::{DaemonInUse, OwnDaemon};
use crate::terminal;

/// The device process's thread that copies.
const EXECUTOR_THREAD: &str = "executor";

/// `statecopy bench`, and `statecopy bench report`.
///
/// # Errors
/// When a path cannot run or copies wrong bytes, or a file cannot be read or written.
pub(crate) fn run(options: &BenchOptions) -> anyhow::Result<ExitCode> {
    match (&options.command, &options.run) {
        (Some(BenchCommand::Report(options)), _) => report::run(options),
        (None, Some(options)) => measure(options),
        (None, None) => Err(Failure::usage("There is no --output", "Name a new file.").into()),
    }
}

fn measure(options: &BenchRunOptions) -> anyhow::Result<ExitCode> {
    let kind = match options.device {
        DeviceName::Host => Kind::Host,
        DeviceName::Cuda(_) => Kind::Cuda,
    };
    let rival = options.rival.is_some();
    if rival && kind == Kind::Host {
        return Err(Failure::usage("The host has no rival", "Name a --device.").into());
    }
    let cases = Case::chosen(kind, &options.cases).into_iter();
    let cases: Vec<Case> = cases.map(|case| Case { rival, ..case }).collect();
    let extras = Extra::chosen(kind, rival, &options.cases);
    if cases.is_empty() && extras.is_empty() {
        let mut names: Vec<String> = Case::all(kind).into_iter().map(Case::name).collect();
        names.extend(
            Extra::chosen(kind, rival, &[]).into_iter().map(|extra| extra.name().to_owned()),
        );
        let remedy = format!("Name a part of: {}", names.join(", "));
        return Err(Failure::usage("No case has such a name", remedy).into());
    }
    let output = Output::create(&options.output)?;
    let cpus = CpuPair::choose()?;
    let copy_threads = match options.all_cores {
        true => thread::available_parallelism().context("The CPUs of this process")?,
        false => NonZeroUsize::MIN,
    };
    let mut record = empty_record(options, kind, cpus, copy_threads)?;
    let start = Instant::now();
    if options.address.is_none() && kind == Kind::Host {
        terminal::note("Looking at an idle daemon");
        let idle = Duration::from_millis(options.idle_ms);
        record.footprint = Some(footprint::look(options.sessions, idle)?);
    }
    let guard = Arc::new(ServingGuard::new(false));
    match options.device {
        DeviceName::Host => {
            let host = Host::open(copy_threads, &guard)?;
            record.device = Some(DeviceFacts::of(host.device()));
            measure_on(&host, &guard, &cases, options, None, &mut record)?;
        }
        DeviceName::Cuda(selector) => {
            let settings = daemon_defaults()?;
            let cuda = Cuda::open(selector, &settings, SELECTED_MAX, &guard)?;
            record.device = Some(DeviceFacts::of(cuda.device()));
            let cpu = record.pinning.map(|cpus| cpus.worker);
            let is_wanted = !cases.is_empty() || extras.contains(&Extra::Kernels);
            let rival = options.rival.as_deref().filter(|_| is_wanted);
            let rival = rival.map(|command| Rival::start(command, cpu)).transpose()?;
            record.rival = rival.as_ref().map(|rival| rival.facts().clone());
            let rival = match cases.is_empty() {
                true => rival,
                false => measure_on(&cuda, &guard, &cases, options, rival, &mut record)?,
            };
            let with = (&settings, &guard);
            extras::measure(&cuda, with, &extras, options, rival, &mut record)?;
        }
    }
    record.took_s = start.elapsed().as_secs();
    record.machine.load_average_after = load_average();
    output.write(&record)?;
    terminal::print(&report::table(&record))?;
    Ok(ExitCode::SUCCESS)
}

fn measure_on<T: Target>(
    target: &T,
    guard: &Arc<ServingGuard>,
    cases: &[Case],
    options: &BenchRunOptions,
    rival: Option<Rival>,
    record: &mut Record,
) -> anyhow::Result<Option<Rival>> {
    // The daemon and the ping-pong's other side inherit this process's CPUs: they start before it stays on one of them.
    let daemon = match &options.address {
        Some(address) => DaemonInUse::Given(address.clone()),
        None => DaemonInUse::Own(OwnDaemon::start_with(&variables(&record.settings))?),
    };
    daemon.serve(|daemon| measure_by(daemon, target, guard, cases, options, rival, record))
}

fn measure_by<T: Target>(
    daemon: &DaemonInUse,
    target: &T,
    guard: &Arc<ServingGuard>,
    cases: &[Case],
    options: &BenchRunOptions,
    rival: Option<Rival>,
    record: &mut Record,
) -> anyhow::Result<Option<Rival>> {
    let cpus = record.pinning.map_or_else(CpuPair::choose, Ok)?;
    let peer = Peer::start(cpus.executor)?;
    let admin = Admin::connect(daemon.address().clone(), ADMIN_TIMEOUT)?;
    let uuid = target.device().description().uuid;
    let named = uuid.to_string();
    let devices = admin.inspect()?.devices;
    let served = devices
        .iter()
        .find(|served| served.device.as_ref().is_some_and(|description| description.uuid == named));
    let served = served.with_context(|| format!("The daemon does not serve {}", options.device))?;
    let executor = Thread::named(served.device_process_pid, EXECUTOR_THREAD)?;
    let memory = BenchMemory::allocate(target, cases, options.cache_rows, options.seed)?;
    let register = |transport| Daemon::register(daemon.address(), uuid, transport, &memory);
    let mut bench = Bench {
        seed: options.seed,
        trials: options.trials,
        in_process: InProcess::prepare(target, Arc::clone(guard), &memory)?,
        ring: register(Transport::Ring)?,
        grpc: register(Transport::Grpc)?,
        memory,
        peer,
        executor,
        rival,
    };
    run_cases(&mut bench, cases, &admin, record)?;
    bench.ring.close()?;
    bench.grpc.close()?;
    if let Some(facts) = &mut record.device {
        facts.look(&uuid);
    }
    Ok(bench.rival)
}

fn run_cases<T: Target>(
    bench: &mut Bench<T>,
    cases: &[Case],
    admin: &Admin,
    record: &mut Record,
) -> anyhow::Result<()> {
    // Now, and not before: where one CPU may be used a client that connects decides never to spin.
    let _pinned = record.pinning.map(|cpus| Pinned::to(cpus.worker)).transpose()?;
    let bar = terminal::progress(cases.len() as u64 * bench.trials, "trials", false);
    for case in cases {
        bar.set_message(case.name());
        let samples = bench.run(*case, || bar.inc(1))?;
        let rows = bench.memory.cache(*case)?.1.layout.rows();
        record.cases.push(CaseRecord::of(*case, rows));
        record.add(*case, samples);
    }
    bar.finish_and_clear();
    let entries = compiles_while_serving(&admin.inspect()?) + bench.in_process.compiler_entries();
    record.compiler_entries_while_serving = entries;
    if entries > 0 {
        let sentence = format!("A compiler was entered {entries} times while the trials ran");
        return Err(Failure::other(sentence, "No sample of this run counts.").into());
    }
    Ok(())
}

/// What a daemon of this environment is configured with.
#[expect(clippy::disallowed_methods, reason = "the daemon's own variables, which it is given too")]
fn daemon_defaults() -> anyhow::Result<Settings> {
    let environment = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let loaded = config::load(&Flags::default(), environment);
    Ok(loaded.context("The settings of the daemon")?.settings)
}

fn empty_record(
    options: &BenchRunOptions,
    kind: Kind,
    cpus: CpuPair,
    copy_threads: NonZeroUsize,
) -> anyhow::Result<Record> {
    let executable = fs::read("/proc/self/exe").context("This program")?;
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).context("The clock")?;
    let [modes, paths] = Record::meanings(options.rival.is_some());
    Ok(Record {
        format: FORMAT,
        medians_us: BTreeMap::new(),
        seed: options.seed,
        trials: options.trials,
        started_unix_s: since_1970.as_secs(),
        took_s: 0,
        source: Source {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: options.commit.clone().or(option_env!("STATECOPY_COMMIT").map(str::to_owned)),
            executable_blake3: blake3::hash(&executable).to_hex().to_string(),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        },
        machine: Machine::look()?,
        device: None,
        rival: None,
        pinning: (!options.all_cores).then_some(cpus),
        settings: RunSettings {
            copy_threads: copy_threads.get(),
            all_cores: options.all_cores,
            address: options.address.as_ref().map(ToString::to_string),
            worker_spin_us: ConnectOptions::default().spin.as_micros(),
            daemon: daemon_settings(options, cpus, copy_threads),
            interval: "packed memory taken from a pool of shared memory (the output allocation), index and flag handling, \
                       the copy; the output is given back outside"
                .to_owned(),
            before_interval: match kind {
                Kind::Host => {
                    "one untimed call of the same path with the same inputs where packed is at most 4 MiB; else one untimed \
                     empty request on paths through the daemon, so that its executor is awake; in empty_after_sleep nothing \
                     until the executor sleeps"
                }
                Kind::Cuda => {
                    "one untimed call of the same path with other rows and another packed buffer; no two calls that follow \
                     each other share either, so that the GPU's cache holds neither, whatever path comes first"
                }
            }
            .to_owned(),
        },
        footprint: None,
        compiler_entries_while_serving: 0,
        cases: Vec::new(),
        modes,
        paths,
        samples_us: BTreeMap::new(),
        kernels: None,
        extras: None,
    })
}

/// What our own daemon is started with. Somebody else's has its own settings.
fn daemon_settings(
    options: &BenchRunOptions,
    cpus: CpuPair,
    copy_threads: NonZeroUsize,
) -> BTreeMap<String, String> {
    if options.address.is_some() {
        return BTreeMap::new();
    }
    let usual = Settings::default();
    let mut settings = vec![
        ("copy_threads", copy_threads.to_string()),
        ("spin_us", usual.spin_us.to_string()),
        ("busy_poll", usual.busy_poll.to_string()),
        ("launch_bytes_max", usual.launch_bytes_max.to_string()),
    ];
    if let DeviceName::Cuda(_) = options.device {
        settings.push(("devices", options.device.to_string()));
    }
    if !options.all_cores {
        settings.push(("executor_cpu", cpus.executor.to_string()));
    }
    settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn variables(settings: &RunSettings) -> Vec<(String, String)> {
    let named = settings.daemon.iter();
    named
        .map(|(name, value)| (format!("STATECOPY_{}", name.to_uppercase()), value.clone()))
        .collect()
}
