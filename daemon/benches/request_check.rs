//! What the executor's check of a request costs: `cargo bench -p statecopyd --features hostile --bench request_check`.
//!
//! It is in the path of every request, before a byte moves. It takes as long for many rows as for one: no index is looked at.

use std::hint::black_box;

use criterion::Criterion;
use statecopy_session::CopyDescriptor;
use statecopyd::device_process::hostile::{RequestCheck, Shape};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let checks = RequestCheck::new();
    let mut measure = |name: &str, descriptor: CopyDescriptor| {
        criterion.bench_function(&format!("request_check/{name}"), |bencher| {
            bencher.iter(|| checks.check(black_box(&descriptor)));
        });
    };
    let shape = |set, selected, shared| Shape { set, selected, shared };
    measure("a layer, 1 row, inline", checks.request(shape(false, 1, false)));
    measure("a layer, 12 rows, inline", checks.request(shape(false, 12, false)));
    measure("a layer, 12 rows, shared", checks.request(shape(false, 12, true)));
    measure("a set of two, 12 rows, shared", checks.request(shape(true, 12, true)));
    let valid = checks.request(shape(false, 1, false));
    let stale = CopyDescriptor { signature: valid.signature + 1, ..valid };
    measure("refused for its signature", stale);
    criterion.final_summary();
}
