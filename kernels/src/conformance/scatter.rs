//! Contract: Scatter.

use statecopy_proto::{DataType, Direction};

use super::{Case, DeviceUnderTest, Inputs, cache, check};

/// `cache[index[s]] = packed[s]` where the index is valid; an invalid index is skipped.
pub fn scatter_writes_valid_rows_and_skips_the_others<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::BFloat16, 6, 24, 41);
    check(device, Direction::Scatter, &Case::new(layout.clone(), &[4, 0, 2, 3, 1, 5]));
    check(device, Direction::Scatter, &Case::new(layout, &[-1, 5, 6, 7, 0, -2, 3]));
}

/// Flags describe the initial state only: they never suppress a final write.
pub fn scatter_ignores_flags<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 6, 24, 40);
    for inputs in [Inputs::Inline, Inputs::Shared] {
        for flags in [[0; 4], [1, 0, 255, 0], [1; 4]] {
            let mut case = Case::new(layout.clone(), &[5, -1, 0, 3]).flagged(&flags);
            case.inputs = inputs;
            check(device, Direction::Scatter, &case);
        }
    }
}

/// No valid index: the cache keeps every byte.
pub fn scatter_with_no_valid_row_writes_nothing<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 6, 24, 40);
    check(device, Direction::Scatter, &Case::new(layout, &[-1, 6, -7, i64::from(i32::MAX)]));
}
