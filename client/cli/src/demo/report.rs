//! What the demonstration ends with.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::worker::WorkerReport;
use crate::cli::DemoOptions;
use crate::terminal::{Table, bytes, grouped};
use crate::worker::cycle::PLACES_MAX;
use crate::workload::latency::Latencies;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    device: String,
    preset: &'static str,
    layers: u32,
    workers: u32,
    steps: u64,
    seed: u64,
    rows_gathered: u64,
    rows_cleared: u64,
    rows_scattered: u64,
    rows_skipped: u64,
    bytes_copied: u64,
    gather_us_p50: f64,
    gather_us_p99: f64,
    scatter_us_p50: f64,
    scatter_us_p99: f64,
    pub(crate) mismatches: u64,
    first_mismatches: Vec<String>,
    compiles_after_seal: u64,
    refusals: u64,
    seconds: f64,
}

impl Report {
    /// Adds up what the workers counted. `compiles` are the device's, after the seal.
    pub(crate) fn new(
        options: &DemoOptions,
        workers: &[WorkerReport],
        compiles: u64,
        took: Duration,
    ) -> Self {
        let sum = |field: fn(&WorkerReport) -> u64| workers.iter().map(field).sum::<u64>();
        let mut gather = Latencies::default();
        let mut scatter = Latencies::default();
        for worker in workers {
            gather.merge(&worker.gather);
            scatter.merge(&worker.scatter);
        }
        let places = workers.iter().flat_map(|worker| &worker.first_mismatches);
        Self {
            device: workers.first().map(|worker| worker.device.clone()).unwrap_or_default(),
            preset: options.preset.name(),
            layers: options.layers,
            workers: options.workers,
            steps: options.steps,
            seed: options.common.seed,
            rows_gathered: sum(|worker| worker.rows_gathered),
            rows_cleared: sum(|worker| worker.rows_cleared),
            rows_scattered: sum(|worker| worker.rows_scattered),
            rows_skipped: sum(|worker| worker.rows_skipped),
            bytes_copied: options.preset.state_bytes()
                * sum(|worker| worker.rows_gathered + worker.rows_scattered),
            gather_us_p50: gather.percentile_us(50.0),
            gather_us_p99: gather.percentile_us(99.0),
            scatter_us_p50: scatter.percentile_us(50.0),
            scatter_us_p99: scatter.percentile_us(99.0),
            mismatches: sum(|worker| worker.mismatches),
            first_mismatches: places.take(PLACES_MAX).cloned().collect(),
            compiles_after_seal: compiles,
            refusals: sum(|worker| worker.refusals),
            seconds: took.as_secs_f64(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::of_values();
        let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
        line("device", self.device.clone());
        line(
            "cache",
            format!("{}, {} layers in each of {} workers", self.preset, self.layers, self.workers),
        );
        line("steps", format!("{} of each worker, {:.1} s", grouped(self.steps), self.seconds));
        line(
            "gathered",
            format!(
                "{} rows, {} cleared; p50 {:.0} us, p99 {:.0} us",
                grouped(self.rows_gathered),
                grouped(self.rows_cleared),
                self.gather_us_p50,
                self.gather_us_p99
            ),
        );
        line(
            "scattered",
            format!(
                "{} rows, {} skipped; p50 {:.0} us, p99 {:.0} us",
                grouped(self.rows_scattered),
                grouped(self.rows_skipped),
                self.scatter_us_p50,
                self.scatter_us_p99
            ),
        );
        line("copied", bytes(self.bytes_copied));
        line("compiled after seal", grouped(self.compiles_after_seal));
        line("refused", grouped(self.refusals));
        line("mismatches", grouped(self.mismatches));
        for place in &self.first_mismatches {
            line("", place.clone());
        }
        f.write_str(&table.render())
    }
}
