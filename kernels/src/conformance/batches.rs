//! Contract: Both, about batches and bounded launches; Cache, about layers that interleave.

use statecopy_proto::{DataType, IndexWidth};

use super::{Case, DeviceUnderTest, cache, check_both_ways};

/// One request names several layers of one signature: the same indices and flags, packed `[L, selected, H, V, K]`.
pub fn a_batch_moves_the_same_rows_of_every_layer<T: DeviceUnderTest>(device: &T) {
    for layers in [1, 2, 3, 69] {
        for width in IndexWidth::ALL {
            let layout = cache(DataType::Float32, 6, 20, 28);
            let span = layout.span_bytes().next_multiple_of(16);
            let mut case = Case::new(layout, &[5, -1, 0, 6, 2]).wide(width);
            case.offsets = (0..layers).map(|layer| 4 + layer * span).collect();
            check_both_ways(device, &case);
            check_both_ways(device, &case.flagged(&[1, 1, 0, 1, 77]));
        }
    }
}

/// Layers of one region share each page, as Kimi K3's do: the gaps of one are the live state of the others.
pub fn interleaved_layers_of_one_page_keep_apart<T: DeviceUnderTest>(device: &T) {
    let (layers, payload) = (27, 24);
    let layout = cache(DataType::Float32, 5, payload, layers * payload);
    let mut case = Case::new(layout.clone(), &[4, 0, -1, 2]);
    // Some of them, so that the others' payloads are canaries; in no order.
    case.offsets = [3, 26, 0, 1, 14].map(|layer| layer * layout.payload_bytes()).into();
    check_both_ways(device, &case);
}

/// A request that is moved in bounded launches, parts of rows that cross layers, is the same request.
pub fn bounded_launches_move_what_one_launch_moves<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::BFloat16, 9, 20, 23);
    let span = layout.span_bytes().next_multiple_of(16);
    let mut case = Case::new(layout, &[8, 0, -1, 5, 9, 3, 1]).flagged(&[1, 0, 1, 1, 1, 2, 1]);
    case.offsets = (0..4).map(|layer| 2 + layer * span).collect();
    for rows_per_launch in [1, 2, 3, 5, 7, 8, 27, 28, 1000] {
        case.rows_per_launch = rows_per_launch;
        check_both_ways(device, &case);
    }
}
