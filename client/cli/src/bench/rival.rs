//! The rival: a process of somebody else's that makes the same copies in its own way, and times itself when it is asked to.
//!
//! One JSON object a line each way. It says first what it is, then it answers one request after the other, and ends with its
//! input. While it works this process waits, on the same CPU where both are pinned.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path as FilePath;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use statecopy_kernels::cuda::arguments::{
    ARGUMENTS_BYTES, CHUNK_BYTES, FIELDS, SHAPE_INDICES_INLINE, THREADS,
};

use super::plan::{Case, Path};
use crate::failure::Failure;
use crate::workload::preset::Preset;

/// Rows of which the time of a kernel is taken.
pub(super) const KERNEL_ROWS: [u64; 4] = [1, 8, 64, 256];
/// Calls in one graph.
const GRAPH_CALLS: u64 = 100;
/// Replays of each graph.
const REPLAYS: u64 = 30;

/// Time on the device of one call among many in a replayed graph.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct KernelTimes {
    /// Calls in one graph.
    pub(super) calls: u64,
    /// By selected rows and kernel: `own`, `control` (the same in a second graph) and `triton`. Each sample is one replay
    /// between two events, divided by the calls: gaps between kernels are in it.
    pub(super) graph_us: BTreeMap<String, BTreeMap<String, Vec<f64>>>,
    /// Bytes of one copy by the driver, from device memory to device memory.
    pub(super) memcpy_bytes: u64,
    /// How long it takes.
    pub(super) memcpy_us: Vec<f64>,
}

/// A layer's cache, in elements.
#[derive(Debug, Serialize)]
struct Layout {
    rows: u64,
    payload: u64,
    page_stride: u64,
    offset: u64,
}

impl Layout {
    fn of(preset: Preset, rows: u64) -> Self {
        let shape = preset.shape();
        let payload = shape.state.iter().product();
        Self { rows, payload, page_stride: shape.page_stride, offset: shape.offset }
    }
}

#[derive(Debug, Serialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
enum Ask<'a> {
    /// Make a case ready, and check what every path leaves.
    Prepare {
        case: &'a str,
        operation: &'a str,
        layout: Layout,
        selected: u64,
        buffers: u64,
        rows: &'a [i32],
    },
    /// Call a path twice, and time the second call.
    Time { case: &'a str, path: &'a str, before: &'a [i32], rows: &'a [i32] },
    /// Take the time of kernels.
    Kernels(KernelsAsk<'a>),
}

#[derive(Debug, Serialize)]
struct KernelsAsk<'a> {
    layout: Layout,
    /// A file with the daemon's machine code, and the kernel in it.
    code: &'a FilePath,
    entry: &'a str,
    selected: [u64; KERNEL_ROWS.len()],
    calls: u64,
    replays: u64,
    threads: u32,
    chunk_bytes: u64,
    shape: u32,
    arguments_bytes: usize,
    /// Name, offset and size of every field of the kernel's parameter.
    arguments: &'a [(&'a str, usize, usize)],
}

#[derive(Debug, Deserialize)]
struct Answer {
    error: Option<String>,
    facts: Option<BTreeMap<String, String>>,
    us: Option<f64>,
    kernels: Option<KernelTimes>,
}

/// The process.
#[derive(Debug)]
pub(super) struct Rival {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    facts: BTreeMap<String, String>,
}

impl Rival {
    /// Starts it: a program and its arguments, with blanks between them.
    ///
    /// # Errors
    /// When it does not start or says nothing of itself.
    pub(super) fn start(command: &str, cpu: Option<usize>) -> anyhow::Result<Self> {
        let mut words = command.split_whitespace();
        let program = words.next().ok_or_else(|| {
            Failure::usage("The rival has no program", "Name one, and its arguments.")
        })?;
        let pinned = cpu.map(|cpu| ["--cpu".to_owned(), cpu.to_string()]);
        let mut child = Command::new(program)
            .args(words)
            .args(pinned.into_iter().flatten())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("Starting the rival, {program}"))?;
        let requests = child.stdin.take().context("The rival's input")?;
        let answers = BufReader::new(child.stdout.take().context("The rival's output")?);
        let mut rival = Self { child, requests, answers, facts: BTreeMap::new() };
        rival.facts = rival.answer()?.facts.context("The rival does not say what it is")?;
        Ok(rival)
    }

    /// What it says of itself.
    pub(super) fn facts(&self) -> &BTreeMap<String, String> {
        &self.facts
    }

    /// Makes it ready for a case. It compares the bytes that each of its paths leaves.
    ///
    /// # Errors
    /// When it cannot, or bytes are wrong.
    pub(super) fn prepare(
        &mut self,
        case: Case,
        cache_rows: u64,
        rows: &[i32],
    ) -> anyhow::Result<()> {
        let ask = Ask::Prepare {
            case: &case.name(),
            operation: case.operation().label(),
            layout: Layout::of(case.preset(), cache_rows),
            selected: case.selected(),
            buffers: case.buffers(),
            rows,
        };
        self.ask(&ask).map(|_| ())
    }

    /// One interval, right after an untimed call with other rows.
    ///
    /// # Errors
    /// When it cannot run that path.
    pub(super) fn time(
        &mut self,
        case: Case,
        path: Path,
        before: &[i32],
        rows: &[i32],
    ) -> anyhow::Result<Duration> {
        let ask = Ask::Time { case: &case.name(), path: path.label(), before, rows };
        let us = self.ask(&ask)?.us.context("The rival does not say how long it took")?;
        Ok(Duration::from_secs_f64(us / 1e6))
    }

    /// Times of kernels: its own beside the daemon's, whose machine code lies in that file.
    ///
    /// # Errors
    /// When it cannot run them, or bytes are wrong.
    pub(super) fn kernels(
        &mut self,
        code: &FilePath,
        entry: &str,
        cache_rows: u64,
    ) -> anyhow::Result<KernelTimes> {
        let ask = Ask::Kernels(KernelsAsk {
            layout: Layout::of(Preset::KimiK3Tp8, cache_rows),
            code,
            entry,
            selected: KERNEL_ROWS,
            calls: GRAPH_CALLS,
            replays: REPLAYS,
            threads: THREADS,
            chunk_bytes: CHUNK_BYTES,
            shape: SHAPE_INDICES_INLINE,
            arguments_bytes: ARGUMENTS_BYTES,
            arguments: FIELDS,
        });
        self.ask(&ask)?.kernels.context("The rival names no times")
    }

    fn ask(&mut self, ask: &Ask<'_>) -> anyhow::Result<Answer> {
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        let sent = self.requests.write_all(&line).and_then(|()| self.requests.flush());
        sent.context("Asking the rival")?;
        self.answer()
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        let mut line = String::new();
        let bytes = self.answers.read_line(&mut line).context("Listening to the rival")?;
        if bytes == 0 {
            bail!("The rival ended");
        }
        let answer: Answer = serde_json::from_str(&line).context("What the rival says")?;
        match answer.error {
            Some(error) => Err(anyhow::anyhow!("The rival failed: {error}")),
            None => Ok(answer),
        }
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        // Nothing of it is needed any more.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}
