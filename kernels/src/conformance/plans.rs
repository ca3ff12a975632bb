//! Contract: Plan and Batch, as far as a device shows them.

use std::sync::Arc;

use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind, RefusalCode};

use super::{Case, DeviceUnderTest, cache, check, check_both_ways, outcome};
use crate::device::{Device, Flags, Indices, Launch, Launcher as _, Region as _, Slice};
use crate::plan::{self, KernelClass, Variant};
use crate::signature::Signature;

/// Prepare runs each variant on a one-row scratch of the cache's alignment class, and waits for it.
pub fn one_row_scratch_runs_every_variant<T: DeviceUnderTest>(under_test: &T) {
    let device = under_test.device();
    for (dtype, base) in [(DataType::Float32, 4), (DataType::BFloat16, 2), (DataType::Int8, 7)] {
        let layout = cache(dtype, 1, 33, 33);
        let bytes = layout.payload_bytes();
        let packed_at = (base + bytes).next_multiple_of(16);
        let scratch = Arc::new(device.scratch(packed_at + bytes).expect("scratch is small"));
        let signature = Signature::new(device.description().uuid, layout.clone(), base);
        let kind = plan::choose(&device.description().fused, &layout);
        let variants = device.compile(&KernelClass::of(kind, &signature)).expect("it compiles");
        let placement = layout.place(base, scratch.bytes()).expect("the scratch holds it");
        let caches = device.bind(&[(Arc::clone(&scratch), placement)]).expect("it is bound");
        let mut launcher = device.trial_launcher().expect("the device launches");
        let mut served = Vec::new();
        for direction in Direction::ALL {
            for width in IndexWidth::ALL {
                let launch = Launch {
                    kind,
                    variants: &variants,
                    caches: &caches,
                    direction,
                    selected: 1,
                    indices: Indices::first_row(width),
                    flags: Flags::None,
                    packed: Slice::new(&scratch, packed_at, bytes).expect("packed fits"),
                    part: 0..1,
                };
                served.push(launch.variant());
                let ticket = launcher.launch(&launch).expect("the device works");
                let moved = outcome::<T::Device>(&mut launcher, ticket);
                assert_eq!((moved.copied, moved.masked), (1, 0));
            }
        }
        served.dedup();
        assert_eq!(served, Variant::of(kind), "every variant ran");
    }
}

/// Rows, page stride and base are launch arguments: layers of one class share one table, whatever their number of rows.
pub fn a_table_serves_every_cache_of_its_class<T: DeviceUnderTest>(device: &T) {
    for (rows, page_stride, offset) in [(1, 24, 0), (2, 24, 16), (9, 100, 64), (40, 31, 1024)] {
        let layout = cache(DataType::Float32, rows, 24, page_stride);
        let last = i64::try_from(rows).expect("a small test") - 1;
        check_both_ways(device, &Case::new(layout, &[last, 0, last + 1]).at(offset));
    }
}

/// Selecting nothing launches nothing, and moves nothing.
pub fn a_launch_of_nothing_moves_nothing<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 3, 24, 40);
    for width in IndexWidth::ALL {
        for direction in Direction::ALL {
            let case = Case::new(layout.clone(), &[]).wide(width);
            check(device, direction, &case);
            check(device, direction, &case.flagged(&[]));
        }
    }
}

/// A binding set of unequal layers is SIGNATURE_MISMATCH: another layout, or another base address mod 16.
pub fn layers_of_two_signatures_are_no_binding_set<T: DeviceUnderTest>(device: &T) {
    let region = device.allocate(1 << 16);
    let layout = cache(DataType::Float32, 3, 24, 40);
    let refused = |layers: &[(crate::layout::CacheLayout, u64)]| {
        let bound: Vec<_> = layers
            .iter()
            .map(|(layout, offset)| {
                (Arc::clone(&region), layout.place(*offset, 1 << 16).expect("it fits"))
            })
            .collect();
        device.device().bind(&bound).map(|_| ()).map_err(|refusal| refusal.code())
    };
    let first = (layout.clone(), 0);
    assert_eq!(refused(&[first.clone(), (layout.clone(), 4096)]), Ok(()));
    for other in [
        (cache(DataType::Int32, 3, 24, 40), 4096),
        (cache(DataType::Float32, 4, 24, 40), 4096),
        (cache(DataType::Float32, 3, 24, 41), 4096),
        (layout, 4096 + 4),
    ] {
        let code = refused(&[first.clone(), other.clone()]);
        assert_eq!(code, Err(RefusalCode::SignatureMismatch), "{other:?}");
    }
    assert_eq!(refused(&[]), Err(RefusalCode::SignatureMismatch));
}

/// A placement is checked against the region that it is bound to, not the one that it was made for.
pub fn a_layer_past_its_region_is_not_bound<T: DeviceUnderTest>(device: &T) {
    let layout = cache(DataType::Float32, 3, 24, 40);
    let region = device.allocate(layout.span_bytes() + 16);
    let last = region.bytes() - layout.span_bytes();
    let bind = |offset| {
        let placement = layout.place(offset, 1 << 30).expect("it fits that region");
        let layers = [(Arc::clone(&region), placement)];
        device.device().bind(&layers).map(|_| ()).map_err(|refusal| refusal.code())
    };
    assert_eq!(bind(last), Ok(()));
    assert_eq!(bind(last + 4), Err(RefusalCode::OutOfRegion));
}

/// An allocation has one identity; two have two.
pub fn regions_of_one_memory_have_one_allocation<T: DeviceUnderTest>(device: &T) {
    let (one, two) = (device.allocate(4096), device.allocate(4096));
    assert_eq!(one.allocation(), one.allocation());
    assert_ne!(one.allocation(), two.allocation());
}

/// Nothing drifts by itself between prepare and seal.
pub fn the_configuration_stays_the_same<T: DeviceUnderTest>(device: &T) {
    let device = device.device();
    let before = device.configuration();
    assert!(!before.entries.is_empty());
    assert!(before.entries.is_sorted());
    let class = KernelClass {
        kind: PlanKind::ByteCopy,
        dtype: DataType::Int8,
        payload_bytes: 64,
        base_mod_16: 0,
    };
    let _variants = device.compile(&class).expect("it compiles");
    assert_eq!(before.drift(&device.configuration()), Vec::<String>::new());
}
