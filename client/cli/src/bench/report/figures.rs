//! The figures that a run is held against. Each is taken from one case, one mode and one file.

mod cuda;
mod order;

use super::super::plan::{Case, Kind, Mode, Operation, Path, Work};
use super::super::record::Record;
use crate::workload::preset::Preset;

/// One figure, and whether it is reached.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figure {
    /// What is measured.
    pub(super) what: String,
    /// What came out.
    pub(super) measured: String,
    /// What it may be.
    pub(super) bound: String,
    value: f64,
    limit: Limit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Figure {
    /// Whether the value is inside its bound. What is no number is not.
    pub(super) fn is_reached(&self) -> bool {
        match self.limit {
            Limit::AtMost(bound) => self.value <= bound,
            Limit::AtLeast(bound) => self.value >= bound,
        }
    }

    fn at_most(what: String, value: f64, bound: f64, unit: &str) -> Self {
        Self {
            what,
            measured: format!("{value:.3}{unit}"),
            bound: format!("<= {bound:.3}{unit}"),
            value,
            limit: Limit::AtMost(bound),
        }
    }

    fn at_least(what: String, value: f64, bound: f64) -> Self {
        Self {
            what,
            measured: format!("{value:.3}"),
            bound: format!(">= {bound:.3}"),
            value,
            limit: Limit::AtLeast(bound),
        }
    }
}

/// Private memory of an idle daemon, in KiB.
const IDLE_KIB_MAX: f64 = 32.0 * 1024.0;
/// Growth of it with each session, in KiB.
const GROWTH_KIB_MAX: f64 = 64.0;
/// CPU time of an idle daemon, in percent of one CPU.
const IDLE_CPU_PERCENT_MAX: f64 = 0.5;

/// The figures that the run has samples for.
pub(super) fn figures(record: &Record) -> Vec<Figure> {
    let mut figures = Vec::new();
    for case in Case::all(record.kind()) {
        let limits = of_case(case);
        for (above, below, limit) in limits {
            let name = case.name();
            let median = |path| record.median_us(&name, Mode::Wall, path);
            if let (Some(above_us), Some(below_us)) = (median(above), median(below)) {
                let what = format!("{name}: {} / {}", above.label(), below.label());
                let ratio = above_us / below_us;
                figures.push(match limit {
                    Limit::AtMost(bound) => Figure::at_most(what, ratio, bound, ""),
                    Limit::AtLeast(bound) => Figure::at_least(what, ratio, bound),
                });
            }
        }
        figures.extend(over_pingpongs(record, case));
    }
    figures.extend(footprint(record));
    figures.extend(cuda::figures(record));
    let ordered = record.extras.as_ref().and_then(|extras| extras.order.as_ref());
    figures.extend(ordered.into_iter().flat_map(order::figures));
    figures
}

/// Quotients of medians of one case.
fn of_case(case: Case) -> Vec<(Path, Path, Limit)> {
    let over_inproc = |bound| vec![(Path::Ring, Path::Inproc, Limit::AtMost(bound))];
    if case.kind == Kind::Cuda {
        let Work::Copy { preset: Preset::KimiK3Tp8, selected, .. } = case.work else {
            return Vec::new();
        };
        let (inproc, triton) = match selected {
            1 => (1.25, 0.6),
            8 => (1.15, 0.5),
            64 => (1.05, 0.8),
            _ => return Vec::new(),
        };
        let mut limits = over_inproc(inproc);
        limits.push((Path::Ring, Path::Triton, Limit::AtMost(triton)));
        return limits;
    }
    match case.work {
        Work::Empty => vec![
            (Path::Ring, Path::PingpongSpin, Limit::AtMost(3.0)),
            (Path::Ring, Path::Grpc, Limit::AtMost(0.05)),
        ],
        Work::EmptyAfterSleep => vec![(Path::Ring, Path::PingpongFutex, Limit::AtMost(1.3))],
        Work::Batch => over_inproc(1.1),
        Work::Memcpy => vec![(Path::Memcpy, Path::Inproc, Limit::AtLeast(0.95))],
        Work::Copy { preset: Preset::KimiK3Tp8, selected: 1, .. } => over_inproc(1.10),
        Work::Copy { preset: Preset::KimiK3Tp8, .. } => over_inproc(1.03),
        Work::Copy { preset: Preset::Tiny, selected: 32, .. } => over_inproc(1.15),
        Work::Copy { .. } => Vec::new(),
    }
}

/// One small row: what the way to the daemon adds, in ping-pongs of the same trials.
fn over_pingpongs(record: &Record, case: Case) -> Option<Figure> {
    let Work::Copy { preset: Preset::Tiny, selected: 1, operation } = case.work else {
        return None;
    };
    let name = case.name();
    let median = |path| record.median_us(&name, Mode::Wall, path);
    let added = median(Path::Ring)? - median(Path::Inproc)?;
    let what = match operation {
        Operation::Gather | Operation::Clear | Operation::Scatter => {
            format!("{name}: (ring - inproc) / pingpong_spin")
        }
    };
    Some(Figure::at_most(what, added / median(Path::PingpongSpin)?, 4.0, ""))
}

fn footprint(record: &Record) -> Vec<Figure> {
    let Some(footprint) = &record.footprint else { return Vec::new() };
    let idle = footprint.idle_daemon_rss_anon_kib as f64;
    let named = |what: &str| what.to_owned();
    vec![
        Figure::at_most(named("idle daemon: private memory"), idle, IDLE_KIB_MAX, " KiB"),
        Figure::at_most(
            named("idle daemon: private memory a session"),
            footprint.growth_kib_per_session,
            GROWTH_KIB_MAX,
            " KiB",
        ),
        Figure::at_most(
            named("idle daemon: CPU"),
            footprint.idle_cpu_percent,
            IDLE_CPU_PERCENT_MAX,
            " %",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_part_of_what_it_allows_and_no_number_is_not() {
        let reached = |value| Figure::at_most("a".into(), value, 1.03, "").is_reached();
        assert!(reached(1.03) && reached(0.5));
        assert!(!reached(1.04) && !reached(f64::NAN));
        assert!(Figure::at_least("a".into(), 0.95, 0.95).is_reached());
        assert!(!Figure::at_least("a".into(), f64::NAN, 0.95).is_reached());
    }

    #[test]
    fn every_figure_is_taken_from_intervals_that_its_case_measures() {
        let mut count = 0;
        for case in [Kind::Host, Kind::Cuda].into_iter().flat_map(Case::all) {
            let measured = Case { rival: case.kind == Kind::Cuda, ..case }.measurements();
            for (above, below, _) in of_case(case) {
                assert!(measured.contains(&(Mode::Wall, above)), "{} {above:?}", case.name());
                assert!(measured.contains(&(Mode::Wall, below)), "{} {below:?}", case.name());
                count += 1;
            }
        }
        assert_eq!(count, 2 + 1 + 1 + 1 + 9 + 3 + 3 * 3 * 2);
    }
}
