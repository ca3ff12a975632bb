//! What is measured, and in which order. Pure: the same seed gives the same plan.

use statecopy_proto::Direction;

use crate::workload::preset::Preset;
use crate::workload::random::{Random, mix};

/// One way to have the same bytes copied, or a reference that stands beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Path {
    /// The daemon's kernel, called in the worker.
    Inproc,
    /// The same into a buffer that was there before.
    InprocPreallocated,
    /// The same without holding the request against the plan.
    InprocNocheck,
    /// Through the session's shared memory.
    Ring,
    /// Through gRPC.
    Grpc,
    /// The ring again, under a second label: how far apart two equal things come out.
    Control,
    /// One cache line to the other CPU and back.
    PingpongSpin,
    /// One futex wake-up to the other CPU and one back, both sides asleep.
    PingpongFutex,
    /// One memcpy of as many bytes between two private buffers.
    Memcpy,
}

impl Path {
    /// Paths that copy, all of them with the same inputs.
    pub(super) const COPIES: [Self; 6] = [
        Self::Inproc,
        Self::InprocPreallocated,
        Self::InprocNocheck,
        Self::Ring,
        Self::Grpc,
        Self::Control,
    ];
    /// Every label, in the order of the record.
    pub(super) const ALL: [Self; 9] = [
        Self::Inproc,
        Self::InprocPreallocated,
        Self::InprocNocheck,
        Self::Ring,
        Self::Grpc,
        Self::Control,
        Self::PingpongSpin,
        Self::PingpongFutex,
        Self::Memcpy,
    ];

    /// The name in the record.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Inproc => "inproc",
            Self::InprocPreallocated => "inproc_preallocated",
            Self::InprocNocheck => "inproc_nocheck",
            Self::Ring => "ring",
            Self::Grpc => "grpc",
            Self::Control => "control",
            Self::PingpongSpin => "pingpong_spin",
            Self::PingpongFutex => "pingpong_futex",
            Self::Memcpy => "memcpy",
        }
    }

    /// What the label means, for whoever reads the record alone.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::Inproc => {
                "the daemon's host kernel called in the worker, with the same work a call: packed memory from the pool, \
                 index and flag handling, checks against the plan"
            }
            Self::InprocPreallocated => "inproc into packed memory taken before the interval",
            Self::InprocNocheck => "inproc without checks and with flags converted beforehand",
            Self::Ring => "the daemon, through the session's shared memory",
            Self::Grpc => "the daemon, through gRPC on its Unix socket",
            Self::Control => "ring measured a second time under another label",
            Self::PingpongSpin => {
                "one shared word to a spinning process on the executor's CPU and back; no daemon"
            }
            Self::PingpongFutex => {
                "one shared word and a futex wake-up each way, both processes asleep; no daemon"
            }
            Self::Memcpy => {
                "one memcpy of the same number of bytes between two private buffers in the worker"
            }
        }
    }

    /// Whether the daemon copies.
    pub(super) fn is_daemon(self) -> bool {
        matches!(self, Self::Ring | Self::Grpc | Self::Control)
    }

    /// Whether it is no copy but something to compare copies with.
    pub(super) fn is_reference(self) -> bool {
        matches!(self, Self::PingpongSpin | Self::PingpongFutex | Self::Memcpy)
    }
}

/// What an interval ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mode {
    /// The caller is free to go on.
    HostEnqueue,
    /// The bytes are there and the caller knows it.
    Wall,
}

impl Mode {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::HostEnqueue, Self::Wall];

    /// The name in the record.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::HostEnqueue => "host_enqueue",
            Self::Wall => "wall",
        }
    }

    /// What the label means.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::HostEnqueue => {
                "until the caller may go on: on the ring until the submit has returned; in process and over gRPC the \
                 caller is free only when the copy is done, so it is the whole call"
            }
            Self::Wall => "until the bytes are there and the caller knows it",
        }
    }
}

/// What a copy does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// A gather without flags.
    Gather,
    /// A gather whose flags are all false: nothing but zeros is written.
    Clear,
    /// A scatter.
    Scatter,
}

impl Operation {
    /// Every one.
    pub(super) const ALL: [Self; 3] = [Self::Gather, Self::Clear, Self::Scatter];

    /// The name in a case's name.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Clear => "clear",
            Self::Scatter => "scatter",
        }
    }

    /// Which way.
    pub(super) fn direction(self) -> Direction {
        match self {
            Self::Gather | Self::Clear => Direction::Gather,
            Self::Scatter => Direction::Scatter,
        }
    }
}

/// What one case asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// One layer.
    Copy { preset: Preset, selected: u64, operation: Operation },
    /// Every layer of the batch, one row each.
    Batch,
    /// Nothing selected: what a request costs without a copy.
    Empty,
    /// The same, with the executor asleep before each request.
    EmptyAfterSleep,
    /// More bytes than any cache holds, beside one memcpy of them.
    Memcpy,
}

/// Layers of the batch: those of Kimi K3.
pub(super) const BATCH_LAYERS: usize = 69;
/// What is so large that a call of the same path right before would warm nothing: past the processor's private caches.
const WARMED_BYTES_MAX: u64 = 4 << 20;
/// Rows of the memcpy case: 64.5 MiB of Kimi K3's states.
const MEMCPY_ROWS: u64 = 86;

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    /// What it asks for.
    pub(super) work: Work,
}

/// One interval of a trial.
pub(super) type Measurement = (Mode, Path);

impl Case {
    /// Every case, in the order in which they run.
    pub(super) fn all() -> Vec<Self> {
        const SMALL: [u64; 4] = [1, 8, 32, 128];
        let layouts: [(Preset, &[u64]); 3] = [
            (Preset::Tiny, &SMALL),
            (Preset::KimiLinear, &SMALL),
            (Preset::KimiK3Tp8, &[1, 8, 64]),
        ];
        let mut cases = vec![Work::Empty, Work::EmptyAfterSleep, Work::Batch];
        for (preset, counts) in layouts {
            for selected in counts {
                cases.extend(Operation::ALL.map(|operation| Work::Copy {
                    preset,
                    selected: *selected,
                    operation,
                }));
            }
        }
        cases.push(Work::Memcpy);
        cases.into_iter().map(|work| Self { work }).collect()
    }

    /// Those whose name holds one of the parts; all of them without parts.
    pub(super) fn chosen(parts: &[String]) -> Vec<Self> {
        let mut cases = Self::all();
        cases
            .retain(|case| parts.is_empty() || parts.iter().any(|part| case.name().contains(part)));
        cases
    }

    /// The name in the record: layout, selected rows, operation.
    pub(super) fn name(self) -> String {
        match self.work {
            Work::Copy { preset, selected, operation } => {
                format!("{}/s{selected}/{}", layout_label(preset), operation.label())
            }
            Work::Batch => format!("batch{BATCH_LAYERS}"),
            Work::Empty => "empty".to_owned(),
            Work::EmptyAfterSleep => "empty_after_sleep".to_owned(),
            Work::Memcpy => "memcpy".to_owned(),
        }
    }

    /// Which cache it copies from or to. The batch has its own.
    pub(super) fn preset(self) -> Preset {
        match self.work {
            Work::Copy { preset, .. } => preset,
            Work::Batch | Work::Empty | Work::EmptyAfterSleep => Preset::Tiny,
            Work::Memcpy => Preset::KimiK3Tp8,
        }
    }

    /// What a copy of it does.
    pub(super) fn operation(self) -> Operation {
        match self.work {
            Work::Copy { operation, .. } => operation,
            Work::Batch | Work::Empty | Work::EmptyAfterSleep | Work::Memcpy => Operation::Gather,
        }
    }

    /// Rows selected of each layer.
    pub(super) fn selected(self) -> u64 {
        match self.work {
            Work::Copy { selected, .. } => selected,
            Work::Batch => 1,
            Work::Empty | Work::EmptyAfterSleep => 0,
            Work::Memcpy => MEMCPY_ROWS,
        }
    }

    /// Layers that one request names.
    pub(super) fn layers(self) -> usize {
        if self.work == Work::Batch { BATCH_LAYERS } else { 1 }
    }

    /// Bytes of the packed buffer.
    pub(super) fn packed_bytes(self) -> u64 {
        self.selected() * self.layers() as u64 * self.preset().state_bytes()
    }

    /// Whether each interval is preceded by one call of the same path, so that no path pays for what another one left in
    /// the processors' caches.
    pub(super) fn is_warmed(self) -> bool {
        self.packed_bytes() <= WARMED_BYTES_MAX
    }

    /// Every interval of one trial, in the order of the record.
    pub(super) fn measurements(self) -> Vec<Measurement> {
        let wall = |paths: &[Path]| paths.iter().map(|path| (Mode::Wall, *path)).collect();
        match self.work {
            Work::EmptyAfterSleep => wall(&[Path::Ring, Path::Control, Path::PingpongFutex]),
            Work::Memcpy => wall(&[Path::Inproc, Path::Memcpy]),
            Work::Copy { .. } | Work::Batch | Work::Empty => {
                let both = Mode::ALL.into_iter();
                let mut all: Vec<Measurement> =
                    both.flat_map(|mode| Path::COPIES.map(|path| (mode, path))).collect();
                if self.compares_with_pingpong() {
                    all.push((Mode::Wall, Path::PingpongSpin));
                }
                all
            }
        }
    }

    /// Every copy whose bytes are checked first. In process and over gRPC both modes are the same call.
    pub(super) fn checked(self) -> Vec<Measurement> {
        let mut checked = self.measurements();
        checked.retain(|(mode, path)| {
            let differs = matches!(path, Path::Ring | Path::Control);
            !path.is_reference() && (*mode == Mode::Wall || differs)
        });
        checked
    }

    /// Every interval in the order of one trial.
    pub(super) fn order(self, seed: u64, trial: u64) -> Vec<Measurement> {
        let mut order = self.measurements();
        self.random(seed, trial, 1).shuffle(&mut order);
        order
    }

    /// The rows that every path of one trial selects: no row twice.
    pub(super) fn indices(self, seed: u64, trial: u64, rows: u64) -> Vec<i32> {
        let mut all: Vec<i32> = (0..i32::try_from(rows).unwrap_or(i32::MAX)).collect();
        self.random(seed, trial, 2).shuffle(&mut all);
        all.truncate(usize::try_from(self.selected()).unwrap_or(usize::MAX));
        all
    }

    /// Depends on the case's name and not on which other cases run.
    fn random(self, seed: u64, trial: u64, purpose: u64) -> Random {
        let name = self.name().bytes().fold(seed, |state, byte| mix(state ^ u64::from(byte)));
        Random::new(mix(name.wrapping_add(trial)) ^ purpose)
    }

    fn compares_with_pingpong(self) -> bool {
        match self.work {
            Work::Empty => true,
            Work::Copy { preset, selected, .. } => preset == Preset::Tiny && selected == 1,
            Work::Batch | Work::EmptyAfterSleep | Work::Memcpy => false,
        }
    }
}

/// A layout by what counts here: how long its rows are.
pub(super) fn layout_label(preset: Preset) -> &'static str {
    match preset {
        Preset::KimiK3Tp8 => "kimi-k3-tp8",
        Preset::KimiLinear => "262144",
        Preset::Tiny => "24576",
    }
}

/// Rows of a layout's cache: half as many again as any request selects.
pub(super) fn cache_rows(preset: Preset) -> u64 {
    match preset {
        Preset::KimiK3Tp8 => 96,
        Preset::KimiLinear | Preset::Tiny => 192,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_cases_are_those_of_the_method_and_their_names_differ() {
        let names: BTreeSet<String> = Case::all().into_iter().map(Case::name).collect();
        assert_eq!(names.len(), Case::all().len());
        assert_eq!(names.len(), 4 + 3 * (3 + 4 + 4));
        for name in
            ["empty", "empty_after_sleep", "batch69", "kimi-k3-tp8/s64/clear", "24576/s32/scatter"]
        {
            assert!(names.contains(name), "{name} is missing in {names:?}");
        }
    }

    #[test]
    fn rows_have_the_sizes_that_their_names_say_and_caches_hold_what_is_selected() {
        assert_eq!(Preset::Tiny.state_bytes(), 24_576);
        assert_eq!(Preset::KimiLinear.state_bytes(), 262_144);
        assert_eq!(Preset::KimiK3Tp8.state_bytes(), 786_432);
        for case in Case::all() {
            assert!(case.selected() <= cache_rows(case.preset()), "{}", case.name());
        }
        let memcpy = Case { work: Work::Memcpy };
        assert!(memcpy.packed_bytes() >= 64 << 20);
    }

    #[test]
    fn every_copy_is_measured_on_every_path_in_both_modes() {
        for case in Case::all() {
            let measured: BTreeSet<Measurement> = case.measurements().into_iter().collect();
            assert_eq!(measured.len(), case.measurements().len(), "{}", case.name());
            if let Work::Copy { .. } | Work::Batch | Work::Empty = case.work {
                for (mode, path) in
                    Mode::ALL.into_iter().flat_map(|mode| Path::COPIES.map(|path| (mode, path)))
                {
                    assert!(measured.contains(&(mode, path)), "{} {path:?}", case.name());
                }
            }
        }
    }

    #[test]
    fn every_path_that_copies_is_checked_before_it_is_timed() {
        for case in Case::all() {
            let checked = case.checked();
            for (mode, path) in case.measurements() {
                let found =
                    checked.contains(&(mode, path)) || checked.contains(&(Mode::Wall, path));
                assert_eq!(found, !path.is_reference(), "{} {mode:?} {path:?}", case.name());
            }
        }
    }

    #[test]
    fn each_trial_has_an_order_of_its_own_which_the_seed_alone_decides() {
        let case = Case { work: Work::Empty };
        let sorted = |mut order: Vec<Measurement>| {
            order.sort_unstable();
            order
        };
        let mut orders = Vec::new();
        for trial in 0..50 {
            let order = case.order(7, trial);
            assert_eq!(order, case.order(7, trial));
            assert_eq!(sorted(order.clone()), sorted(case.measurements()));
            orders.push(order);
        }
        orders.dedup();
        assert_eq!(orders.len(), 50);
        assert_ne!(case.order(7, 0), case.order(8, 0));
    }

    #[test]
    fn every_path_takes_every_place_in_the_order_about_equally_often() {
        let case = Case { work: Work::Empty };
        let count = case.measurements().len();
        let mut first = 0;
        for trial in 0..1300 {
            first += usize::from(case.order(1, trial)[0] == (Mode::Wall, Path::Ring));
        }
        let expected = 1300 / count;
        assert!(first.abs_diff(expected) < expected / 2, "{first} of 1300, {expected} expected");
    }

    #[test]
    fn a_trial_selects_each_row_once() {
        let case = Case::chosen(&["262144/s128/gather".to_owned()])[0];
        let indices = case.indices(3, 5, 192);
        let distinct: BTreeSet<i32> = indices.iter().copied().collect();
        assert_eq!((indices.len(), distinct.len()), (128, 128));
        assert!(indices.iter().all(|index| (0..192).contains(index)));
        assert_ne!(indices, case.indices(3, 6, 192));
    }

    #[test]
    fn a_case_is_chosen_by_any_part_of_its_name() {
        let names = |parts: &[&str]| -> Vec<String> {
            let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
            Case::chosen(&parts).into_iter().map(Case::name).collect()
        };
        assert_eq!(
            names(&["24576/s8/"]),
            ["24576/s8/gather", "24576/s8/clear", "24576/s8/scatter"]
        );
        assert_eq!(names(&["empty"]), ["empty", "empty_after_sleep"]);
        assert_eq!(names(&["nothing like it"]), [""; 0]);
    }
}
