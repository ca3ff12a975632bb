//! `statecopy demo`: a daemon, worker processes, a real cache layout, and every byte verified.

mod report;
pub(crate) mod worker;

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::ProgressBar;
use statecopy_client::blocking::Admin;

use self::report::Report;
use self::worker::{Message, WorkerReport};
use crate::ask::{ADMIN_TIMEOUT, compiles_while_serving};
use crate::cli::DemoOptions;
use crate::failure::{EXIT_MISMATCHES, Failure};
use crate::spawn::{self, DaemonInUse};
use crate::terminal;
use crate::worker::available;
use crate::worker::memory::touched_bytes;
use crate::workload::arrangement::Arrangement;

/// Runs the demonstration. The exit code says whether every byte was right.
///
/// # Errors
/// When daemon or workers cannot be started, or one of them fails.
pub(crate) fn run(options: &DemoOptions) -> anyhow::Result<ExitCode> {
    let (rows, selected) = sizes(options);
    let arrangement = Arrangement::new(options.preset, usize::try_from(options.layers)?, rows)?;
    let each = touched_bytes(&arrangement, selected);
    available::check(each.saturating_mul(options.workers.into()))?;
    let device = options.common.device_uuid()?;
    let daemon = DaemonInUse::get(&options.common)?;
    let (workers, compiles, took) = daemon.serve(|daemon| demonstrate(options, daemon, &device))?;
    let report = Report::new(options, &workers, compiles, took);
    if options.common.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&report.to_string())?;
    }
    Ok(if report.mismatches == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_MISMATCHES) })
}

/// What the workers report, how often a compiler was entered meanwhile, and how long it took.
fn demonstrate(
    options: &DemoOptions,
    daemon: &DaemonInUse,
    device: &str,
) -> anyhow::Result<(Vec<WorkerReport>, u64, Duration)> {
    let admin = Admin::connect(daemon.address().clone(), ADMIN_TIMEOUT)?;
    let before = compiles_while_serving(&admin.inspect()?);
    if !options.common.json {
        terminal::note(&format!(
            "Daemon: {}. While this runs: statecopy status --address {}",
            daemon.address(),
            daemon.address().socket().display()
        ));
    }
    let start = Instant::now();
    let workers = run_workers(options, daemon, device)?;
    let took = start.elapsed();
    let compiles = compiles_while_serving(&admin.inspect()?).saturating_sub(before);
    Ok((workers, compiles, took))
}

/// Rows of a cache, and rows that a step selects at most.
fn sizes(options: &DemoOptions) -> (u64, u64) {
    let shape = options.preset.shape();
    let rows = options.rows.map_or(shape.rows, u64::from);
    (rows, options.selected.map_or(shape.selected_max, u64::from))
}

/// A worker process. It does not outlive the demonstration.
#[derive(Debug)]
struct WorkerProcess(Child);

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // It has ended already unless something failed.
        let _killed = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn run_workers(
    options: &DemoOptions,
    daemon: &DaemonInUse,
    device: &str,
) -> anyhow::Result<Vec<WorkerReport>> {
    let steps = options.steps.saturating_mul(options.workers.into());
    let bar = terminal::progress(steps, "steps", options.common.json);
    let (sender, messages) = mpsc::channel();
    let mut processes = Vec::new();
    for number in 0..options.workers {
        processes.push(start_worker(options, daemon, device, number, sender.clone())?);
    }
    drop(sender);
    let mut reports = Vec::new();
    // The first that fails ends all: the processes are dropped.
    for (number, output) in messages {
        match output {
            Output::Said(message) => take(number, message?, &bar, &mut reports)?,
            Output::Ended => {
                let process = processes.get_mut(number as usize).context("No such worker")?;
                let status = process.0.wait().context("Waiting for a worker")?;
                ended(number, status)?;
            }
        }
    }
    bar.finish_and_clear();
    Ok(reports)
}

/// What a thread that reads a worker's output tells.
#[derive(Debug)]
enum Output {
    Said(anyhow::Result<Message>),
    Ended,
}

fn take(
    number: u32,
    message: Message,
    bar: &ProgressBar,
    reports: &mut Vec<WorkerReport>,
) -> anyhow::Result<()> {
    match message {
        Message::Steps { done } => bar.inc(done),
        Message::Finished(report) => reports.push(*report),
        Message::Failed(failure) => return Err(failure.of_worker(number).into()),
    }
    Ok(())
}

/// A worker that fails says so and ends well; one that does not was stopped by something else.
fn ended(number: u32, status: ExitStatus) -> Result<(), Failure> {
    if status.success() {
        return Ok(());
    }
    Err(Failure::other(
        format!("Worker {number} ended before it was done: {status}"),
        "If nobody killed it, the kernel's log tells why (out of memory?); fewer --workers, --layers or --rows need less \
         memory.",
    ))
}

/// Starts a worker and a thread that reads its messages until it ends.
fn start_worker(
    options: &DemoOptions,
    daemon: &DaemonInUse,
    device: &str,
    number: u32,
    messages: Sender<(u32, Output)>,
) -> anyhow::Result<WorkerProcess> {
    let (rows, selected) = sizes(options);
    let mut command = spawn::again("demo-worker");
    command.arg("--address").arg(daemon.address().to_string());
    for (flag, value) in [
        ("--device-uuid", device.to_owned()),
        ("--preset", options.preset.name().to_owned()),
        ("--number", number.to_string()),
        ("--layers", options.layers.to_string()),
        ("--rows", rows.to_string()),
        ("--selected", selected.to_string()),
        ("--steps", options.steps.to_string()),
        ("--seed", options.common.seed.to_string()),
    ] {
        command.args([flag, &value]);
    }
    if options.inject_fault && number == 0 {
        command.arg("--inject-fault");
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("Starting a worker")?;
    let lines = BufReader::new(child.stdout.take().context("A worker's output")?).lines();
    // It ends with the worker's output, which the drop of its process closes.
    thread::spawn(move || {
        for line in lines {
            let message = line
                .context("A worker's output")
                .and_then(|line| serde_json::from_str(&line).context("A worker's message"));
            if messages.send((number, Output::Said(message))).is_err() {
                return;
            }
        }
        // Without a listener the demonstration has ended already.
        let _told = messages.send((number, Output::Ended));
    });
    Ok(WorkerProcess(child))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_inside_a_worker_names_the_worker() {
        let failure = Failure::other("OVERLAP: They overlap", "Move them.");
        let failed = Message::Failed(failure.clone());
        let error = take(3, failed, &ProgressBar::hidden(), &mut Vec::new()).unwrap_err();
        let told = Failure::of(&error);
        assert_eq!(told.sentence, "worker 3: OVERLAP: They overlap");
        assert_eq!((told.exit, told.remedy), (failure.exit, failure.remedy));
    }
}
