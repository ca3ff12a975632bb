//! What registering a layer costs in checks: `cargo bench -p statecopy-kernels --bench checks`.
//!
//! None of it is in the path of a request; a registration of Kimi K3 does each 69 times, and overlap for every pair.

use std::hint::black_box;

use criterion::Criterion;
use statecopy_kernels::layout::{CacheLayout, Placement, payloads_overlap, payloads_touch};
use statecopy_kernels::signature::{DeviceUuid, Signature};
use statecopy_proto::DataType;

/// Kimi K3 at TP8: 12x128x128 FP32 in pages of 27 states.
const SHAPE: [u64; 4] = [4096, 12, 128, 128];
const PAGE_STRIDE: u64 = 5_308_416;
const STRIDES: [u64; 4] = [PAGE_STRIDE, 16_384, 128, 1];
const STATE_BYTES: u64 = 12 * 128 * 128 * 4;

fn layout() -> CacheLayout {
    CacheLayout::parse(DataType::Float32, &SHAPE, &STRIDES).expect("a valid layout")
}

/// Layers side by side in the pages of one region.
fn placed(layer: u64) -> Placement {
    let region_bytes = SHAPE[0] * PAGE_STRIDE * 4;
    layout().place(layer * STATE_BYTES, region_bytes).expect("it fits")
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("CacheLayout::parse", |bencher| {
        bencher
            .iter(|| CacheLayout::parse(DataType::Float32, black_box(&SHAPE), black_box(&STRIDES)));
    });

    let (first, neighbour) = (placed(0), placed(1));
    criterion.bench_function("payloads_overlap/neighbours of 4096 pages", |bencher| {
        bencher.iter(|| payloads_overlap(black_box(&first), black_box(&neighbour)));
    });
    let row = 1000 * PAGE_STRIDE * 4 + STATE_BYTES;
    criterion.bench_function("payloads_touch/a range in a gap", |bencher| {
        bencher.iter(|| payloads_touch(black_box(&first), black_box(row..row + 4096)));
    });

    let signature = Signature::new(DeviceUuid([7; 16]), layout(), 0);
    criterion.bench_function("Signature::hash", |bencher| {
        bencher.iter(|| black_box(&signature).hash());
    });
    criterion.final_summary();
}
