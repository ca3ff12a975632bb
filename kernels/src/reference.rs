//! The oracle of every device: the contract's gather and scatter as plain loops over byte slices.
//!
//! Written to be read beside the contract, not to be fast. Everything that a device does is compared with it.

use crate::device::Moved;
use crate::layout::Placement;

/// Gathers each layer's selected rows into `packed`, which is `[L, selected, H, V, K]` (contract: Gather).
///
/// `cache` is the region that holds every layer. Row `s` is copied where `0 <= indices[s] < N` and its flag is not zero;
/// no flags stand for every flag true. Any other row is cleared. INT32 indices are passed widened: their values are the same.
///
/// # Panics
/// When a slice has another size than the layers and indices say.
pub fn gather(
    cache: &[u8],
    layers: &[Placement],
    indices: &[i64],
    flags: Option<&[u8]>,
    packed: &mut [u8],
) -> Moved {
    let mut moved = Moved::default();
    let mut to = 0;
    for layer in layers {
        for (s, index) in indices.iter().enumerate() {
            let bytes = bytes_of(layer.layout().payload_bytes());
            let row = &mut packed[to..to + bytes];
            let wanted = flags.is_none_or(|flags| flags[s] != 0);
            match row_start(layer, *index) {
                Some(from) if wanted => {
                    row.copy_from_slice(&cache[from..from + bytes]);
                    moved.copied += 1;
                }
                _ => {
                    row.fill(0);
                    moved.masked += 1;
                }
            }
            to += bytes;
        }
    }
    assert_eq!(to, packed.len(), "Packed is [L, selected, H, V, K]");
    moved
}

/// Scatters `packed`, which is `[L, selected, H, V, K]`, into each layer's selected rows (contract: Scatter).
///
/// An invalid index is skipped. Flags describe the initial state only, so there are none here. Valid destinations are
/// unique: the caller's promise.
///
/// # Panics
/// When a slice has another size than the layers and indices say.
pub fn scatter(cache: &mut [u8], layers: &[Placement], indices: &[i64], packed: &[u8]) -> Moved {
    let mut moved = Moved::default();
    let mut from = 0;
    for layer in layers {
        for index in indices {
            let bytes = bytes_of(layer.layout().payload_bytes());
            match row_start(layer, *index) {
                Some(to) => {
                    cache[to..to + bytes].copy_from_slice(&packed[from..from + bytes]);
                    moved.copied += 1;
                }
                None => moved.masked += 1,
            }
            from += bytes;
        }
    }
    assert_eq!(from, packed.len(), "Packed is [L, selected, H, V, K]");
    moved
}

/// Where the payload of a row begins, when the index is valid.
fn row_start(layer: &Placement, index: i64) -> Option<usize> {
    let row = u64::try_from(index).ok().filter(|row| *row < layer.layout().rows())?;
    Some(bytes_of(layer.offset() + row * layer.layout().page_stride_bytes()))
}

fn bytes_of(count: u64) -> usize {
    usize::try_from(count).expect("A slice in memory is no longer than the address space")
}

#[cfg(test)]
mod tests {
    use statecopy_proto::DataType;

    use super::*;
    use crate::layout::CacheLayout;

    /// Two layers of three rows: payload 2 bytes, page stride 5, layer 1 two bytes into the page.
    fn layers() -> [Placement; 2] {
        let layout = CacheLayout::with_page_stride(DataType::UInt8, [3, 1, 1, 2], 5).unwrap();
        [layout.place(1, 15).unwrap(), layout.place(3, 15).unwrap()]
    }

    const CACHE: [u8; 15] = [90, 1, 2, 11, 12, 91, 3, 4, 13, 14, 92, 5, 6, 15, 16];

    #[test]
    fn gather_copies_valid_flagged_rows_and_clears_the_others() {
        let mut packed = [77; 24];
        let indices = [2, -1, 0, 3, 2, 1];
        let moved = gather(&CACHE, &layers(), &indices, Some(&[1, 1, 0, 1, 255, 2]), &mut packed);
        assert_eq!(
            packed,
            [
                5, 6, 0, 0, 0, 0, 0, 0, 5, 6, 3, 4, //
                15, 16, 0, 0, 0, 0, 0, 0, 15, 16, 13, 14,
            ]
        );
        assert_eq!(moved, Moved { copied: 6, masked: 6 });
    }

    #[test]
    fn gather_without_flags_copies_every_valid_row() {
        let mut packed = [77; 12];
        let moved = gather(&CACHE, &layers(), &[0, i64::MIN, 0], None, &mut packed);
        assert_eq!(packed, [1, 2, 0, 0, 1, 2, 11, 12, 0, 0, 11, 12]);
        assert_eq!(moved, Moved { copied: 4, masked: 2 });
    }

    #[test]
    fn scatter_writes_valid_rows_and_nothing_else() {
        let mut cache = CACHE;
        let packed = [21, 22, 23, 24, 25, 26, 31, 32, 33, 34, 35, 36];
        let moved = scatter(&mut cache, &layers(), &[2, i64::MAX, 0], &packed);
        assert_eq!(cache, [90, 25, 26, 35, 36, 91, 3, 4, 13, 14, 92, 21, 22, 31, 32]);
        assert_eq!(moved, Moved { copied: 4, masked: 2 });
    }

    #[test]
    fn nothing_selected_moves_nothing() {
        let mut cache = CACHE;
        assert_eq!(gather(&cache, &layers(), &[], None, &mut []), Moved::default());
        assert_eq!(scatter(&mut cache, &layers(), &[], &[]), Moved::default());
        assert_eq!(cache, CACHE);
    }
}
