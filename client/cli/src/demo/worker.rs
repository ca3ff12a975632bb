//! One worker process of the demonstration. It speaks JSON lines on standard output.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use statecopy_client::blocking::Client;

use crate::cli::{WorkerOptions, connect_options};
use crate::failure::{EXIT_FAILED, Failure};
use crate::spawn;
use crate::worker::copier::Daemon;
use crate::worker::cycle::{Tally, Worker};
use crate::worker::memory::WorkerMemory;
use crate::workload::arrangement::Arrangement;
use crate::workload::random::{Random, mix};
use crate::workload::selection::Selection;

/// Steps between two messages.
const STEPS_A_MESSAGE: u64 = 5;

/// Every fourth step copies all layers by one request.
const STEPS_A_BATCH: u64 = 4;

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// More steps are done.
    Steps {
        /// How many since the last message.
        done: u64,
    },
    /// All is done and verified.
    Finished(Box<WorkerReport>),
    /// It ends without having verified everything.
    Failed(Failure),
}

/// What a worker counted.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkerReport {
    pub(crate) device: String,
    pub(crate) rows_gathered: u64,
    pub(crate) rows_cleared: u64,
    pub(crate) rows_scattered: u64,
    pub(crate) rows_skipped: u64,
    pub(crate) refusals: u64,
    pub(crate) mismatches: u64,
    pub(crate) first_mismatches: Vec<String>,
    pub(crate) gather: Vec<(u64, u64)>,
    pub(crate) scatter: Vec<(u64, u64)>,
    /// Seconds from the first step to the last check.
    pub(crate) seconds: f64,
}

/// The hidden subcommand: this process becomes a worker.
pub(crate) fn run(options: &WorkerOptions) -> ExitCode {
    let message = match work(options) {
        Ok(report) => Message::Finished(Box::new(report)),
        Err(error) => Message::Failed(Failure::of(&error)),
    };
    match say(&message) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody listens any more: the demonstration has ended.
        Err(_) => ExitCode::from(EXIT_FAILED),
    }
}

fn work(options: &WorkerOptions) -> anyhow::Result<WorkerReport> {
    spawn::end_with_parent()?;
    let layers = usize::try_from(options.layers)?;
    let arrangement = Arrangement::new(options.preset, layers, options.rows)?;
    // Workers have other states and other choices.
    let seed = mix(options.seed.wrapping_add(mix(options.number.into())));
    let page = rustix::param::page_size() as u64;
    let memory = WorkerMemory::allocate(arrangement, options.selected, seed, page)?;
    let label = format!("demo worker {}", options.number);
    let client = Client::connect(
        options.address.clone(),
        connect_options(label, Some(options.device_uuid.clone())),
    )?;
    let device = client.session().context("The session has ended")?.device.name;
    let daemon = Daemon::register(client, &memory, options.selected)?;
    let mut worker = Worker::new(memory, daemon);
    let start = std::time::Instant::now();
    run_steps(options, &mut worker, Random::new(seed))?;
    worker.check_everything()?;
    let seconds = start.elapsed();
    let (tally, daemon) = worker.into_parts();
    Ok(report(options.number, device, &tally, daemon.close()?, seconds))
}

fn run_steps(
    options: &WorkerOptions,
    worker: &mut Worker<Daemon>,
    mut random: Random,
) -> anyhow::Result<()> {
    // Some rows begin as if sequences had left their states there, some were never written.
    for row in 0..options.rows {
        if !random.percent(25) {
            worker.decode(usize::try_from(row)?)?;
        }
    }
    for step in 0..options.steps {
        let selection = Selection::choose(&mut random, step, options.rows, options.selected);
        worker.step(&selection, step % STEPS_A_BATCH == STEPS_A_BATCH - 1)?;
        // A sequence decodes meanwhile.
        let row = random.below(options.rows);
        worker.decode(usize::try_from(row)?)?;
        let done = step + 1;
        if done.is_multiple_of(STEPS_A_MESSAGE) || done == options.steps {
            let rest = done % STEPS_A_MESSAGE;
            say(&Message::Steps { done: if rest == 0 { STEPS_A_MESSAGE } else { rest } })?;
        }
    }
    if options.inject_fault {
        worker.memory().flip_byte()?;
    }
    Ok(())
}

fn report(
    number: u32,
    device: String,
    tally: &Tally,
    refusals: u64,
    took: Duration,
) -> WorkerReport {
    let places = tally.first_mismatches.iter();
    WorkerReport {
        device,
        rows_gathered: tally.rows_gathered,
        rows_cleared: tally.rows_cleared,
        rows_scattered: tally.rows_scattered,
        rows_skipped: tally.rows_skipped,
        refusals,
        mismatches: tally.mismatches,
        first_mismatches: places.map(|place| format!("worker {number}, {place}")).collect(),
        gather: tally.gather.samples(),
        scatter: tally.scatter.samples(),
        seconds: took.as_secs_f64(),
    }
}

fn say(message: &Message) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&line).and_then(|()| stdout.flush()).context("Standard output")
}
