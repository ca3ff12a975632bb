//! The figures of a GPU that are no quotient of two paths of one case.

use super::super::super::extras::Extras;
use super::super::super::plan::{BATCH_LAYERS, Mode, Path};
use super::super::super::record::Record;
use super::super::super::rival::{KERNEL_ROWS, KernelTimes};
use super::super::super::statistics::{median, percentile};
use super::Figure;
use crate::workload::preset::Preset;

/// The name of the batch's case.
const BATCH_CASE: &str = "batch69";
/// Rows of it.
const BATCH_SELECTED: u64 = 8;
/// From exec to readiness, in milliseconds.
const START_MS_MAX: f64 = 1_500.0;
/// Registering every layer, with a filled store and with an empty one, in milliseconds.
const REGISTER_MS_MAX: [f64; 2] = [500.0, 4_000.0];

/// Those that the run has samples for.
pub(super) fn figures(record: &Record) -> Vec<Figure> {
    let mut figures = Vec::new();
    if let Some(kernels) = &record.kernels {
        figures.extend(of_kernels(kernels));
        figures.extend(of_batch(record, kernels));
    }
    if let Some(extras) = &record.extras {
        figures.extend(of_extras(extras));
    }
    figures
}

/// Time of one call in a graph.
fn graph_us(kernels: &KernelTimes, selected: u64, kernel: &str) -> Option<f64> {
    Some(median(kernels.graph_us.get(&selected.to_string())?.get(kernel)?))
}

fn of_kernels(kernels: &KernelTimes) -> Vec<Figure> {
    let mut figures = Vec::new();
    for selected in KERNEL_ROWS {
        let us = |kernel| graph_us(kernels, selected, kernel);
        if let (Some(own), Some(control), Some(triton)) = (us("own"), us("control"), us("triton")) {
            let spread = (control / own - 1.0).abs();
            let what = format!("kernel in a graph, S={selected}: own / triton ({own:.2} us)");
            figures.push(Figure::at_most(what, own / triton, 1.0 + spread, ""));
        }
    }
    let largest = KERNEL_ROWS[KERNEL_ROWS.len() - 1];
    if let Some(us) = graph_us(kernels, largest, "own") {
        let kernel = (largest * Preset::KimiK3Tp8.state_bytes()) as f64 / us;
        let memcpy = kernels.memcpy_bytes as f64 / median(&kernels.memcpy_us);
        let what = format!("kernel in a graph, S={largest}: bandwidth / memcpy of 8 GiB");
        figures.push(Figure::at_least(what, kernel / memcpy, 0.92));
    }
    figures
}

fn of_batch(record: &Record, kernels: &KernelTimes) -> Option<Figure> {
    let case = record.cases.iter().find(|case| case.name == BATCH_CASE)?;
    let one =
        graph_us(kernels, BATCH_SELECTED, "own").filter(|_| case.selected == BATCH_SELECTED)?;
    let wall = record.median_us(BATCH_CASE, Mode::Wall, Path::Ring)?;
    let what = format!("{BATCH_CASE}: ring / 69 x one layer's kernel in a graph");
    Some(Figure::at_most(what, wall / (BATCH_LAYERS as f64 * one), 1.1, ""))
}

fn of_extras(extras: &Extras) -> Vec<Figure> {
    let mut figures = Vec::new();
    let [filled, empty] = REGISTER_MS_MAX;
    for (what, samples, bound) in [
        ("exec to /readyz", &extras.start_ms, START_MS_MAX),
        ("register 69 layers, filled store", &extras.register_filled_ms, filled),
        ("register 69 layers, empty store", &extras.register_empty_ms, empty),
    ] {
        if !samples.is_empty() {
            figures.push(Figure::at_most(what.to_owned(), median(samples), bound, " ms"));
        }
    }
    if let Some(seen) = &extras.two_workers {
        let launch = median(&seen.large_us) / seen.large_launches as f64;
        let alone = median(&seen.small_alone_us);
        for (name, percent) in [("median", 50.0), ("95th percentile", 95.0)] {
            let waited = percentile(&seen.small_beside_us, percent) - alone;
            let what = format!("1 MB beside 4 GB: launches waited for, {name}");
            figures.push(Figure::at_most(what, waited / launch, 2.0, ""));
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::super::super::extras::TwoWorkers;
    use super::*;

    fn reached(figures: &[Figure]) -> Vec<bool> {
        figures.iter().map(Figure::is_reached).collect()
    }

    #[test]
    fn a_kernel_may_be_as_slow_as_tritons_and_what_the_control_cannot_tell_apart() {
        let times = |own: f64, control: f64| {
            let of = |us: f64| vec![us, us];
            let named = [("own", of(own)), ("control", of(control)), ("triton", of(100.0))];
            let by_kernel: BTreeMap<String, Vec<f64>> =
                named.into_iter().map(|(name, us)| (name.to_owned(), us)).collect();
            KernelTimes {
                calls: 100,
                graph_us: [("256".to_owned(), by_kernel)].into(),
                memcpy_bytes: 256 * 786_432,
                memcpy_us: vec![95.0],
            }
        };
        assert_eq!(reached(&of_kernels(&times(100.0, 100.0))), [true, true]);
        assert_eq!(reached(&of_kernels(&times(100.5, 99.5))), [true, true]);
        assert_eq!(reached(&of_kernels(&times(101.0, 101.0))), [false, true]);
        assert_eq!(reached(&of_kernels(&times(104.0, 104.0))), [false, false]);
    }

    #[test]
    fn a_small_request_waits_for_launches_of_the_large_one() {
        let seen = |beside: f64| Extras {
            two_workers: Some(TwoWorkers {
                large_bytes: 640,
                large_launches: 10,
                small_bytes: 1,
                large_us: vec![300.0],
                small_alone_us: vec![12.0],
                small_beside_us: vec![12.0 + beside],
            }),
            ..Extras::default()
        };
        assert_eq!(reached(&of_extras(&seen(60.0))), [true, true]);
        assert_eq!(reached(&of_extras(&seen(61.0))), [false, false]);
    }
}
