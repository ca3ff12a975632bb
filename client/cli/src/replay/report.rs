//! What a replay ends with.

use std::fmt;

use serde::Serialize;

use super::{DaemonCounts, Replayed};
use crate::cli::ReplayOptions;
use crate::terminal::{Table, bytes, grouped};
use crate::worker::cycle::Tally;
use crate::workload::latency::Latencies;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    preset: &'static str,
    layers: u32,
    /// `batch`: all layers in one request; `per_layer`: one request each; `none`: nothing was copied.
    requests_are: &'static str,
    requests: usize,
    steps: u64,
    prefill_steps: u64,
    prefix_hits: u64,
    rows_gathered: u64,
    rows_cleared: u64,
    rows_scattered: u64,
    bytes_copied: u64,
    copy_us_p50: f64,
    copy_us_p99: f64,
    copy_share_of_wall: f64,
    wall_seconds: f64,
    pub(crate) mismatches: u64,
    first_mismatches: Vec<String>,
    compiles_after_seal: u64,
    refusals: u64,
}

impl Report {
    pub(crate) fn new(
        options: &ReplayOptions,
        replayed: Replayed,
        tally: &Tally,
        daemon: DaemonCounts,
    ) -> Self {
        let mut copies = Latencies::default();
        copies.merge(&tally.gather.samples());
        copies.merge(&tally.scatter.samples());
        let copying = tally.gather.total() + tally.scatter.total();
        let wall = replayed.wall.as_secs_f64();
        let state = options.preset.state_bytes();
        let requests_are = match (options.dry_run, options.per_layer) {
            (true, _) => "none",
            (false, true) => "per_layer",
            (false, false) => "batch",
        };
        Self {
            preset: options.preset.name(),
            layers: options.layers,
            requests_are,
            requests: replayed.requests,
            steps: replayed.steps,
            prefill_steps: replayed.prefill_steps,
            prefix_hits: replayed.prefix_hits,
            rows_gathered: tally.rows_gathered,
            rows_cleared: tally.rows_cleared,
            rows_scattered: tally.rows_scattered,
            bytes_copied: (tally.rows_gathered + tally.rows_scattered) * state,
            copy_us_p50: copies.percentile_us(50.0),
            copy_us_p99: copies.percentile_us(99.0),
            copy_share_of_wall: if wall > 0.0 { copying.as_secs_f64() / wall } else { 0.0 },
            wall_seconds: wall,
            mismatches: tally.mismatches,
            first_mismatches: tally.first_mismatches.clone(),
            compiles_after_seal: daemon.compiles_after_seal,
            refusals: daemon.refusals,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::of_values();
        let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
        let asked = match self.requests_are {
            "batch" => "all in one request",
            "per_layer" => "one request each",
            _ => "scheduled only, nothing copied",
        };
        line("cache", format!("{}, {} layers, {asked}", self.preset, self.layers));
        line(
            "requests",
            format!(
                "{}, of which {} began from a stored prefix",
                grouped(self.requests as u64),
                grouped(self.prefix_hits)
            ),
        );
        line(
            "steps",
            format!("{}, {} with prefill", grouped(self.steps), grouped(self.prefill_steps)),
        );
        line(
            "gathered",
            format!("{} rows, {} cleared", grouped(self.rows_gathered), grouped(self.rows_cleared)),
        );
        line("scattered", format!("{} rows", grouped(self.rows_scattered)));
        line("copied", bytes(self.bytes_copied));
        if self.requests_are == "none" {
            return f.write_str(&table.render());
        }
        line("a copy", format!("p50 {:.0} us, p99 {:.0} us", self.copy_us_p50, self.copy_us_p99));
        line(
            "wall",
            format!(
                "{:.1} s, {:.0} % of it in copies, the rest in making and checking states",
                self.wall_seconds,
                100.0 * self.copy_share_of_wall
            ),
        );
        line("compiled after seal", grouped(self.compiles_after_seal));
        line("refused", grouped(self.refusals));
        line("mismatches", grouped(self.mismatches));
        for place in &self.first_mismatches {
            line("", place.clone());
        }
        f.write_str(&table.render())
    }
}
