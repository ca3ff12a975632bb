//! Random layouts, types, indices and flags against the reference.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use statecopy_proto::{DataType, Direction, IndexWidth};

use super::{Case, DeviceUnderTest, Inputs, cache, check};

/// Whatever the request, every byte of both regions is the reference's.
pub fn random_requests_agree_with_the_reference<T: DeviceUnderTest>(device: &T) {
    let config = Config { cases: 400, failure_persistence: None, ..Config::default() };
    let cases = (any_case(), prop::sample::select(Direction::ALL.to_vec()));
    TestRunner::new(config)
        .run(&cases, |(case, direction)| {
            let case = match direction {
                Direction::Gather => case,
                Direction::Scatter => case.with_unique_rows(),
            };
            check(device, direction, &case);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

prop_compose! {
    /// Interleaved layers in one page, at any base that the type allows.
    fn any_case()(
        dtype in prop::sample::select(DataType::ALL.to_vec()),
        rows in 1_u64..20,
        payload in prop_oneof![1_u64..80, 200_u64..2000],
        layers in 1_u64..4,
        gap in 0_u64..40,
        base in 0_u64..40,
        selected in 0_usize..40,
        wide in any::<bool>(),
        shared in any::<bool>(),
        flagged in any::<bool>(),
        rows_per_launch in prop_oneof![Just(u64::MAX), 1_u64..50],
    )(
        indices in vec(any_index(rows, wide), selected),
        flags in vec(prop_oneof![Just(0), any::<u8>()], selected),
        fixed in Just((dtype, rows, payload, layers, gap, base, wide, shared, flagged, rows_per_launch)),
    ) -> Case {
        let (dtype, rows, payload, layers, gap, base, wide, shared, flagged, rows_per_launch) = fixed;
        // Layers of one signature are a multiple of 16 bytes apart.
        let apart = (payload * dtype.item_bytes()).next_multiple_of(16) / dtype.item_bytes();
        let layout = cache(dtype, rows, payload, layers * apart + gap);
        let offset = |layer| (base + layer * apart) * dtype.item_bytes();
        Case {
            layout,
            offsets: (0..layers).map(offset).collect(),
            width: if wide { IndexWidth::Int64 } else { IndexWidth::Int32 },
            indices,
            flags: flagged.then_some(flags),
            inputs: if shared { Inputs::Shared } else { Inputs::Inline },
            rows_per_launch,
        }
    }
}

/// Mostly valid rows, and every kind of invalid one.
fn any_index(rows: u64, wide: bool) -> impl Strategy<Value = i64> {
    let rows = rows.cast_signed();
    let extremes = if wide {
        vec![i64::MIN, i64::MAX, 1 << 32, -(1 << 32)]
    } else {
        vec![i64::from(i32::MIN), i64::from(i32::MAX)]
    };
    prop_oneof![
        6 => 0..rows,
        1 => Just(-1),
        1 => Just(rows),
        1 => prop::sample::select(extremes),
    ]
}
