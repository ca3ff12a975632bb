//! Latencies of calls, as percentiles.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Longest latency that is told apart, in nanoseconds: one minute. Longer ones count as this one.
const NANOSECONDS_MAX: u64 = 60_000_000_000;

/// The latencies of one kind of call, to three significant digits.
#[derive(Debug)]
pub(crate) struct Latencies {
    histogram: Histogram<u64>,
    total: Duration,
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, NANOSECONDS_MAX, 3);
        Self { histogram: histogram.expect("the bounds are constants"), total: Duration::ZERO }
    }
}

impl Latencies {
    /// Counts one call.
    pub(crate) fn record(&mut self, took: Duration) {
        self.total += took;
        self.histogram.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// All calls together.
    pub(crate) fn total(&self) -> Duration {
        self.total
    }

    /// The latency, in microseconds, that `percent` of a hundred calls stayed within; 0 without calls.
    pub(crate) fn percentile_us(&self, percent: f64) -> f64 {
        self.histogram.value_at_percentile(percent) as f64 / 1e3
    }

    /// Pairs of (nanoseconds, calls), to be sent to another process and merged there.
    pub(crate) fn samples(&self) -> Vec<(u64, u64)> {
        let counted = self.histogram.iter_recorded();
        counted.map(|at| (at.value_iterated_to(), at.count_at_value())).collect()
    }

    /// Adds what [`Latencies::samples`] gave in another process.
    pub(crate) fn merge(&mut self, samples: &[(u64, u64)]) {
        for (nanoseconds, calls) in samples {
            self.histogram.saturating_record_n(*nanoseconds, *calls);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_survive_the_way_to_another_process() {
        let mut here = Latencies::default();
        for microseconds in 1..=1000 {
            here.record(Duration::from_micros(microseconds));
        }
        let mut there = Latencies::default();
        there.merge(&here.samples());
        for percent in [50.0, 99.0] {
            let expected = percent * 10.0;
            assert!((here.percentile_us(percent) - expected).abs() < expected * 0.01);
            assert!((there.percentile_us(percent) - here.percentile_us(percent)).abs() < 1e-9);
        }
    }

    #[test]
    fn no_calls_have_no_latency_and_very_long_ones_are_kept() {
        let mut latencies = Latencies::default();
        assert!(latencies.percentile_us(99.0).abs() < f64::EPSILON);
        latencies.record(Duration::from_hours(1));
        assert!(latencies.percentile_us(50.0) > 59e6);
    }
}
