//! Who dies, and what goes on.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use statecopy_client::{DataType, Direction};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::CacheLayout;
use statecopy_tests::Indices;

use crate::known::Known;
use crate::patience::eventually;
use crate::rig::{Inputs, Rig, Spec, Target};
use crate::setup::{Gpu, Setup};
use crate::worker::{State, Worker, worker_bytes};

/// What of a dead worker's memory may be missing still: the drivers of living processes keep some of what they once had.
const SLACK_BYTES: u64 = 96 << 20;
/// The bound of the contract's scenario is 2 s, and what is asserted is ten times that.
const BACK_WITHIN: Duration = Duration::from_secs(20);
/// How many workers are killed while memory is looked at.
const ROUNDS: u64 = 3;

fn layers() -> Result<Vec<(CacheLayout, u64)>> {
    let layout = CacheLayout::with_page_stride(DataType::Float32, [6, 4, 32, 32], 3 * 4 * 1_024)?;
    let payload = layout.payload_bytes();
    Ok(vec![(layout.clone(), 0), (layout, payload)])
}

fn rig(setup: &Setup, socket: &Path, how: Allocator) -> Result<Rig> {
    let spec = Spec::of_layers(layers()?, 6).allocated(how);
    Rig::new(setup.client_of(socket)?, &setup.gpu()?, &spec)
}

const VIRTUAL: Allocator = Allocator::Virtual { piece_bytes: 2 << 20, shared: true };

pub(crate) fn idle_worker(setup: &Setup) -> Result<String> {
    killed(setup, State::Idle)
}

pub(crate) fn sending_worker(setup: &Setup) -> Result<String> {
    killed(setup, State::Sending)
}

pub(crate) fn copying_worker(setup: &Setup) -> Result<String> {
    killed(setup, State::Copying)
}

pub(crate) fn unrung_worker(setup: &Setup) -> Result<String> {
    killed_in_a_stream(setup, State::Unrung, 0)
}

pub(crate) fn waiting_worker(setup: &Setup) -> Result<String> {
    killed_in_a_stream(setup, State::Waiting, 0)
}

pub(crate) fn rung_worker(setup: &Setup) -> Result<String> {
    killed_in_a_stream(setup, State::Rung, 1)
}

pub(crate) fn replaying_worker(setup: &Setup) -> Result<String> {
    killed(setup, State::Replaying)
}

/// Kills a worker behind each step of a graph's copy.
pub(crate) fn graph_workers(setup: &Setup) -> Result<String> {
    let mut other = rig(setup, &setup.socket, Allocator::Default)?;
    let sessions = || anyhow::Ok(setup.client()?.inspect()?.sessions.len());
    let before = sessions()?;
    let phases = [State::GraphIdle, State::GraphRung, State::GraphDone, State::GraphNoted];
    for (state, seed) in phases.into_iter().zip(1..) {
        let worker = Worker::start(setup, state)?;
        other.serves(seed)?;
        worker.kill()?;
        eventually("the session is gone", || Ok((sessions()? <= before).then_some(())))?;
        other.serves(seed + 10)?;
    }
    Ok(format!("in {} phases; the other worker's copies were right", phases.len()))
}

/// Kills a worker whose stream has a scatter, and counts how many of these were made for each worker.
fn killed_in_a_stream(setup: &Setup, state: State, landing: u64) -> Result<String> {
    let scatters = || {
        let device = setup.client()?.inspect()?.devices.into_iter().next().context("a device")?;
        let mut counters = device.counters.into_iter();
        let of_scatters = counters.find(|counter| {
            counter.name == "statecopy_copies_total" && counter.label == Direction::Scatter.label()
        });
        anyhow::Ok(of_scatters.context("a counter")?.value)
    };
    let before = scatters()?;
    let seen = killed(setup, state)?;
    let of_the_other = 2 * (1 + 2 * ROUNDS);
    let expected = before + of_the_other + landing * (1 + ROUNDS);
    let landed = scatters()?;
    ensure!(landed == expected, "{landed} scatters were made, not {expected}");
    Ok(format!("{landing} scatter of each landed; {seen}"))
}

/// Kills a worker in a state, one time and [`ROUNDS`], while another one copies: two scatters before, and four each round.
fn killed(setup: &Setup, state: State) -> Result<String> {
    let gpu = setup.gpu()?;
    let mut other = rig(setup, &setup.socket, Allocator::Default)?;
    other.serves(1)?;
    let sessions = || anyhow::Ok(setup.client()?.inspect()?.sessions.len());
    let before = sessions()?;
    // The first worker makes the device process hold whatever it keeps for good.
    Worker::start(setup, state)?.kill()?;
    eventually("the session of the first worker is gone", || {
        Ok((sessions()? <= before).then_some(()))
    })?;
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let free = steady(&gpu)?;
        let worker = Worker::start(setup, state)?;
        let used = free.saturating_sub(gpu.free_bytes()?);
        ensure!(used + SLACK_BYTES > worker_bytes(setup), "the worker uses only {used} bytes");
        other.serves(2 + round)?;
        let killed = Instant::now();
        worker.kill()?;
        while gpu.free_bytes()? + SLACK_BYTES < free {
            ensure!(
                killed.elapsed() < BACK_WITHIN,
                "{} of {free} bytes are back",
                gpu.free_bytes()?
            );
            other.copy(
                Direction::Gather,
                Target::All,
                &Indices::Int32(vec![5, 0, -1]),
                None,
                Inputs::Inline,
            )?;
        }
        times.push(format!("{:.2}", killed.elapsed().as_secs_f64()));
        other.serves(5 + round)?;
    }
    Ok(format!("memory back after {} s; the other worker's copies were right", times.join(", ")))
}

pub(crate) fn faulted_worker(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let mut other = rig(setup, &setup.socket, Allocator::Default)?;
    other.serves(1)?;
    let device = other.client.inspect()?.devices.into_iter().next().context("a device")?;
    let free = steady(&gpu)?;
    let worker = Worker::start(setup, State::Faulted)?;
    for round in 0..20 {
        other.serves(2 + round)?;
    }
    worker.kill()?;
    eventually("the worker's memory is back", || {
        Ok((gpu.free_bytes()? + SLACK_BYTES >= free).then_some(()))
    })?;
    other.serves(30)?;
    let now = other.client.inspect()?.devices.into_iter().next().context("a device")?;
    ensure!(
        now.device_process_pid == device.device_process_pid,
        "the device process was started {} times again",
        now.restarts - device.restarts
    );
    Ok("the device process lives, and the other worker's copies were right".to_owned())
}

pub(crate) fn freed_under_the_daemon(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let daemon = setup.own_daemon("freed")?;
    let mut seen = Vec::new();
    for how in [Allocator::Default, VIRTUAL] {
        let mut other = rig(setup, daemon.socket(), Allocator::Default)?;
        let mut careless = rig(setup, daemon.socket(), how)?;
        other.serves(1)?;
        careless.serves(1)?;
        // Not released first, as the contract asks for.
        careless.cache = Known::allocate(&gpu, 1, Allocator::Default, 8)?;
        let indices = Indices::Int32(vec![5, 0, 1]);
        let outcome =
            careless.start(Direction::Scatter, Target::All, &indices, None, Inputs::Inline);
        seen.push(match outcome {
            Ok(_) => format!("{how:?}: still there"),
            Err(error) => format!("{how:?}: {error:#}"),
        });
        eventually("the device serves", || Ok(daemon.device()?.ready.then_some(())))?;
        // A copy of the other worker that ran beside it may be DEVICE_LOST; the next one is not.
        if other.serves(2).is_err() {
            eventually("the device serves", || Ok(daemon.device()?.ready.then_some(())))?;
            other.serves(3)?;
        }
        drop(careless);
    }
    Ok(format!("{}; {} restarts", seen.join("; "), daemon.device()?.restarts))
}

/// Free memory, once it no longer grows.
pub(super) fn steady(gpu: &Gpu) -> Result<u64> {
    let mut last = gpu.free_bytes()?;
    let mut since = Instant::now();
    eventually("free memory settles", || {
        let now = gpu.free_bytes()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
        Ok((since.elapsed() > Duration::from_millis(300)).then_some(last))
    })
}

pub(crate) fn device_process(setup: &Setup) -> Result<String> {
    let daemon = setup.own_daemon("device-process")?;
    let mut legacy = rig(setup, daemon.socket(), Allocator::Default)?;
    let mut pieces = rig(setup, daemon.socket(), VIRTUAL)?;
    let mut times = Vec::new();
    for round in 0..3 {
        legacy.serves(round)?;
        pieces.serves(round)?;
        let killed = Instant::now();
        daemon.kill_device_process()?;
        // Not one call to register anything again.
        pieces.serves(10 + round)?;
        legacy.serves(10 + round)?;
        times.push(format!("{:.2}", killed.elapsed().as_secs_f64()));
    }
    let restarts = daemon.device()?.restarts;
    ensure!(restarts == 3, "{restarts} restarts");
    Ok(format!(
        "legacy and VMM regions came back, and every copy was right after {} s",
        times.join(", ")
    ))
}

pub(crate) fn next_daemon(setup: &Setup) -> Result<String> {
    let daemon = setup.own_daemon("next-daemon")?;
    let socket = daemon.socket().to_owned();
    let mut legacy = rig(setup, &socket, Allocator::Default)?;
    let mut pieces = rig(setup, &socket, VIRTUAL)?;
    legacy.serves(1)?;
    pieces.serves(1)?;
    // It is killed, not drained.
    drop(daemon);
    let from = Instant::now();
    let _next = setup.own_daemon("next-daemon")?;
    let ready = from.elapsed();
    legacy.serves(2)?;
    pieces.serves(2)?;
    Ok(format!(
        "the next daemon was ready after {:.2} s and served both workers",
        ready.as_secs_f64()
    ))
}
