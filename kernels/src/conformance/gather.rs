//! Contract: Gather.

use statecopy_proto::{DataType, Direction};

use super::{Case, DeviceUnderTest, cache, check};

/// `packed[s] = cache[index[s]]` where the index is valid; no flags stand for every valid row.
pub fn gather_copies_every_valid_row_when_there_are_no_flags<T: DeviceUnderTest>(device: &T) {
    check(device, Direction::Gather, &Case::new(rows_of_five(), &[4, 0, 2, 3, 1]));
}

/// Otherwise all zero bytes: an index below 0, of `N`, or past it.
pub fn gather_clears_the_rows_of_invalid_indices<T: DeviceUnderTest>(device: &T) {
    check(device, Direction::Gather, &Case::new(rows_of_five(), &[-1, 4, 5, 6, 0, -2]));
    check(device, Direction::Gather, &Case::new(rows_of_five(), &[-1]));
}

/// A flag is one byte: zero is false, every other value is true. A true flag does not make an index valid.
pub fn gather_clears_rows_whose_flag_is_zero_and_takes_any_other_for_true<T: DeviceUnderTest>(
    device: &T,
) {
    let case = Case::new(rows_of_five(), &[0, 1, 2, 3, 4, 5, -1, 2]);
    check(device, Direction::Gather, &case.clone().flagged(&[0, 1, 2, 128, 255, 1, 1, 0]));
    check(device, Direction::Gather, &case.clone().flagged(&[0; 8]));
    check(device, Direction::Gather, &case.flagged(&[1; 8]));
    for flag in 0..=255 {
        check(device, Direction::Gather, &Case::new(rows_of_five(), &[3]).flagged(&[flag]));
    }
}

/// Packed is written whole, always, whatever it held; the margins around it keep their bytes, and the cache is not written.
pub fn gather_writes_packed_whole_and_nothing_beside_it<T: DeviceUnderTest>(device: &T) {
    for payload in [1, 3, 16, 64, 129, 1000] {
        let layout = cache(DataType::UInt8, 4, payload, payload + 5);
        check(device, Direction::Gather, &Case::new(layout, &[3, -1, 0]).flagged(&[1, 1, 0]));
    }
}

/// The same row may be selected many times.
pub fn gather_takes_the_same_row_many_times<T: DeviceUnderTest>(device: &T) {
    check(device, Direction::Gather, &Case::new(rows_of_five(), &[2; 100]));
    check(device, Direction::Gather, &Case::new(rows_of_five(), &[2, 0, 2, -1, 2, 0]));
}

fn rows_of_five() -> crate::layout::CacheLayout {
    cache(DataType::Float32, 5, 24, 40)
}
