//! What is measured, and in which order. Pure: the same seed gives the same plan.

use std::ops::RangeInclusive;

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
    /// The rival's Triton kernel by its compiled launcher.
    Triton,
    /// The same into a buffer that was there before.
    TritonPreallocated,
    /// The same by the kernel's usual entry.
    TritonJit,
    /// Indexing by torch.
    TorchIndex,
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
    /// Paths of the rival, for cases of one layer.
    pub(super) const RIVALS: [Self; 4] =
        [Self::Triton, Self::TritonPreallocated, Self::TritonJit, Self::TorchIndex];
    /// Every label, in the order of the record.
    pub(super) const ALL: [Self; 13] = [
        Self::Inproc,
        Self::InprocPreallocated,
        Self::InprocNocheck,
        Self::Ring,
        Self::Grpc,
        Self::Control,
        Self::PingpongSpin,
        Self::PingpongFutex,
        Self::Memcpy,
        Self::Triton,
        Self::TritonPreallocated,
        Self::TritonJit,
        Self::TorchIndex,
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
            Self::Triton => "triton",
            Self::TritonPreallocated => "triton_preallocated",
            Self::TritonJit => "triton_jit",
            Self::TorchIndex => "torch_index",
        }
    }

    /// What the label means, for whoever reads the record alone.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Self::Inproc => {
                "the daemon's kernel called in the worker, with the same work a call: packed memory from the pool, index and \
                 flag handling, checks against the plan; on a GPU a launch and the synchronising of its stream"
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
            Self::Triton => {
                "a Triton kernel by its compiled launcher from Python, and torch.cuda.synchronize; the output allocated by \
                 torch in the interval, indices and flags on the device before it"
            }
            Self::TritonPreallocated => "triton into packed memory taken before the interval",
            Self::TritonJit => "triton by the kernel's usual entry",
            Self::TorchIndex => {
                "indexing by torch, masked where there are flags, and torch.cuda.synchronize"
            }
        }
    }

    /// Whether the daemon copies.
    pub(super) fn is_daemon(self) -> bool {
        matches!(self, Self::Ring | Self::Grpc | Self::Control)
    }

    /// Whether the rival copies, which also checks its bytes.
    pub(super) fn is_rival(self) -> bool {
        Self::RIVALS.contains(&self)
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
                "until the caller may go on: on the ring until the submit has returned, in process on a GPU until the launch \
                 has; on the host in process, and over gRPC, the caller is free only when the copy is done, so it is the \
                 whole call"
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

/// What is measured: it decides the cases, and what may lie in a cache of the hardware before an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Memory files, copied by the CPU.
    Host,
    /// Memory of a GPU. Every call has other rows and another packed buffer than those before it, so that none of them is in
    /// the GPU's cache, whichever path comes first.
    Cuda,
}

/// What one case asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// One layer.
    Copy { preset: Preset, selected: u64, operation: Operation },
    /// Every layer of the batch.
    Batch,
    /// Nothing selected: what a request costs without a copy.
    Empty,
    /// The same, with the executor asleep before each request.
    EmptyAfterSleep,
    /// More bytes than any cache holds, beside one memcpy of them.
    Memcpy,
}

/// The label of the batch's cache, and the name of its binding set.
pub(super) const BATCH: &str = "batch";
/// Layers of the batch: those of Kimi K3.
pub(super) const BATCH_LAYERS: usize = 69;
/// What is so large that a call of the same path right before would warm nothing: past the processor's private caches.
const WARMED_BYTES_MAX: u64 = 4 << 20;
/// Rows of the memcpy case: 64.5 MiB of Kimi K3's states.
const MEMCPY_ROWS: u64 = 86;

/// What packed buffers and rows that calls walk through hold together at least: several times the cache of a GPU.
const ROTATED_BYTES: u64 = 192 << 20;
/// Packed buffers of one size.
const BUFFERS: RangeInclusive<u64> = 2..=64;

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    /// What is measured.
    pub(super) kind: Kind,
    /// What it asks for.
    pub(super) work: Work,
    /// Whether a rival copies too.
    pub(super) rival: bool,
}

/// Layers of one layout, in memory of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachePlan {
    /// A name for its layers.
    pub(super) label: &'static str,
    /// The layout.
    pub(super) preset: Preset,
    /// Layers.
    pub(super) layers: usize,
    /// Rows of each.
    pub(super) rows: u64,
}

/// Which call of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    /// The trial.
    pub(super) trial: u64,
    /// The place in the trial's order.
    pub(super) place: u64,
    /// Whether it is timed; otherwise it comes right before the one that is.
    pub(super) timed: bool,
}

/// One interval of a trial.
pub(super) type Measurement = (Mode, Path);

impl Case {
    /// Every case, in the order in which they run.
    pub(super) fn all(kind: Kind) -> Vec<Self> {
        const SMALL: [u64; 4] = [1, 8, 32, 128];
        let layouts: &[(Preset, &[u64])] = match kind {
            Kind::Host => &[
                (Preset::Tiny, &SMALL),
                (Preset::KimiLinear, &SMALL),
                (Preset::KimiK3Tp8, &[1, 8, 64]),
            ],
            Kind::Cuda => &[(Preset::Tiny, &SMALL), (Preset::KimiK3Tp8, &[1, 8, 64, 256])],
        };
        let mut cases = match kind {
            Kind::Host => vec![Work::Empty, Work::EmptyAfterSleep, Work::Batch],
            Kind::Cuda => vec![Work::Empty, Work::Batch],
        };
        for (preset, counts) in layouts.iter().copied() {
            for selected in counts.iter().copied() {
                cases.extend(Operation::ALL.map(|operation| Work::Copy {
                    preset,
                    selected,
                    operation,
                }));
            }
        }
        if kind == Kind::Host {
            cases.push(Work::Memcpy);
        }
        cases.into_iter().map(|work| Self { kind, work, rival: false }).collect()
    }

    /// Those whose name holds one of the parts; all of them without parts.
    pub(super) fn chosen(kind: Kind, parts: &[String]) -> Vec<Self> {
        let mut cases = Self::all(kind);
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
            Work::Batch if self.kind == Kind::Cuda => Preset::KimiK3Tp8,
            Work::Batch | Work::Empty | Work::EmptyAfterSleep => Preset::Tiny,
            Work::Memcpy => Preset::KimiK3Tp8,
        }
    }

    /// The cache it copies from or to.
    pub(super) fn cache(self) -> CachePlan {
        let preset = self.preset();
        let (label, layers, rows) = match self.work {
            Work::Batch => (BATCH, BATCH_LAYERS, batch_rows(self.kind)),
            _ => (layout_label(preset), 1, cache_rows(self.kind, preset)),
        };
        CachePlan { label, preset, layers, rows }
    }

    /// Packed buffers that calls take in turn.
    pub(super) fn buffers(self) -> u64 {
        let wanted = match self.kind {
            Kind::Host => *BUFFERS.start(),
            Kind::Cuda => ROTATED_BYTES / self.packed_bytes().max(1),
        };
        wanted.clamp(*BUFFERS.start(), *BUFFERS.end())
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
            Work::Batch => match self.kind {
                Kind::Host => 1,
                Kind::Cuda => 8,
            },
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
    /// the processors' caches, or for the device's turn from one process to another.
    pub(super) fn is_warmed(self) -> bool {
        self.kind == Kind::Cuda || self.packed_bytes() <= WARMED_BYTES_MAX
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
                if self.compares_with_rival() {
                    all.extend(Path::RIVALS.map(|path| (Mode::Wall, path)));
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
            !path.is_reference() && !path.is_rival() && (*mode == Mode::Wall || differs)
        });
        checked
    }

    /// Every interval in the order of one trial.
    pub(super) fn order(self, seed: u64, trial: u64) -> Vec<Measurement> {
        let mut order = self.measurements();
        self.random(seed, trial, 1).shuffle(&mut order);
        order
    }

    /// The rows that one call selects: no row twice. On the host they are the same for every path of a trial; on a GPU each
    /// call takes the next ones of a walk through all rows.
    pub(super) fn indices(self, seed: u64, turn: Turn, rows: u64) -> Vec<i32> {
        let count = usize::try_from(self.selected()).unwrap_or(usize::MAX);
        let number = |row: u64| i32::try_from(row).unwrap_or(i32::MAX);
        match self.kind {
            Kind::Host => {
                let mut all: Vec<i32> = (0..rows).map(number).collect();
                self.random(seed, turn.trial, 2).shuffle(&mut all);
                all.truncate(count);
                all
            }
            Kind::Cuda => {
                let places = self.measurements().len() as u64;
                let call = (turn.trial * places + turn.place) * 2 + u64::from(turn.timed);
                let (start, stride) = (mix(seed) % rows, stride(rows));
                let first = call % rows * (self.selected() % rows);
                let walk = (first..).map(|step| number((start + step % rows * stride) % rows));
                walk.take(count).collect()
            }
        }
    }

    /// Depends on the case's name and not on which other cases run.
    fn random(self, seed: u64, trial: u64, purpose: u64) -> Random {
        let name = self.name().bytes().fold(seed, |state, byte| mix(state ^ u64::from(byte)));
        Random::new(mix(name.wrapping_add(trial)) ^ purpose)
    }

    /// Whether the rival measures it.
    pub(super) fn compares_with_rival(self) -> bool {
        self.rival && matches!(self.work, Work::Copy { .. })
    }

    fn compares_with_pingpong(self) -> bool {
        match self.work {
            _ if self.kind == Kind::Cuda => false,
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

/// Rows of a layout's cache: on the host half as many again as any request selects; on a GPU so many that a walk through all
/// of them leaves nothing of its beginning in the cache.
fn cache_rows(kind: Kind, preset: Preset) -> u64 {
    match (kind, preset) {
        (Kind::Host, Preset::KimiK3Tp8) => 96,
        (Kind::Host, Preset::KimiLinear | Preset::Tiny) => 192,
        (Kind::Cuda, Preset::KimiK3Tp8 | Preset::KimiLinear) => 512,
        (Kind::Cuda, Preset::Tiny) => 4096,
    }
}

/// Rows of each layer of the batch.
fn batch_rows(kind: Kind) -> u64 {
    match kind {
        Kind::Host => 8,
        Kind::Cuda => 24,
    }
}

/// A step through so many rows that meets each of them once: neighbours of the walk are no neighbours in memory.
fn stride(rows: u64) -> u64 {
    fn common(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { common(b, a % b) }
    }
    (rows * 5 / 8..rows).find(|step| common(rows, *step) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests;
