//! Whether payloads of one region touch (contract: Cache; OVERLAP is decided by payload).
//!
//! The payloads of a placement are an arithmetic progression of intervals. Two progressions are compared in a number of
//! steps that grows with the logarithm of a stride, whatever the number of rows: layers of one region interleave by
//! the million, and a worker chooses every number here.

use std::ops::{Range, RangeInclusive};

use super::Placement;

/// Whether a payload byte of `a` is also one of `b`. Both lie in the same region.
///
/// Spans may interleave; only payloads count. Exact, and O(log stride).
#[must_use]
pub fn payloads_overlap(a: &Placement, b: &Placement) -> bool {
    let (a, b) = (Progression::of(a), Progression::of(b));
    // Payload i of `a` touches payload j of `b` when x(i) - j * b.stride lies in 0..=width, where x(i) = first + i * a.stride
    // is the distance from the start of `b` to the last byte of payload i, and the width is what both payloads cover.
    let first = a.start - b.start + a.payload - 1;
    let width = a.payload + b.payload - 2;
    let Some((from, to)) = a.rows_with(first, 0..=(b.rows - 1) * b.stride + width) else {
        return false;
    };
    if width >= b.stride - 1 {
        // No place between two payloads of `b` is wide enough for one of `a`.
        return true;
    }
    // Now every x(i) in that range has its j = x(i) / b.stride among the rows of `b`.
    let at = (first + from * a.stride).unsigned_abs() % b.stride.unsigned_abs();
    let (stride, width) = (b.stride.unsigned_abs(), width.unsigned_abs());
    if at <= width {
        return true;
    }
    first_multiple(a.stride.unsigned_abs() % stride, stride, stride - at, stride - at + width)
        .is_some_and(|rows_on| rows_on <= (to - from).unsigned_abs())
}

/// Whether a payload byte of `placement` lies in the byte range of the same region. O(1).
#[must_use]
pub fn payloads_touch(placement: &Placement, range: Range<u64>) -> bool {
    if range.is_empty() {
        return false;
    }
    let rows = Progression::of(placement);
    let (from, to) = (i128::from(range.start), i128::from(range.end));
    // The last byte of payload i, from the first byte of the range on.
    let first = rows.start + rows.payload - 1 - from;
    rows.rows_with(first, 0..=to - from + rows.payload - 2).is_some()
}

/// Payloads as intervals, in bytes. `i128` holds every sum and product of two checked 64-bit spans.
struct Progression {
    start: i128,
    stride: i128,
    payload: i128,
    rows: i128,
}

impl Progression {
    fn of(placement: &Placement) -> Self {
        Self {
            start: i128::from(placement.offset()),
            stride: i128::from(placement.layout().page_stride_bytes()),
            payload: i128::from(placement.layout().payload_bytes()),
            rows: i128::from(placement.layout().rows()),
        }
    }

    /// The first and the last row `i` for which `first + i * stride` lies in the range.
    fn rows_with(&self, first: i128, range: RangeInclusive<i128>) -> Option<(i128, i128)> {
        let above = range.start() - first;
        let from = if above <= 0 { 0 } else { (above - 1) / self.stride + 1 };
        let room = range.end() - first;
        if room < 0 {
            return None;
        }
        let to = (room / self.stride).min(self.rows - 1);
        (from <= to).then_some((from, to))
    }
}

/// The least `k` for which `k * step mod modulus` lies in `low..=high`, where `0 < low <= high < modulus <= 2^64`.
///
/// As in Euclid's algorithm: when no multiple of the step meets the interval before the first wrap, the number of wraps is
/// the answer to the same question modulo the step. The step is made at most half the modulus first, by mirroring,
/// so the modulus halves with each turn.
fn first_multiple(step: u128, modulus: u128, low: u128, high: u128) -> Option<u128> {
    if step == 0 {
        return None;
    }
    if step > modulus / 2 {
        return first_multiple_of_half(modulus - step, modulus, modulus - high, modulus - low);
    }
    first_multiple_of_half(step, modulus, low, high)
}

fn first_multiple_of_half(step: u128, modulus: u128, low: u128, high: u128) -> Option<u128> {
    let k = low.div_ceil(step);
    if k * step <= high {
        return Some(k);
    }
    // No multiple of the step lies in low..=high, so neither remainder is 0 and the smaller one is the first.
    let wraps = first_multiple((step - modulus % step) % step, step, low % step, high % step)?;
    Some((low + wraps * modulus).div_ceil(step))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use statecopy_proto::DataType;

    use super::*;
    use crate::layout::CacheLayout;

    fn place(offset: u64, rows: u64, stride: u64, payload: u64) -> Placement {
        let layout =
            CacheLayout::with_page_stride(DataType::UInt8, [rows, 1, 1, payload], stride).unwrap();
        layout.place(offset, u64::MAX).unwrap()
    }

    fn payloads(placement: &Placement) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..placement.layout().rows()).map(|row| {
            let start = placement.offset() + row * placement.layout().page_stride_bytes();
            start..start + placement.layout().payload_bytes()
        })
    }

    fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
        a.start.max(b.start) < a.end.min(b.end)
    }

    fn overlap_by_hand(a: &Placement, b: &Placement) -> bool {
        payloads(a).any(|a| payloads(b).any(|b| meet(&a, &b)))
    }

    prop_compose! {
        fn any_placement()(
            payload in 1_u64..12, gap in 0_u64..40, rows in 1_u64..24, offset in 0_u64..200,
        ) -> Placement {
            place(offset, rows, payload + gap, payload)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn overlap_is_what_a_look_at_every_byte_finds(a in any_placement(), b in any_placement()) {
            prop_assert_eq!(payloads_overlap(&a, &b), overlap_by_hand(&a, &b));
        }

        #[test]
        fn overlap_has_no_order(a in any_placement(), b in any_placement()) {
            prop_assert_eq!(payloads_overlap(&a, &b), payloads_overlap(&b, &a));
        }

        #[test]
        fn a_range_touches_what_a_look_at_every_byte_finds(
            a in any_placement(), start in 0_u64..1200, bytes in 0_u64..60,
        ) {
            let range = start..start + bytes;
            let by_hand = payloads(&a).any(|payload| meet(&payload, &range));
            prop_assert_eq!(payloads_touch(&a, range), by_hand);
        }

        #[test]
        fn the_first_multiple_is_the_one_that_counting_finds(
            modulus in 2_u128..400, step in 0_u128..400, low in 1_u128..400, width in 0_u128..400,
        ) {
            let (step, low) = (step % modulus, 1 + low % (modulus - 1));
            let high = (low + width).min(modulus - 1);
            let by_hand = (0..modulus).find(|k| (low..=high).contains(&(k * step % modulus)));
            prop_assert_eq!(first_multiple(step, modulus, low, high), by_hand);
        }
    }

    #[test]
    fn every_pair_of_small_placements_is_decided_exactly() {
        let small: Vec<Placement> = (1..4_u64)
            .flat_map(|payload| (payload..payload + 5).map(move |stride| (payload, stride)))
            .flat_map(|(payload, stride)| (1..5).map(move |rows| (payload, stride, rows)))
            .map(|(payload, stride, rows)| place(7, rows, stride, payload))
            .collect();
        for a in &small {
            for b in &small {
                for offset in 0..28 {
                    let b = b.layout().place(offset, u64::MAX).unwrap();
                    assert_eq!(payloads_overlap(a, &b), overlap_by_hand(a, &b), "{a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn interleaved_layers_of_one_page_do_not_overlap() {
        // Kimi K3 at TP8: a page of 5,308,416 elements is 27 payloads of 196,608.
        let layout =
            CacheLayout::with_page_stride(DataType::Float32, [4096, 12, 128, 128], 5_308_416)
                .unwrap();
        let layer = |at: u64| layout.place(at * layout.payload_bytes(), u64::MAX).unwrap();
        for at in 0..27 {
            assert!(!payloads_overlap(&layer(0), &layer(at)) || at == 0, "{at}");
        }
        // One element further and the last layer reaches into the next page's first.
        let moved = layout.place(26 * layout.payload_bytes() + 4, u64::MAX).unwrap();
        assert!(payloads_overlap(&layer(0), &moved));
        assert!(payloads_touch(&layer(1), 0..layout.payload_bytes() + 1));
        assert!(!payloads_touch(&layer(1), 0..layout.payload_bytes()));
    }

    #[test]
    fn rows_by_the_quintillion_are_decided_at_once() {
        let decided = |a: &Placement, b: &Placement| {
            let overlap = payloads_overlap(a, b);
            // The steps differ by the order; the answer does not.
            assert_eq!(payloads_overlap(b, a), overlap);
            overlap
        };
        // Even bytes and odd bytes, 2^62 rows each: no byte in common, until one of the offsets moves by one.
        let even = place(0, 1 << 62, 2, 1);
        assert!(!decided(&even, &place(1, 1 << 62, 2, 1)));
        assert!(decided(&even, &place(2, 1 << 62, 2, 1)));
        // Strides that meet only after about 2^31 rows: 2^32 and 2^32 - 1, started half a stride apart.
        let (wide, narrow) = (1_u64 << 32, (1_u64 << 32) - 1);
        let a = place(wide / 2, 1 << 31, wide, 1);
        assert!(decided(&a, &place(0, (1 << 31) + 1, narrow, 1)));
        assert!(!decided(&a, &place(0, 1 << 31, narrow, 1)));
        // Neighbouring numbers of Fibonacci: the longest way through Euclid's algorithm.
        let (f, g) = (7_540_113_804_746_346_429, 4_660_046_610_375_530_309);
        assert!(!decided(&place(1, 2, f, 1), &place(0, 3, g, 1)));
        assert!(decided(&place(f - g, 3, g, 1), &place(0, 2, f, 1)));
        // One row: the stride names no second row.
        assert!(!decided(&place(5, 1, u64::MAX, 1), &place(4, 1, 1, 1)));
    }

    #[test]
    fn an_empty_range_touches_nothing() {
        assert!(!payloads_touch(&place(0, 1 << 62, 2, 2), 4..4));
        assert!(payloads_touch(&place(0, 1 << 62, 2, 2), 4..5));
        assert!(!payloads_touch(&place(4, 3, 9, 2), 0..4));
        assert!(!payloads_touch(&place(4, 3, 9, 2), 24..u64::MAX));
        assert!(payloads_touch(&place(4, 3, 9, 2), 23..u64::MAX));
    }
}
