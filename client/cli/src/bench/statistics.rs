//! Numbers out of samples. Pure.

/// The value that `percent` of a hundred samples stay within, between two samples by a straight line; NaN without any.
pub(super) fn percentile(samples: &[f64], percent: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = percent / 100.0 * last as f64;
    let below = (0..=last).rev().find(|place| *place as f64 <= at).unwrap_or(0);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64)
}

/// The middle of the samples; NaN without any.
pub(super) fn median(samples: &[f64]) -> f64 {
    percentile(samples, 50.0)
}

/// Each trial's own quotient: a busy moment weighs on both of its parts.
pub(super) fn paired_ratios(above: &[f64], below: &[f64]) -> Vec<f64> {
    above.iter().zip(below).map(|(above, below)| above / below).collect()
}

/// The slope of the straight line through the points by least squares; 0 where the points tell none.
pub(super) fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    if spread > 0.0 { together / spread } else { 0.0 }
}

/// Microseconds, to the nanosecond: what a sample is written with.
pub(super) fn to_nanoseconds(microseconds: f64) -> f64 {
    (microseconds * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn near(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 1e-9
    }

    #[test]
    fn the_median_of_an_even_number_of_samples_is_between_the_middle_two() {
        assert!(near(median(&[4.0, 1.0, 3.0, 2.0]), 2.5));
        assert!(near(median(&[9.0, 1.0, 5.0]), 5.0));
        assert!(near(median(&[7.0]), 7.0));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn percentiles_reach_from_the_least_to_the_greatest_sample() {
        let samples: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        for percent in [0.0, 5.0, 25.0, 95.0, 100.0] {
            assert!(near(percentile(&samples, percent), percent));
        }
    }

    #[test]
    fn ratios_are_taken_within_a_trial() {
        let ratios = paired_ratios(&[2.0, 200.0], &[1.0, 100.0]);
        assert!(ratios.iter().all(|ratio| near(*ratio, 2.0)), "{ratios:?}");
    }

    #[test]
    fn a_single_point_has_no_slope_and_a_line_has_its_own() {
        assert!(near(slope(&[(3.0, 9.0)]), 0.0));
        let line: Vec<(f64, f64)> = (0..20).map(f64::from).map(|x| (x, 5.0 + 3.0 * x)).collect();
        assert!(near(slope(&line), 3.0));
    }

    proptest! {
        #[test]
        fn a_median_has_as_many_samples_below_as_above(samples in prop::collection::vec(0.0_f64..1e6, 1..60)) {
            let middle = median(&samples);
            let below = samples.iter().filter(|sample| **sample < middle).count();
            let above = samples.iter().filter(|sample| **sample > middle).count();
            prop_assert!(below * 2 <= samples.len() && above * 2 <= samples.len());
        }
    }
}
