//! How many rows a launch copies, where the host can tell.

use statecopy_proto::Direction;

use super::CudaDevice;
use crate::device::{Flags, Indices, Launch};

/// How many rows of a part are copied, where indices and flags are in private memory: the device decides by the same values.
pub(super) fn known_copied(launch: &Launch<'_, CudaDevice>) -> Option<u64> {
    let rows = launch.caches.layout().rows();
    let flags = match (launch.direction, &launch.flags) {
        (Direction::Scatter, _) | (Direction::Gather, Flags::None) => None,
        (Direction::Gather, Flags::Inline(private)) => Some(*private),
        (Direction::Gather, Flags::Shared(_)) => return None,
    };
    let wanted = |at: usize| flags.is_none_or(|flags| flags[at] != 0);
    let is_row = |index: i64| u64::try_from(index).is_ok_and(|row| row < rows);
    let part = (launch.part.start, launch.part.end);
    match launch.indices {
        Indices::Int32(indices) => Some(count_in_part(part, launch.selected, |at| {
            wanted(at) && is_row(indices[at].into())
        })),
        Indices::Int64(indices) => {
            Some(count_in_part(part, launch.selected, |at| wanted(at) && is_row(indices[at])))
        }
        Indices::Shared(..) => None,
    }
}

/// How many rows `r` of the part have `counts(r % selected)`. Looks at each selected row once, however many layers there are.
fn count_in_part((start, end): (u64, u64), selected: u64, counts: impl Fn(usize) -> bool) -> u64 {
    if start == end {
        return 0;
    }
    let (mut whole, mut before_start, mut before_end) = (0_u64, 0_u64, 0_u64);
    for (at, number) in (0..selected).enumerate() {
        let one = u64::from(counts(at));
        whole += one;
        before_start += if number < start % selected { one } else { 0 };
        before_end += if number < end % selected { one } else { 0 };
    }
    whole * (end / selected - start / selected) + before_end - before_start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_part_are_counted_as_one_by_one() {
        for selected in 1..7_u64 {
            for pattern in 0..1_u32 << selected {
                let counts = |at: usize| pattern >> at & 1 == 1;
                for start in 0..=3 * selected {
                    for end in start..=3 * selected {
                        let expected = (start..end)
                            .filter(|row| counts(usize::try_from(row % selected).unwrap()))
                            .count() as u64;
                        assert_eq!(count_in_part((start, end), selected, counts), expected);
                    }
                }
            }
        }
        assert_eq!(count_in_part((0, 0), 0, |_| true), 0);
    }
}
