//! One launch of each variant of the host's kernels: `cargo bench -p statecopy-kernels --bench host_kernels`.
//!
//! Rows of 64 bytes show what a launch and a row cost without their bytes, rows of 24 KiB what a small copy costs.
//! `row_copy` compares large ones with memcpy.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput};
use statecopy_kernels::device::{
    Device as _, Flags, Indices, Launch, Launcher as _, Moved, Region as _, Slice,
};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{
    HostCaches, HostDevice, HostLauncher, HostOptions, HostRegion, HostVariants,
};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::{KernelClass, choose};
use statecopy_kernels::signature::Signature;
use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind};

/// Rows of the cache, and at most selected.
const ROWS: u64 = 128;
/// Bytes of a row, and how many are selected.
const REQUESTS: [(u64, usize); 3] = [(64, 1), (64, 128), (24 << 10, 8)];

struct Bound {
    launcher: HostLauncher,
    kind: PlanKind,
    variants: HostVariants,
    caches: HostCaches,
    packed: Arc<HostRegion>,
    row: u64,
}

impl Bound {
    /// A cache of that type whose pages are twice as long as its rows.
    fn open(dtype: DataType, row: u64) -> Self {
        let options = HostOptions::new(Arc::new(ServingGuard::new(false)));
        let device = HostDevice::open(options).expect("the host opens");
        let elements = row / dtype.item_bytes();
        let shape = [ROWS, 1, 1, elements];
        let layout = CacheLayout::with_page_stride(dtype, shape, 2 * elements).expect("valid");
        let cache = Arc::new(device.scratch(layout.span_bytes()).expect("memory"));
        let packed = Arc::new(device.scratch(row * ROWS).expect("memory"));
        let placement = layout.place(0, cache.bytes()).expect("it fits");
        let kind = choose(&device.description().fused, &layout);
        let signature = Signature::new(device.description().uuid, layout, 0);
        Self {
            launcher: device.launcher().expect("it launches"),
            kind,
            variants: device.compile(&KernelClass::of(kind, &signature)).expect("it compiles"),
            caches: device.bind(&[(cache, placement)]).expect("it is bound"),
            packed,
            row,
        }
    }

    fn launch(
        &mut self,
        direction: Direction,
        indices: Indices<'_, HostRegion>,
        rows: u64,
    ) -> Moved {
        let launch = Launch {
            kind: self.kind,
            variants: &self.variants,
            caches: &self.caches,
            direction,
            selected: rows,
            indices,
            flags: Flags::None,
            packed: Slice::new(&self.packed, 0, rows * self.row).expect("it fits"),
            part: 0..rows,
        };
        let ticket = self.launcher.launch(&launch).expect("it works");
        self.launcher.poll(ticket).expect("it works").expect("a launch is done when it returns")
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for (dtype, plan) in [(DataType::Float32, "fused"), (DataType::Float16, "byte_copy")] {
        for direction in Direction::ALL {
            for width in [IndexWidth::Int32, IndexWidth::Int64] {
                bench(&mut criterion, dtype, plan, direction, width);
            }
        }
    }
    criterion.final_summary();
}

fn bench(
    criterion: &mut Criterion,
    dtype: DataType,
    plan: &str,
    direction: Direction,
    width: IndexWidth,
) {
    let name = format!("{plan}/{}/int{}", direction.label(), width.bytes() * 8);
    let mut group = criterion.benchmark_group(name);
    for (row, selected) in REQUESTS {
        let rows = selected as u64;
        let mut bound = Bound::open(dtype, row);
        let narrow: Vec<i32> = (0..128).rev().take(selected).collect();
        let wide: Vec<i64> = narrow.iter().map(|index| i64::from(*index)).collect();
        group.throughput(Throughput::Bytes(rows * row));
        group.bench_function(BenchmarkId::new(format!("{row} bytes"), selected), |bencher| {
            bencher.iter(|| match width {
                IndexWidth::Int32 => {
                    bound.launch(direction, Indices::Int32(black_box(&narrow)), rows)
                }
                IndexWidth::Int64 => {
                    bound.launch(direction, Indices::Int64(black_box(&wide)), rows)
                }
            });
        });
    }
    group.finish();
}
