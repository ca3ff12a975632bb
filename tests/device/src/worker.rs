//! A worker process that is brought into a state and killed there.

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Signal, set_parent_process_death_signal};
use statecopy_client::{DataType, Direction, IndexWidth, Indices, Request};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::device::PieceHandle;
use statecopy_kernels::layout::CacheLayout;
use statecopy_tests::{Session, Wire};

use crate::graphs::Capturing;
use crate::lanes::{Gates, Queue, share_words};
use crate::patience::eventually;
use crate::setup::Setup;
use crate::wide::Wide;

/// Where in its life a worker is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum State {
    /// Everything is published, and nothing runs.
    Idle,
    /// Descriptors were sent, and no region is registered.
    Sending,
    /// Large copies run, one after the other.
    Copying,
    /// A kernel of its own has faulted.
    Faulted,
    /// A scatter of every row was accepted, and its bell does not ring.
    Unrung,
    /// The same, and its stream waits for a word of the worker's own before the bell.
    Waiting,
    /// A scatter of every row was accepted, and its bell has rung.
    Rung,
    /// A graph is replayed, again and again.
    Replaying,
    /// A graph is held behind its first step: it is about to ring.
    GraphIdle,
    /// Behind its second: it has rung.
    GraphRung,
    /// Behind its third: the copy is made.
    GraphDone,
    /// Behind its last.
    GraphNoted,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Sending => "sending",
            Self::Copying => "copying",
            Self::Faulted => "faulted",
            Self::Unrung => "unrung",
            Self::Waiting => "waiting",
            Self::Rung => "rung",
            Self::Replaying => "replaying",
            Self::GraphIdle => "graph-idle",
            Self::GraphRung => "graph-rung",
            Self::GraphDone => "graph-done",
            Self::GraphNoted => "graph-noted",
        }
    }

    /// The gate that holds its graph.
    fn gate(self) -> Option<u64> {
        let phases = [Self::GraphIdle, Self::GraphRung, Self::GraphDone, Self::GraphNoted];
        phases.iter().zip(0..).find(|(phase, _)| **phase == self).map(|(_, gate)| gate)
    }
}

const READY: &str = "ready";
/// Rows of 16 MiB: a copy of all takes the device a while.
const ROW_BYTES: u64 = 16 << 20;

/// Bytes of a worker's caches.
pub(crate) fn worker_bytes(setup: &Setup) -> u64 {
    rows(setup) * ROW_BYTES
}

fn rows(setup: &Setup) -> u64 {
    setup.size(256, 12)
}

/// The process, seen by the case. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
}

impl Worker {
    /// Starts one, and waits until it is in that state.
    pub(crate) fn start(setup: &Setup, state: State) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["worker", state.name(), &serde_json::to_string(setup)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let answers = child.stdout.take().context("a pipe")?;
        let worker = Self { child };
        let mut line = String::new();
        BufReader::new(answers).read_line(&mut line)?;
        ensure!(line.trim_end() == READY, "the worker said {line:?}");
        Ok(worker)
    }

    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        let status = self.child.wait()?;
        ensure!(!status.success(), "the worker had ended by itself");
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Is the worker.
pub(crate) fn run(setup: &Setup, state: State) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    match state {
        State::Idle => {
            let mut wide = publish(setup, 4, Allocator::Default)?;
            wide.check_rows(&[0, 3, 1])?;
            until_told()
        }
        State::Copying => {
            let how = Allocator::Virtual { piece_bytes: 20 << 20, shared: true };
            let wide = publish(setup, rows(setup), how)?;
            let rows: Vec<i32> = (0..i32::try_from(rows(setup))?).collect();
            wide.gather(&rows)?;
            say_ready()?;
            loop {
                wide.gather(&rows)?;
            }
        }
        State::Faulted => {
            let how = Allocator::Virtual { piece_bytes: 20 << 20, shared: true };
            let mut wide = publish(setup, 4, how)?;
            wide.check_rows(&[0, 3, 1])?;
            let error = setup.gpu()?.fault()?;
            ensure!(error.is_sticky(), "{error}");
            until_told()
        }
        State::Sending => send(setup, &setup.socket),
        State::Unrung
        | State::Waiting
        | State::Rung
        | State::Replaying
        | State::GraphIdle
        | State::GraphRung
        | State::GraphDone
        | State::GraphNoted => in_streams(setup, state),
    }
}

/// Has copies of every row in a stream.
fn in_streams(setup: &Setup, state: State) -> Result<()> {
    let how = Allocator::Virtual { piece_bytes: 20 << 20, shared: true };
    let (gpu, rows) = (setup.gpu()?, rows(setup));
    let wide = publish(setup, rows, how)?;
    let named = gpu.allocate(4 * rows, Allocator::Default)?;
    let bytes: Vec<u8> = (0..i32::try_from(rows)?).flat_map(i32::to_le_bytes).collect();
    named.write(0, &bytes)?;
    let at = wide.client().register_device_memory(named.address(), named.bytes())?;
    let indices =
        Indices::Shared { width: IndexWidth::Int32, at: at.region.at(at.offset), selected: rows };
    let request = Request::new(indices, wide.packed_place());
    let worker = gpu.worker(setup)?;
    let words = share_words(wide.client(), &worker)?;
    let gates = Gates::new(&worker)?;
    if let Some(gate) = state.gate() {
        let mut capturing = Capturing::begin(wide.client(), &worker, &words)?;
        capturing.copy_with_gates(wide.plan(), Direction::Scatter, &request, &gates)?;
        let mut graph = capturing.end()?;
        graph.replay()?;
        graph.finish()?;
        gates.close(gate)?;
        graph.replay()?;
        gates.wait(gate)?;
        return until_told();
    }
    if state == State::Replaying {
        let mut capturing = Capturing::begin(wide.client(), &worker, &words)?;
        capturing.copy(wide.plan(), Direction::Gather, &request)?;
        let mut graph = capturing.end()?;
        graph.replay()?;
        graph.finish()?;
        say_ready()?;
        loop {
            graph.replay()?;
            graph.finish()?;
        }
    }
    let mut queue = Queue::open(wide.client(), &worker, &words)?;
    let asked = queue.ask(wide.plan(), Direction::Scatter, &request)?;
    match state {
        State::Waiting => {
            gates.close(0)?;
            gates.hold(&mut queue.stream, 0)?;
            queue.put(&asked)?;
            gates.wait(0)?;
        }
        State::Rung => {
            queue.put(&asked)?;
            eventually("the bell has rung", || Ok(queue.has_rung(&asked)?.then_some(())))?;
        }
        _ => {}
    }
    until_told()
}

fn publish(setup: &Setup, max_selected: u64, how: Allocator) -> Result<Wide> {
    let rows = rows(setup);
    let shape = [rows, 4, 1_024, 1_024];
    let layout = CacheLayout::with_page_stride(DataType::Float32, shape, (4 << 20) + 128)?;
    Wide::new(setup.client()?, &setup.gpu()?, layout, max_selected, how)
}

/// Sends the descriptors of its memory, and registers nothing.
fn send(setup: &Setup, socket: &Path) -> Result<()> {
    let how = Allocator::Virtual { piece_bytes: 64 << 20, shared: true };
    let gpu = setup.gpu()?;
    let memory = gpu.allocate(worker_bytes(setup), how)?;
    let mut session = Session::open(&Wire::connect(socket)?);
    let mut export = gpu.exporter.export(memory.address(), memory.bytes())?;
    for piece in export.next_pieces(export.announced().pieces)? {
        let PieceHandle::Descriptor(descriptor) = piece.handle else {
            bail!("a descriptor was expected");
        };
        session.send(&[descriptor.as_fd()]);
    }
    until_told()
}

fn say_ready() -> Result<()> {
    let mut answers = io::stdout().lock();
    writeln!(answers, "{READY}")?;
    Ok(answers.flush()?)
}

/// Says that the state is reached, and stays in it.
fn until_told() -> Result<()> {
    say_ready()?;
    io::stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}
