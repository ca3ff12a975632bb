//! Layouts as workers offer them: parsed, placed, and held against each other and against looks at every payload.
#![no_main]

use std::ops::Range;

use libfuzzer_sys::fuzz_target;
use statecopy_kernels::layout::{CacheLayout, Placement, payloads_overlap, payloads_touch};
use statecopy_proto::DataType;

type Numbers = (u8, [u64; 4], [u64; 4], u64);

/// Payloads that are still looked at one by one.
const ROWS_MAX: u64 = 64;

fn place(numbers: &Numbers, region_bytes: u64) -> Option<Placement> {
    let (dtype, shape, strides, offset) = numbers;
    let dtype = DataType::ALL[usize::from(*dtype) % DataType::ALL.len()];
    let layout = CacheLayout::parse(dtype, shape, strides).ok()?;
    let placement = layout.place(*offset, region_bytes).ok()?;
    // The rules of the contract, in numbers that cannot overflow.
    let item = u128::from(dtype.item_bytes());
    let payload = shape[1..].iter().map(|size| u128::from(*size)).product::<u128>() * item;
    let stride = u128::from(strides[0]) * item;
    let span = u128::from(shape[0] - 1) * stride + payload;
    assert!(shape.iter().all(|size| *size > 0) && stride >= payload);
    assert!(u128::from(*offset) + span <= u128::from(region_bytes));
    assert!(u128::from(*offset).is_multiple_of(item));
    assert_eq!(u128::from(layout.payload_bytes()), payload);
    assert_eq!(u128::from(layout.span_bytes()), span);
    Some(placement)
}

/// Small numbers, so that layouts meet: a dense payload, and a gap.
fn small(numbers: &Numbers) -> Numbers {
    let (dtype, [rows, heads, values, keys], [gap, ..], offset) = *numbers;
    let shape = [1 + rows % 20, 1 + heads % 3, 1 + values % 3, 1 + keys % 3];
    let payload = shape[1] * shape[2] * shape[3];
    let strides = [payload + gap % 40, shape[2] * shape[3], shape[3], 1];
    (dtype, shape, strides, offset % 200)
}

fn payloads(placement: &Placement) -> impl Iterator<Item = Range<u64>> + '_ {
    let layout = placement.layout();
    (0..layout.rows()).map(move |row| {
        let start = placement.offset() + row * layout.page_stride_bytes();
        start..start + layout.payload_bytes()
    })
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

fuzz_target!(|input: (Numbers, Numbers, u64, (u64, u64))| {
    let (a, b, region_bytes, (start, bytes)) = input;
    for (a, b, region_bytes, bytes) in
        [(a, b, region_bytes, bytes), (small(&a), small(&b), 1 << 20, bytes % 64)]
    {
        let (Some(a), Some(b)) = (place(&a, region_bytes), place(&b, region_bytes)) else {
            continue;
        };
        let overlap = payloads_overlap(&a, &b);
        assert_eq!(overlap, payloads_overlap(&b, &a));
        let start = start % region_bytes.max(1);
        let range = start..start.saturating_add(bytes);
        let touch = payloads_touch(&a, range.clone());
        if a.layout().rows().max(b.layout().rows()) <= ROWS_MAX {
            assert_eq!(overlap, payloads(&a).any(|a| payloads(&b).any(|b| meet(&a, &b))));
            assert_eq!(touch, payloads(&a).any(|a| meet(&a, &range)));
        }
    }
});
