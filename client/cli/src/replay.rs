//! `statecopy replay`: a request trace, scheduled as a server would, copied by the daemon and verified.

mod report;
pub(crate) mod scheduler;
mod trace;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use statecopy_client::IndexWidth;
use statecopy_client::blocking::{Admin, Client};

use self::report::Report;
use self::scheduler::{Chunk, Initial, Limits, Row, Scheduler, Step};
use self::trace::{LINE_BYTES_MAX, LineError, TraceRequest};
use crate::ask::{ADMIN_TIMEOUT, compiles_while_serving};
use crate::cli::{ReplayOptions, connect_options};
use crate::failure::{EXIT_MISMATCHES, Failure};
use crate::spawn::DaemonInUse;
use crate::terminal;
use crate::worker::available;
use crate::worker::copier::{Copier, Daemon};
use crate::worker::cycle::{Tally, Worker};
use crate::worker::memory::{WorkerMemory, touched_bytes};
use crate::workload::arrangement::Arrangement;
use crate::workload::selection::Selection;

/// Rows for stored prefixes beside those that running sequences may need, unless the user says otherwise.
const ROWS_STORED: u32 = 128;

/// What was replayed.
#[derive(Debug, Clone, Copy, Default)]
struct Replayed {
    requests: usize,
    steps: u64,
    prefill_steps: u64,
    prefix_hits: u64,
    wall: Duration,
}

/// What the daemon counted meanwhile.
#[derive(Debug, Clone, Copy, Default)]
struct DaemonCounts {
    refusals: u64,
    compiles_after_seal: u64,
}

/// Runs the replay. The exit code says whether every byte was right.
///
/// # Errors
/// When the trace is broken, the limits do not fit each other, or the daemon fails.
pub(crate) fn run(options: &ReplayOptions) -> anyhow::Result<ExitCode> {
    let requests = read_trace(&options.trace, options.requests)?;
    let limits = limits(options);
    let scheduler = Scheduler::new(limits, requests).map_err(|error| {
        Failure::usage(format!("The limits do not fit: {error}"), error.remedy())
    })?;
    let report =
        if options.dry_run { schedule(options, scheduler) } else { copy(options, scheduler)? };
    if options.common.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&report.to_string())?;
    }
    Ok(if report.mismatches == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_MISMATCHES) })
}

fn limits(options: &ReplayOptions) -> Limits {
    let enough = options.max_num_seqs.saturating_mul(2).saturating_add(ROWS_STORED);
    Limits {
        max_num_seqs: options.max_num_seqs,
        chunk_tokens: options.chunk_tokens,
        rows: options.rows.unwrap_or(enough),
    }
}

/// Reads the first `requests_max` requests of a trace.
fn read_trace(path: &Path, requests_max: Option<usize>) -> anyhow::Result<Vec<TraceRequest>> {
    let trace = || path.display().to_string();
    let unreadable = |error: io::Error| {
        Failure::usage(format!("{}: {error}", trace()), "Name a file of one JSON object a line.")
    };
    let file = File::open(path).map_err(unreadable)?;
    let broken = |number: usize, error: &LineError| {
        Failure::usage(
            format!("{}, line {number}: {error}", trace()),
            "Correct the line, or read only the requests before it with --requests.",
        )
    };
    let mut reader = BufReader::new(file);
    let mut requests = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        if requests_max.is_some_and(|most| requests.len() >= most) {
            break;
        }
        line.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
        if read.map_err(unreadable)? == 0 {
            break;
        }
        if line.len() as u64 > LINE_BYTES_MAX {
            return Err(broken(number, &LineError::LineTooLong).into());
        }
        if !line.trim_ascii().is_empty() {
            requests.push(TraceRequest::parse(&line).map_err(|error| broken(number, &error))?);
        }
    }
    if requests.is_empty() {
        let sentence = format!("{} holds no request", trace());
        return Err(Failure::usage(sentence, "Name a trace with one request a line.").into());
    }
    Ok(requests)
}

/// Only counts what would be copied.
fn schedule(options: &ReplayOptions, mut scheduler: Scheduler) -> Report {
    let requests = scheduler.unfinished();
    let mut tally = Tally::default();
    let mut replayed = Replayed { requests, ..Replayed::default() };
    while let Some(step) = scheduler.next_step() {
        let layers = u64::from(options.layers);
        let read = step.chunks.iter().filter(|chunk| chunk.initial != Initial::Zero).count();
        tally.rows_gathered += read as u64 * layers;
        tally.rows_cleared += (step.chunks.len() - read) as u64 * layers;
        tally.rows_scattered += step.chunks.len() as u64 * layers;
        replayed.prefill_steps += u64::from(!step.chunks.is_empty());
    }
    replayed.steps = scheduler.steps();
    replayed.prefix_hits = scheduler.prefix_hits();
    Report::new(options, replayed, &tally, DaemonCounts::default())
}

fn copy(options: &ReplayOptions, scheduler: Scheduler) -> anyhow::Result<Report> {
    let rows = limits(options).rows;
    let selected_max = u64::from(options.max_num_seqs);
    let layers = usize::try_from(options.layers)?;
    let arrangement = Arrangement::new(options.preset, layers, rows.into())?;
    available::check(touched_bytes(&arrangement, selected_max))?;
    let device = options.common.device_uuid()?;
    let daemon = DaemonInUse::get(&options.common)?;
    daemon.serve(|daemon| copy_by(daemon, device, options, scheduler, arrangement))
}

fn copy_by(
    daemon: &DaemonInUse,
    device: String,
    options: &ReplayOptions,
    scheduler: Scheduler,
    arrangement: Arrangement,
) -> anyhow::Result<Report> {
    let selected_max = u64::from(options.max_num_seqs);
    let admin = Admin::connect(daemon.address().clone(), ADMIN_TIMEOUT)?;
    let before = compiles_while_serving(&admin.inspect()?);
    let page = rustix::param::page_size() as u64;
    let memory = WorkerMemory::allocate(arrangement, selected_max, options.common.seed, page)?;
    let connect = connect_options("replay".to_owned(), Some(device));
    let client = Client::connect(daemon.address().clone(), connect)?;
    let copier = Daemon::register(client, &memory, selected_max)?;
    let mut worker = Worker::new(memory, copier);
    let replayed = play(options, scheduler, &mut worker)?;
    worker.check_everything()?;
    let (tally, copier) = worker.into_parts();
    let counts = DaemonCounts {
        refusals: copier.close()?,
        compiles_after_seal: compiles_while_serving(&admin.inspect()?).saturating_sub(before),
    };
    Ok(Report::new(options, replayed, &tally, counts))
}

/// Copies step after step.
fn play<C: Copier>(
    options: &ReplayOptions,
    mut scheduler: Scheduler,
    worker: &mut Worker<C>,
) -> anyhow::Result<Replayed> {
    let requests = scheduler.unfinished();
    let bar = terminal::progress(requests as u64, "requests", options.common.json);
    let mut replayed = Replayed { requests, ..Replayed::default() };
    let start = Instant::now();
    while let Some(step) = scheduler.next_step() {
        take(worker, &step, scheduler.steps(), !options.per_layer)?;
        replayed.prefill_steps += u64::from(!step.chunks.is_empty());
        show(&bar, requests - scheduler.unfinished());
    }
    replayed.wall = start.elapsed();
    replayed.steps = scheduler.steps();
    replayed.prefix_hits = scheduler.prefix_hits();
    bar.finish_and_clear();
    Ok(replayed)
}

fn show(bar: &ProgressBar, finished: usize) {
    if bar.position() != finished as u64 {
        bar.set_position(finished as u64);
    }
}

/// Does what one step says.
fn take<C: Copier>(
    worker: &mut Worker<C>,
    step: &Step,
    number: u64,
    batch: bool,
) -> anyhow::Result<()> {
    // A finished sequence's row still holds what its decoding left there.
    for row in &step.freed {
        worker.check_row(row_index(*row)?)?;
    }
    if !step.chunks.is_empty() {
        worker.step(&selection(&step.chunks, number), batch)?;
    }
    for row in &step.decoding {
        worker.decode(row_index(*row)?)?;
    }
    Ok(())
}

fn row_index(row: Row) -> anyhow::Result<usize> {
    Ok(usize::try_from(row.0)?)
}

/// The rows that a server would name: a new sequence is its own row with a false flag.
fn selection(chunks: &[Chunk], number: u64) -> Selection {
    let source = |chunk: &Chunk| match chunk.initial {
        Initial::Zero => chunk.destination,
        Initial::Row(row) => row,
    };
    let flag = |chunk: &Chunk| u8::from(chunk.initial != Initial::Zero);
    Selection {
        width: if number.is_multiple_of(2) { IndexWidth::Int32 } else { IndexWidth::Int64 },
        sources: chunks.iter().map(|chunk| i64::from(source(chunk).0)).collect(),
        flags: Some(chunks.iter().map(flag).collect()),
        destinations: chunks.iter().map(|chunk| i64::from(chunk.destination.0)).collect(),
        scatter_with_flags: false,
    }
}

#[cfg(test)]
mod tests;
