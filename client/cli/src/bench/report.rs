//! Tables and plots of finished runs. Each file is reported by itself: medians are never combined over files or modes.

mod figures;
mod plot;

use std::fmt::Write as _;
use std::process::ExitCode;

use self::figures::figures;
use super::order::Who;
use super::plan::{Mode, Path};
use super::record::Record;
use super::statistics::median;
use crate::cli::BenchReportOptions;
use crate::terminal::{self, Table};

/// `statecopy bench report`: a table and a plot for each file.
///
/// # Errors
/// When a file is no record, or a plot cannot be written.
pub(super) fn run(options: &BenchReportOptions) -> anyhow::Result<ExitCode> {
    for (at, path) in options.files.iter().enumerate() {
        let record = Record::read(path)?;
        let svg = path.with_extension("svg");
        plot::draw(&record, &svg)?;
        let gap = if at == 0 { "" } else { "\n" };
        terminal::print(&format!("{gap}{}\n{}", path.display(), table(&record)))?;
        terminal::print(&format!("\nDistributions: {}\n", svg.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What a person reads of one run.
pub(super) fn table(record: &Record) -> String {
    let mut text = conditions(record);
    text.push_str("\nWall, median in microseconds\n");
    text.push_str(&walls(record));
    text.push_str(&rivals(record));
    text.push_str("\nHost enqueue, median in microseconds\n");
    text.push_str(&enqueues(record));
    text.push_str(&references(record));
    text.push_str(&chains(record));
    text.push_str("\nFigures\n");
    let mut table = Table::new(["FIGURE", "MEASURED", "BOUND", "REACHED"]);
    for figure in figures(record) {
        let reached = if figure.is_reached() { "yes" } else { "NO" };
        table.row([figure.what, figure.measured, figure.bound, reached.to_owned()]);
    }
    text.push_str(&table.render());
    text
}

fn conditions(record: &Record) -> String {
    let machine = &record.machine;
    let load = |load: Option<f64>| load.map_or("?".to_owned(), |load| format!("{load:.2}"));
    let pinning = match record.pinning {
        Some(cpus) => format!("worker on CPU {}, executor on CPU {}", cpus.worker, cpus.executor),
        None => "nobody pinned".to_owned(),
    };
    let mut text = format!(
        "Seed {}, {} trials, {} build, {} copying thread(s) a side, {pinning}\n{}, {} CPUs, Linux {}; load {} before, {} after\n",
        record.seed,
        record.trials,
        record.source.profile,
        record.settings.copy_threads,
        machine.cpu_model,
        machine.cpus,
        machine.kernel,
        load(machine.load_average_before),
        load(machine.load_average_after),
    );
    if let Some(device) = record.device.as_ref().filter(|device| device.kind != "host") {
        let told: Vec<String> =
            device.configuration.iter().map(|(name, value)| format!("{name} {value}")).collect();
        // Writing to a string does not fail.
        let _written = writeln!(text, "{}: {}", device.name, told.join(", "));
    }
    if record.source.profile != "release" {
        text.push_str("Not a release build: these numbers say nothing about the program.\n");
    }
    text
}

fn walls(record: &Record) -> String {
    let mut table = Table::new([
        "CASE",
        "INPROC",
        "RING",
        "GRPC",
        "CONTROL",
        "INPROC PREALLOCATED",
        "INPROC NOCHECK",
        "RING/INPROC",
        "CONTROL/RING",
    ]);
    for case in &record.cases {
        let median = |path| record.median_us(&case.name, Mode::Wall, path);
        let cell = |path| microseconds(median(path));
        let ratio = |above, below| match (median(above), median(below)) {
            (Some(above), Some(below)) => format!("{:.3}", above / below),
            _ => String::new(),
        };
        table.row([
            case.name.clone(),
            cell(Path::Inproc),
            cell(Path::Ring),
            cell(Path::Grpc),
            cell(Path::Control),
            cell(Path::InprocPreallocated),
            cell(Path::InprocNocheck),
            ratio(Path::Ring, Path::Inproc),
            ratio(Path::Control, Path::Ring),
        ]);
    }
    table.render()
}

/// The other ways to make the same copies, where there was a rival.
fn rivals(record: &Record) -> String {
    let Some(facts) = &record.rival else { return String::new() };
    let told: Vec<String> = facts.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let mut table = Table::new([
        "CASE",
        "RING",
        "TRITON",
        "TRITON PREALLOCATED",
        "TRITON JIT",
        "TORCH INDEX",
        "RING/TRITON",
    ]);
    for case in &record.cases {
        let median = |path| record.median_us(&case.name, Mode::Wall, path);
        if let (Some(ring), Some(triton)) = (median(Path::Ring), median(Path::Triton)) {
            let cell = |path| microseconds(median(path));
            table.row([
                case.name.clone(),
                cell(Path::Ring),
                cell(Path::Triton),
                cell(Path::TritonPreallocated),
                cell(Path::TritonJit),
                cell(Path::TorchIndex),
                format!("{:.3}", ring / triton),
            ]);
        }
    }
    format!("\nThe rival ({}), wall, median in microseconds\n{}", told.join(", "), table.render())
}

fn enqueues(record: &Record) -> String {
    let paths = [Path::Inproc, Path::Ring, Path::Grpc, Path::Control];
    let mut table = Table::new(["CASE", "INPROC", "RING", "GRPC", "CONTROL"]);
    for case in &record.cases {
        let cells = paths.map(|path| record.median_us(&case.name, Mode::HostEnqueue, path));
        if cells.iter().any(Option::is_some) {
            let [inproc, ring, grpc, control] = cells.map(microseconds);
            table.row([case.name.clone(), inproc, ring, grpc, control]);
        }
    }
    table.render()
}

fn references(record: &Record) -> String {
    let mut text = String::new();
    for path in [Path::PingpongSpin, Path::PingpongFutex, Path::Memcpy] {
        for case in &record.cases {
            if let Some(median) = record.median_us(&case.name, Mode::Wall, path) {
                let named = (path.label(), &case.name, microseconds(Some(median)));
                // Writing to a string does not fail.
                let _written =
                    writeln!(text, "{} in the trials of {}: {} us", named.0, named.1, named.2);
            }
        }
    }
    if text.is_empty() { text } else { format!("\nReferences, median\n{text}") }
}

/// Copies in a stream's order.
fn chains(record: &Record) -> String {
    let ordered = record.extras.as_ref().and_then(|extras| extras.order.as_ref());
    let Some(order) = ordered else { return String::new() };
    let shared = match order.mps {
        Some(true) => "MPS",
        Some(false) => "no MPS",
        None => "MPS or not is not known",
    };
    let mut table = Table::new(["CHAIN", "DAEMON", "CONTROL", "INPROC", "DAEMON/INPROC"]);
    for (name, chain) in &order.chain_us {
        let us = |who: Who| chain.get(who.label()).map(|samples| median(samples));
        let ratio = match (us(Who::Daemon), us(Who::InProcess)) {
            (Some(daemon), Some(own)) => format!("{:.3}", daemon / own),
            _ => String::new(),
        };
        let [daemon, control, own] = Who::ALL.map(|who| microseconds(us(who)));
        table.row([name.clone(), daemon, control, own, ratio]);
    }
    let mut text = format!(
        "\nKernel, copy, kernel on one stream ({shared}), wall, median in microseconds\n{}",
        table.render()
    );
    for (rows, samples) in &order.enqueue_us {
        let us = microseconds(Some(median(samples)));
        // Writing to a string does not fail.
        let _written = writeln!(text, "host enqueue of a stream-ordered gather, {rows}: {us} us");
    }
    text
}

/// Three significant digits at least, whatever the size.
fn microseconds(value: Option<f64>) -> String {
    match value {
        None => String::new(),
        Some(value) if value < 10.0 => format!("{value:.3}"),
        Some(value) if value < 100.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.1}"),
    }
}
