//! Row copies of the host against one memcpy of the same bytes, in one process, paired: `cargo bench --bench row_copy`.
//!
//! Rows of 24 KiB and of 0.75 MiB (12x128x128 FP32, Kimi K3's state at TP8), gathered from pages twice as far apart as the
//! rows are long. `memcpy` moves the same number of bytes between the same mappings in one call, warm and contiguous: what
//! a copy could at best be expected to cost. Bytes are checked before anything is timed. `speed` is memcpy's time over the
//! path's, the median over the trials.
#![expect(clippy::print_stdout, reason = "the table is what a bench is for")]

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use statecopy_kernels::device::{
    Device as _, Flags, Indices, Launch, Launcher as _, Region, Slice,
};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{
    HostCaches, HostDevice, HostLauncher, HostOptions, HostRegion, HostVariants, RowCopies,
};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::KernelClass;
use statecopy_kernels::signature::Signature;
use statecopy_proto::{DataType, Direction, PlanKind};

fn host(row_copies: RowCopies, copy_threads: usize) -> HostDevice {
    let mut options = HostOptions::new(Arc::new(ServingGuard::new(false)));
    options.row_copies = row_copies;
    options.copy_threads = NonZeroUsize::new(copy_threads).expect("at least one");
    HostDevice::open(options).expect("the host opens")
}

/// Bytes of a row, and how many are selected.
const REQUESTS: [(u64, u64); 7] = [
    (24 << 10, 1),
    (24 << 10, 8),
    (24 << 10, 128),
    (768 << 10, 1),
    (768 << 10, 8),
    (768 << 10, 64),
    (768 << 10, 86),
];

/// One memory, and every way to copy it: what one path leaves in the processor's caches, all find there.
struct Bench {
    native: HostLauncher,
    portable: HostLauncher,
    shared: HostLauncher,
    variants: HostVariants,
    caches: HostCaches,
    cache: Arc<HostRegion>,
    packed: Arc<HostRegion>,
    indices: Vec<i32>,
    row: u64,
}

impl Bench {
    fn open(row: u64, selected: u64) -> Self {
        let device = host(RowCopies::Native, 1);
        let elements = row / 4;
        let layout = CacheLayout::with_page_stride(
            DataType::Float32,
            [selected, 1, 1, elements],
            2 * elements,
        )
        .expect("a valid layout");
        let cache = Arc::new(device.scratch(layout.span_bytes()).expect("memory"));
        let packed = Arc::new(device.scratch(row * selected).expect("memory"));
        cache.mapping().fill(0, cache.bytes(), 7).expect("inside");
        let placement = layout.place(0, cache.bytes()).expect("it fits");
        let signature = Signature::new(device.description().uuid, layout, 0);
        let class = KernelClass::of(PlanKind::Fused, &signature);
        // The rows in another order than they lie, as a scheduler would select them.
        let indices: Vec<i32> = (0..i32::try_from(selected).expect("few")).rev().collect();
        let launcher = |device: &HostDevice| device.launcher().expect("it launches");
        Self {
            native: launcher(&device),
            portable: launcher(&host(RowCopies::Portable, 1)),
            shared: launcher(&host(RowCopies::Native, 2)),
            variants: device.compile(&class).expect("it compiles"),
            caches: device.bind(&[(Arc::clone(&cache), placement)]).expect("it is bound"),
            cache,
            packed,
            indices,
            row,
        }
    }

    fn run(&mut self, path: usize) {
        let selected = self.indices.len() as u64;
        let launch = Launch {
            kind: PlanKind::Fused,
            variants: &self.variants,
            caches: &self.caches,
            direction: Direction::Gather,
            selected,
            indices: Indices::Int32(&self.indices),
            flags: Flags::None,
            packed: Slice::new(&self.packed, 0, selected * self.row).expect("it fits"),
            part: 0..selected,
        };
        let launcher = match path {
            0 | 1 => return self.memcpy(),
            2 => &mut self.native,
            3 => &mut self.portable,
            _ => &mut self.shared,
        };
        let ticket = launcher.launch(&launch).expect("it works");
        let moved = launcher.poll(ticket).expect("it works");
        assert_eq!(moved.map(|moved| moved.copied), Some(selected));
    }

    fn check(&self) {
        let mut gathered = vec![0; usize::try_from(self.packed.bytes()).expect("small")];
        self.packed.mapping().read(0, &mut gathered).expect("inside");
        assert!(gathered.iter().all(|byte| *byte == 7), "every byte is the cache's");
    }

    fn memcpy(&self) {
        let bytes = self.packed.mapping().len();
        let (from, to) = (self.cache.mapping().base(), self.packed.mapping().base());
        // SAFETY: both are live mappings of at least that many bytes, and two.
        unsafe { ptr::copy_nonoverlapping(black_box(from), black_box(to), bytes) };
    }
}

/// The paths, in the order in which they are reported. The first one is measured twice, the second time as a control.
const PATHS: [&str; 5] = ["memcpy", "memcpy again", "native", "portable", "native, 2 threads"];

fn main() {
    // `cargo test` runs benches without this flag: then one trial shows that they work.
    let trials = if std::env::args().any(|argument| argument == "--bench") { 301 } else { 1 };
    println!(
        "{:>7} {:>8}  {:<18} {:>11} {:>8}",
        "row KiB", "selected", "path", "median us", "speed"
    );
    for (row, selected) in REQUESTS {
        let samples = measure(row, selected, trials);
        for (path, name) in PATHS.iter().enumerate() {
            // Each trial's own memcpy is the measure, so that a busy moment weighs on both.
            let speeds = samples.iter().map(|trial| trial[0] / trial[path]);
            let (time, speed) = (median(samples.iter().map(|trial| trial[path])), median(speeds));
            println!("{:>7} {selected:>8}  {name:<18} {time:>11.1} {speed:>8.2}", row >> 10);
        }
    }
}

/// Microseconds of each path in each trial. Every trial runs every path once, in an order of its own.
fn measure(row: u64, selected: u64, trials: usize) -> Vec<[f64; PATHS.len()]> {
    let mut bench = Bench::open(row, selected);
    for path in 0..PATHS.len() {
        bench.packed.mapping().fill(0, row * selected, 1).expect("inside");
        bench.run(path);
        bench.check();
    }
    let mut order = [0, 1, 2, 3, 4];
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    (0..trials)
        .map(|_| {
            shuffle(&mut order, &mut random);
            let mut trial = [0.0; PATHS.len()];
            for path in order {
                let start = Instant::now();
                bench.run(path);
                trial[path] = start.elapsed().as_secs_f64() * 1e6;
            }
            trial
        })
        .collect()
}

fn shuffle(order: &mut [usize], random: &mut u64) {
    for last in (1..order.len()).rev() {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        order.swap(last, usize::try_from(*random % (last as u64 + 1)).expect("small"));
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
