//! Contract: Both, and what Cache and Plan ask of a copy.

use std::thread;

use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind};

use super::{Bench, Case, DeviceUnderTest, Inputs, assert_bytes, cache, check_both_ways, noise};
use crate::device::{Device as _, Moved};
use crate::layout::CacheLayout;
use crate::plan;
use crate::sync::{AtomicBool, Ordering};

/// Row 0 is copied like any other; nothing takes it for a null block.
pub fn row_zero_is_a_row_like_any_other<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 3, 24, 40);
    check_both_ways(device, &Case::new(layout.clone(), &[0]));
    check_both_ways(device, &Case::new(layout, &[1, 0, 2]).at(64));
}

/// A page of three payloads and 32 elements, at a storage offset: payload bytes move, padding never.
pub fn the_gap_between_payload_and_page_stride_keeps_its_bytes<T: DeviceUnderTest>(device: &T) {
    for dtype in [DataType::Float32, DataType::BFloat16, DataType::Float64, DataType::UInt8] {
        let layout = cache(dtype, 7, 40, 3 * 40 + 32);
        for offset in [0, 40, 160] {
            let case = Case::new(layout.clone(), &[6, 2, -1, 0, 7, 3]);
            check_both_ways(device, &case.at(offset));
        }
    }
}

/// Bits are copied, never computed: NaN payloads, infinities, -0.0, denormals.
pub fn every_bit_pattern_survives<T: DeviceUnderTest>(device: &T) {
    // Every upper half of a binary32, so every BF16 and every class of FP32: 65,536 elements of each.
    let halves = 0..=u16::MAX;
    let patterns: Vec<u8> =
        halves.clone().flat_map(|half| ((u32::from(half) << 16) | 0x0001).to_le_bytes()).collect();
    every_pattern(device, DataType::Float32, &patterns);
    let patterns: Vec<u8> = halves.flat_map(u16::to_le_bytes).collect();
    every_pattern(device, DataType::BFloat16, &patterns);
    every_pattern(device, DataType::Float16, &patterns);
}

fn every_pattern<T: DeviceUnderTest>(device: &T, dtype: DataType, patterns: &[u8]) {
    let elements = patterns.len() as u64 / dtype.item_bytes();
    let case = Case::new(cache(dtype, 2, elements, elements + 3), &[1, -1]);
    let bench = Bench::new(device, chosen(device, &case.layout), &case);
    let row = case.layout.page_stride_bytes();
    device.write(&bench.cache, row, patterns);
    assert_eq!(bench.run(Direction::Gather, &case), Moved { copied: 1, masked: 1 });
    let packed = bench.packed_bytes();
    let inner = &packed[bench.packed.inner()];
    assert_bytes(&inner[..patterns.len()], patterns, || format!("gathered {dtype}"));

    device.write(&bench.cache, row, &vec![0; patterns.len()]);
    assert_eq!(bench.run(Direction::Scatter, &case), Moved { copied: 1, masked: 1 });
    let cache = bench.contents(&bench.cache, case.layout.span_bytes());
    let from = usize::try_from(row).expect("a small test");
    assert_bytes(&cache[from..from + patterns.len()], patterns, || format!("scattered {dtype}"));
}

/// The kind that the device chooses for a layout.
fn chosen<T: DeviceUnderTest>(device: &T, layout: &CacheLayout) -> PlanKind {
    plan::choose(&device.device().description().fused, layout)
}

/// Every element type of 1, 2, 4 and 8 bytes.
pub fn every_data_type_is_copied<T: DeviceUnderTest>(device: &T) {
    for dtype in DataType::ALL {
        let case = Case::new(cache(dtype, 5, 33, 50), &[4, -1, 2, 5, 0]);
        check_both_ways(device, &case.flagged(&[1, 1, 0, 1, 9]));
    }
}

/// Base addresses mod 16 of every multiple of the item size, with payloads and page strides of every oddness.
pub fn every_base_alignment_and_odd_payload_is_exact<T: DeviceUnderTest>(device: &T) {
    for dtype in [DataType::UInt8, DataType::BFloat16, DataType::Float32, DataType::Float64] {
        for offset in (0..16).step_by(usize::try_from(dtype.item_bytes()).expect("1, 2, 4 or 8")) {
            for payload in [1, 2, 3, 5, 7, 15, 17, 31, 63, 65, 127, 257] {
                let layout = cache(dtype, 4, payload, payload + payload % 3);
                check_both_ways(device, &Case::new(layout, &[3, 1, -1, 0]).at(offset));
            }
        }
    }
}

/// The least and greatest values of each type are invalid, like every other value outside `0..N`.
pub fn the_extremes_of_both_index_types_are_merely_invalid<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 4, 24, 40);
    let narrow = [i32::MIN, i32::MAX, i32::MIN + 1, i32::MAX - 1, -1, 4, 3].map(i64::from);
    check_both_ways(device, &Case::new(layout.clone(), &narrow));
    let wide = [i64::MIN, i64::MAX, i64::MIN + 1, i64::MAX - 1, -1, 4, 3];
    check_both_ways(device, &Case::new(layout.clone(), &wide).wide(IndexWidth::Int64));
    check_both_ways(device, &Case::new(layout, &narrow).wide(IndexWidth::Int64));
}

/// An INT64 whose lower half is a valid row is no valid row, and no product wraps into one.
pub fn an_index_is_never_cut_to_fewer_bits<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 4, 24, 64);
    // 2^56 rows of 256 bytes are 2^64 bytes.
    let indices = [1 << 32, (1 << 32) | 2, 1 << 56, (1 << 56) | 1, i64::MIN | 3, -(1 << 32), 2];
    check_both_ways(device, &Case::new(layout, &indices).wide(IndexWidth::Int64));
}

/// Every count from 0 to well past a hundred, INT32 and INT64 in turn.
pub fn every_selected_count_from_zero_past_a_hundred_is_exact<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 150, 5, 9);
    for selected in 0..=140 {
        let indices: Vec<i64> = (0..selected).map(|s| (s * 37 + 11) % 152 - 1).collect();
        let width = IndexWidth::ALL[usize::from(selected % 2 == 1)];
        check_both_ways(device, &Case::new(layout.clone(), &indices).wide(width));
    }
}

/// Payloads around 8,192 elements, the block of the device that says its block.
pub fn payloads_below_at_and_above_a_block_are_exact<T: DeviceUnderTest>(device: &T) {
    for dtype in [DataType::Float32, DataType::BFloat16, DataType::UInt8] {
        for payload in [8191, 8192, 8193, 2 * 8192 - 1, 2 * 8192, 2 * 8192 + 1] {
            let layout = cache(dtype, 4, payload, payload + 7);
            let item = dtype.item_bytes();
            check_both_ways(device, &Case::new(layout, &[2, -1, 0, 3]).at(item));
        }
    }
}

/// Requests of many MiB: few rows of many bytes, many rows of few, and clears among them.
pub fn large_requests_are_exact<T: DeviceUnderTest>(device: &T) {
    const LARGE: u64 = 1 << 20;
    const HUGE: u64 = (16 << 20) + 1;
    for (payload, request) in [(4_099, LARGE), (65_536, HUGE), (HUGE / 2 + 1, HUGE)] {
        let selected = i64::try_from(request.div_ceil(payload)).expect("a small test");
        let layout = cache(DataType::UInt8, selected.cast_unsigned(), payload, payload + 13);
        let indices: Vec<i64> =
            (0..selected).map(|s| if s % 5 == 1 { -1 } else { selected - 1 - s }).collect();
        check_both_ways(device, &Case::new(layout, &indices).at(3));
    }
}

/// Indices and flags in shared memory mean what they mean inline.
pub fn indices_and_flags_may_lie_in_shared_memory<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 9, 24, 40);
    for width in IndexWidth::ALL {
        let mut case = Case::new(layout.clone(), &[8, 0, -1, 9, 3, 3, 5]).wide(width);
        case.inputs = Inputs::Shared;
        check_both_ways(device, &case);
        check_both_ways(device, &case.flagged(&[1, 0, 1, 1, 200, 0, 3]));
    }
}

/// A worker that changes a shared index under a launch gets one row or another, or a cleared one; never a mixture and
/// never memory outside its cache: the value that was checked is the value that is used.
pub fn a_shared_index_that_changes_is_one_row_or_another<T: DeviceUnderTest>(device: &T) {
    // Many indices, so that a second look at one would meet a change; and long rows.
    changing_indices(device, 1, 8192);
    changing_indices(device, 4096, 64);
}

fn changing_indices<T: DeviceUnderTest>(device: &T, payload: usize, selected: usize) {
    const LAUNCHES: usize = 60;
    const PAGE: u64 = 4096;
    let layout = cache(DataType::UInt8, 3, payload as u64, PAGE);
    let mut case = Case::new(layout, &vec![0; selected]);
    case.inputs = Inputs::Shared;
    let bench = Bench::new(device, PlanKind::ByteCopy, &case);
    for row in 0..3_u8 {
        device.write(&bench.cache, u64::from(row) * PAGE, &vec![row + 1; payload]);
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // An index that was not checked leads far outside every mapping.
            for value in [0, i32::MAX, 1, i32::MIN, 2, -1, 0, i32::MAX / 2].into_iter().cycle() {
                device.write(bench.inputs(), 0, &value.to_ne_bytes().repeat(selected));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let _stop = StopAtEnd(&stop);
        for _ in 0..LAUNCHES {
            let moved = bench.run(Direction::Gather, &case);
            assert_eq!(moved.copied + moved.masked, selected as u64);
            let packed = bench.packed_bytes();
            let mut copied = 0;
            for row in packed[bench.packed.inner()].chunks(payload) {
                assert!(row[0] <= 3 && row.iter().all(|byte| *byte == row[0]), "a mixed row");
                copied += u64::from(row[0] != 0);
            }
            assert_eq!(copied, moved.copied, "a row is cleared or copied as it was counted");
        }
    });
}

/// Ends the writing thread even when an assertion unwinds, so that a failure is no hang.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A page stride past 4 GiB with INT32 indices: addresses are computed in 64 bits.
pub fn pages_more_than_4_gib_apart_are_reached_by_int32_indices<T: DeviceUnderTest>(device: &T) {
    // 2^30 elements and a few: 4 GiB and a bit, so that a cut product lands on another row's bytes.
    far_rows(device, 4, (1 << 30) + 64, &[3, 0, 2, -1, 1]);
}

/// Rows that begin past 2^31 and 2^32 bytes, at a page stride that fits 32 bits.
pub fn rows_past_2_to_the_31_bytes_are_reached<T: DeviceUnderTest>(device: &T) {
    // 64 MiB apart: row 32 begins at 2 GiB, row 64 at 4 GiB.
    far_rows(device, 70, 1 << 24, &[31, 32, 33, 63, 64, 65, 69, 70]);
}

fn far_rows<T: DeviceUnderTest>(device: &T, rows: u64, page_stride: u64, indices: &[i64]) {
    const PAYLOAD: u64 = 100;
    let layout = cache(DataType::Float32, rows, PAYLOAD, page_stride);
    let bytes = layout.payload_bytes();
    for kind in [chosen(device, &layout), PlanKind::ByteCopy] {
        let case = Case::new(layout.clone(), indices);
        let bench = Bench::new(device, kind, &case);
        let at = |row: u64| row * layout.page_stride_bytes();
        let valid = |index: i64| u64::try_from(index).ok().filter(|row| *row < rows);
        let state = |row: u64| noise(bytes, row + 10);
        for row in indices.iter().filter_map(|index| valid(*index)) {
            device.write(&bench.cache, at(row), &state(row));
        }
        let _moved = bench.run(Direction::Gather, &case);
        let packed = bench.packed_bytes();
        let gathered = packed[bench.packed.inner()].chunks(400);
        for (index, row) in indices.iter().zip(gathered) {
            let expected = valid(*index).map_or_else(|| vec![0; 400], state);
            assert_bytes(row, &expected, || format!("row {index} gathered"));
        }

        for row in indices.iter().filter_map(|index| valid(*index)) {
            device.write(&bench.cache, at(row), &[0x5A; 408]);
        }
        let _moved = bench.run(Direction::Scatter, &case);
        for row in indices.iter().filter_map(|index| valid(*index)) {
            let mut written = vec![0; 408];
            device.read(&bench.cache, at(row), &mut written);
            assert_bytes(&written[..400], &state(row), || format!("row {row} scattered"));
            assert_eq!(written[400..], [0x5A; 8], "the gap behind row {row}");
        }
    }
}
