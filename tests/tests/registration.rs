//! Layers: what is published, and what is refused before anything is.
#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::register_layers_event::Event as RegisterEvent;
use statecopy_proto::v1::registration_progress::Stage;
use statecopy_proto::v1::{self, BindingSetSpec, LayerSpec};
use statecopy_proto::{DataType, Direction, RefusalCode};
use statecopy_tests::{
    Daemon, Footprint, Indices, Rig, Session, Shared, layer_spec, random_bytes, until, wire_layout,
};

/// Rows, heads, values and keys of a small state.
const SHAPE: [u64; 4] = [6, 2, 4, 16];
/// Its elements.
const PAYLOAD: u64 = 2 * 4 * 16;
/// Elements from one row to the next.
const PAGE: u64 = 3 * PAYLOAD + 32;

fn padded(dtype: DataType) -> CacheLayout {
    CacheLayout::with_page_stride(dtype, SHAPE, PAGE).unwrap()
}

fn spec(name: &str, region_id: u64) -> LayerSpec {
    let placement = padded(DataType::Float32).place(0, 1 << 20).unwrap();
    LayerSpec { name: name.to_owned(), ..layer_spec(0, &placement, region_id, 8) }
}

/// Gathers and scatters a few rows of every layer, valid and invalid ones, with both widths.
fn exercise(rig: &mut Rig) {
    let rows = rig.layers[0].placement.layout().rows().cast_signed();
    for layer in 0..rig.layers.len() {
        let values = vec![rows - 1, -1, 0, rows, 1];
        let narrow = values.iter().map(|value| i32::try_from(*value).unwrap()).collect();
        for indices in [Indices::Int32(narrow), Indices::Int64(values)] {
            rig.copy(Direction::Gather, layer, &indices, Some(&[1, 1, 0, 1, 255])).unwrap();
            rig.compute(layer as u64);
            rig.copy(Direction::Scatter, layer, &indices, Some(&[0, 0, 0, 0, 0])).unwrap();
        }
    }
}

#[test]
fn payload_bytes_move_and_padding_never_does_for_every_data_type() {
    let daemon = Daemon::start();
    for dtype in DataType::ALL {
        // Behind a storage offset; the page holds the payloads of three layers, so that they interleave.
        let item = dtype.item_bytes();
        let layout = padded(dtype);
        let offsets = [48 * item, (48 + PAYLOAD) * item, (48 + 2 * PAYLOAD) * item];
        let mut rig = Rig::new(daemon.wire(), &offsets.map(|offset| (layout.clone(), offset)), 8);
        exercise(&mut rig);
        let plan = match dtype {
            DataType::Float32 | DataType::BFloat16 => v1::PlanKind::Fused,
            _ => v1::PlanKind::ByteCopy,
        };
        for layer in &rig.layers {
            assert_eq!(layer.published.plan(), plan, "{dtype}");
        }
    }
}

#[test]
fn every_base_address_class_and_odd_payloads_are_exact() {
    let daemon = Daemon::start();
    let dtypes = [
        DataType::UInt8,
        DataType::BFloat16,
        DataType::Float16,
        DataType::Float32,
        DataType::Int64,
    ];
    for dtype in dtypes {
        let item = dtype.item_bytes();
        let layout = CacheLayout::with_page_stride(dtype, [5, 3, 5, 7], 3 * 5 * 7 + 1).unwrap();
        let apart = (layout.span_bytes() + 16).next_multiple_of(16);
        let layers: Vec<_> =
            (0..16 / item).map(|class| (layout.clone(), class * (apart + item))).collect();
        let mut rig = Rig::new(daemon.wire(), &layers, 8);
        exercise(&mut rig);
        let mut signatures: Vec<u64> =
            rig.layers.iter().map(|layer| layer.published.signature).collect();
        signatures.sort_unstable();
        signatures.dedup();
        let classes = 16 / item;
        assert_eq!(signatures.len() as u64, classes, "each class is a signature of its own");
    }
}

/// Layers that each break one rule of a cache's layout, in a region that the good one fills to its last byte.
fn broken_layers(region: u64) -> Vec<(&'static str, LayerSpec)> {
    let good = wire_layout(&padded(DataType::Float32));
    let with = |change: &dyn Fn(&mut LayerSpec)| {
        let mut layer = spec("model.layers.7.linear_attn", region);
        change(&mut layer);
        layer
    };
    let shaped = |shape: &[u64], strides: &[u64]| {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        let layout = v1::CacheLayout { shape, strides, ..good.clone() };
        with(&|layer| layer.layout = Some(layout.clone()))
    };
    let typed = |dtype: i32| {
        let layout = v1::CacheLayout { dtype, ..good.clone() };
        with(&|layer| layer.layout = Some(layout.clone()))
    };
    let huge = 1 << 62;
    vec![
        ("a span one item past the region", with(&|layer| layer.offset_bytes = 4)),
        ("a base past the region", with(&|layer| layer.offset_bytes = u64::MAX - 3)),
        ("a base that is no multiple of the item", with(&|layer| layer.offset_bytes = 2)),
        ("page stride 0", shaped(&SHAPE, &[0, 64, 16, 1])),
        ("overlapping pages", shaped(&SHAPE, &[PAYLOAD - 1, 64, 16, 1])),
        ("a span past u64", shaped(&[u64::MAX, 2, 4, 16], &[PAGE, 64, 16, 1])),
        ("a payload past u64", shaped(&[1, huge, huge, 16], &[huge, huge, 16, 1])),
        ("a page stride past u64", shaped(&SHAPE, &[u64::MAX, 64, 16, 1])),
        ("no rows", shaped(&[0, 2, 4, 16], &[PAGE, 64, 16, 1])),
        ("an axis of size 0", shaped(&[6, 2, 0, 16], &[PAGE, 64, 16, 1])),
        ("a payload that is not dense", shaped(&SHAPE, &[PAGE, 64, 17, 1])),
        ("three axes", shaped(&[6, 8, 16], &[PAGE, 16, 1])),
        ("five strides", shaped(&SHAPE, &[PAGE, 64, 16, 1, 1])),
        ("no layout", with(&|layer| layer.layout = None)),
        ("no data type", typed(0)),
        ("an unknown data type", typed(77)),
        ("max_selected 0", with(&|layer| layer.max_selected = 0)),
    ]
}

#[test]
fn a_layout_that_breaks_a_rule_is_refused_and_nothing_is_mapped() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let span = padded(DataType::Float32).span_bytes();
    let exact = Shared::new(vec![0; usize::try_from(span).unwrap()]);
    let region = session.share(&exact);
    let before = Footprint::of(daemon.device_process());
    for (what, layer) in broken_layers(region) {
        let refusal = session.register_layers(vec![layer], Vec::new()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::LayoutInvalid, "{what}: {refusal}");
        assert_eq!(refusal.subject(), "model.layers.7.linear_attn", "{what}: {refusal}");
    }
    let status = daemon.inspect();
    assert!(status.sessions[0].layers.is_empty(), "{status:?}");
    assert!(status.devices[0].plans.is_empty(), "{status:?}");
    assert_eq!(Footprint::of(daemon.device_process()).mapped_bytes, before.mapped_bytes);
    exact.check("after refused registrations");
    // The same layer, without the fault, is served.
    session.register_layers(vec![spec("model.layers.7.linear_attn", region)], Vec::new()).unwrap();
}

#[test]
fn a_layout_that_is_correct_but_unusual_is_served() {
    let daemon = Daemon::start();
    // An axis of size 1 may have any stride; the only row may have a page stride far past the region.
    let single = CacheLayout::parse(DataType::Float32, &[1, 1, 4, 16], &[1 << 40, 7, 16, 1]);
    let mut rig = Rig::new(daemon.wire(), &[(single.unwrap(), 32)], 4);
    rig.copy(Direction::Gather, 0, &Indices::Int64(vec![0, 1, 0]), None).unwrap();
    rig.compute(3);
    rig.copy(Direction::Scatter, 0, &Indices::Int32(vec![-1, 0]), None).unwrap();
}

#[test]
fn one_bad_layer_of_sixty_nine_publishes_nothing_and_withdraws_what_was_published() {
    let daemon = Daemon::start();
    let layout = padded(DataType::Float32);
    let apart = layout.span_bytes().next_multiple_of(16);
    let layers: Vec<_> = (0..69).map(|at| (layout.clone(), at * apart)).collect();
    let mut rig = Rig::new(daemon.wire(), &layers, 4);
    rig.copy_all(Direction::Gather, &Indices::Int32(vec![3, -1]), None).unwrap();
    let mut specs = rig.specs(4);
    specs[41].layout.as_mut().unwrap().strides[0] = 1;

    let refusal = rig.session.register_layers(specs.clone(), Vec::new()).unwrap_err();

    assert_eq!(refusal.code(), RefusalCode::LayoutInvalid);
    assert_eq!(refusal.subject(), specs[41].name);
    assert!(refusal.sentence().contains(&specs[41].name), "{refusal}");
    assert!(refusal.sentence().contains("stride(0) is 1"), "names the value: {refusal}");
    assert!(daemon.inspect().sessions[0].layers.is_empty());
    until("the plans of withdrawn layers go", || daemon.inspect().devices[0].plans.is_empty());
    let refusal = rig.copy(Direction::Scatter, 0, &Indices::Int32(vec![2]), None).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::NotSealed, "{refusal}");

    specs[41].layout.as_mut().unwrap().strides[0] = layout.strides()[0];
    let published = rig.session.register_layers(specs, Vec::new()).unwrap();
    assert_eq!(published.bindings.len(), 69);
    // A plan of the earlier registration stays refused.
    let refusal = rig.copy(Direction::Scatter, 0, &Indices::Int32(vec![2]), None).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::StalePlan, "{refusal}");
}

#[test]
fn names_regions_and_limits_of_a_registration_are_checked() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 20]);
    let region = session.share(&memory);
    let good = spec("a", region);
    let cases = [
        ("no layers", vec![], RefusalCode::LayoutInvalid),
        ("a name twice", vec![good.clone(), good.clone()], RefusalCode::LayoutInvalid),
        ("an empty name", vec![spec("", region)], RefusalCode::LayoutInvalid),
        ("a long name", vec![spec(&"x".repeat(257), region)], RefusalCode::LayoutInvalid),
        ("memory twice", vec![good.clone(), spec("b", region)], RefusalCode::Overlap),
        ("an unknown region", vec![spec("a", region + 9)], RefusalCode::RegionUnknown),
        (
            "another signature",
            vec![LayerSpec { signature: 5, ..good.clone() }],
            RefusalCode::SignatureMismatch,
        ),
        (
            "more rows than the limit",
            vec![LayerSpec { max_selected: 1 << 40, ..good.clone() }],
            RefusalCode::QuotaExceeded,
        ),
    ];
    for (what, layers, code) in cases {
        let refusal = session.register_layers(layers, Vec::new()).unwrap_err();
        assert_eq!(refusal.code(), code, "{what}: {refusal}");
        assert!(daemon.inspect().sessions[0].layers.is_empty(), "{what}");
    }
    session.register_layers(vec![good], Vec::new()).unwrap();
}

#[test]
fn a_set_has_different_layers_of_one_signature() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 20]);
    let region = session.share(&memory);
    let at = |name: &str, offset_bytes| LayerSpec { offset_bytes, ..spec(name, region) };
    let layers = vec![at("a", 0), at("b", 1 << 16), at("c", (1 << 17) + 4)];
    let set = |layers: &[&str]| BindingSetSpec {
        name: "some".to_owned(),
        layers: layers.iter().map(|name| (*name).to_owned()).collect(),
    };
    let cases = [
        ("a stranger", set(&["a", "z"]), RefusalCode::LayoutInvalid),
        ("no layer", set(&[]), RefusalCode::LayoutInvalid),
        ("a layer twice", set(&["a", "a"]), RefusalCode::Overlap),
        ("another alignment class", set(&["a", "c"]), RefusalCode::SignatureMismatch),
    ];
    for (what, set, code) in cases {
        let refusal = session.register_layers(layers.clone(), vec![set]).unwrap_err();
        assert_eq!(refusal.code(), code, "{what}: {refusal}");
        assert!(daemon.inspect().sessions[0].layers.is_empty(), "{what}");
    }
    let published = session.register_layers(layers, vec![set(&["b", "a"])]).unwrap();
    assert_eq!((published.bindings.len(), published.sets[0].layers), (3, 2));
}

#[test]
fn a_registration_tells_how_far_it_is() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 20]);
    let region = session.share(&memory);
    let layers = (0..5)
        .map(|at| LayerSpec { offset_bytes: at << 16, ..spec(&format!("layer {at}"), region) })
        .collect();
    let sets = Vec::new();
    let request = v1::RegisterLayersRequest { session: session.reference(), layers, sets };
    let wire = session.wire();
    let mut stream = wire.ask(wire.registry().register_layers(request)).unwrap();
    let mut stages = Vec::new();
    let mut last = None;
    while let Some(message) = session.next(&mut stream).unwrap() {
        assert_eq!(message.incarnation, session.opened.incarnation);
        if let Some(RegisterEvent::Progress(progress)) = &message.event {
            assert_eq!(progress.layers_total, 5);
            assert!(progress.layers_done <= 5);
            stages.push(progress.stage());
        }
        last = message.event;
    }
    assert!(matches!(last, Some(RegisterEvent::Published(_))), "{last:?}");
    stages.dedup();
    assert_eq!(stages, [Stage::Preparing, Stage::Sealing, Stage::Publishing]);
}

#[test]
fn workers_with_equal_layouts_share_one_table_and_keep_their_own_bindings() {
    let daemon = Daemon::start();
    let layout = padded(DataType::BFloat16);
    let mut one = Rig::new(daemon.wire(), &[(layout.clone(), 0), (layout.clone(), 1 << 16)], 4);
    let mut other = Rig::new(&daemon.connect(), &[(layout, 64)], 6);

    let plans = daemon.inspect().devices[0].plans.clone();
    assert_eq!(plans.len(), 1, "{plans:?}");
    assert_eq!(plans[0].signature, one.layers[0].published.signature);
    assert_eq!(plans[0].state, "published");
    assert!(plans[0].bindings >= 3, "{plans:?}");
    let mut variants: Vec<&str> = plans[0].variants.iter().map(|one| one.name.as_str()).collect();
    variants.sort_unstable();
    assert_eq!(variants, ["gather/int32", "gather/int64", "scatter/int32", "scatter/int64"]);

    for rig in [&mut one, &mut other] {
        rig.compute(9);
        rig.copy(Direction::Scatter, 0, &Indices::Int32(vec![2, 0]), None).unwrap();
    }
    one.check("after the other worker's copy");
    // max_selected belongs to the binding.
    let five = Indices::Int32(vec![0; 5]);
    let refusal = one.copy(Direction::Gather, 0, &five, None).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::SelectedTooLarge);
    other.copy(Direction::Gather, 0, &five, None).unwrap();

    drop(one);
    until("one session is left", || daemon.inspect().sessions.len() == 1);
    other.copy(Direction::Gather, 0, &five, None).unwrap();
    drop(other);
    until("the table goes with its last user", || daemon.inspect().devices[0].plans.is_empty());
}

#[test]
fn the_fallback_has_one_variant() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(padded(DataType::Float16), 0)], 8);
    exercise(&mut rig);
    let plans = daemon.inspect().devices[0].plans.clone();
    let names: Vec<&str> = plans[0].variants.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["byte_copy"]);
    assert!(plans[0].variants[0].launches >= 4, "{plans:?}");
}

#[test]
fn layers_move_to_new_memory_of_the_same_signature_and_to_no_other() {
    let daemon = Daemon::start();
    let layout = padded(DataType::Float32);
    let mut rig = Rig::new(daemon.wire(), &[(layout.clone(), 64)], 8);
    exercise(&mut rig);
    let compiled = || daemon.counter("statecopy_entries_total", "compiler");
    let before = compiled();
    let mut fresh = Shared::new(random_bytes(77, rig.cache.bytes() + 4096));
    let region = rig.session.share(&fresh);
    let binding_id = rig.layers[0].published.binding_id;
    let place = |layout: &CacheLayout, offset_bytes| {
        let layout = Some(wire_layout(layout));
        v1::RebindLayer { binding_id, layout, region_id: region, offset_bytes }
    };
    let wider = CacheLayout::with_page_stride(DataType::Float32, SHAPE, PAGE + 16).unwrap();
    let past = fresh.bytes().next_multiple_of(16);
    let stranger = v1::RebindLayer { binding_id: binding_id + 99, ..place(&layout, 64) };
    for (what, layer, code) in [
        ("another page stride", place(&wider, 64), RefusalCode::SignatureMismatch),
        ("another type", place(&padded(DataType::Float16), 64), RefusalCode::SignatureMismatch),
        ("another alignment class", place(&layout, 68), RefusalCode::SignatureMismatch),
        ("past the region", place(&layout, past), RefusalCode::LayoutInvalid),
        ("no layer of this session", stranger, RefusalCode::StalePlan),
    ] {
        let refusal = rig.session.rebind(vec![layer]).unwrap_err();
        assert_eq!(refusal.code(), code, "{what}: {refusal}");
    }
    exercise(&mut rig);

    rig.session.rebind(vec![place(&layout, 4096)]).unwrap();

    let old = std::mem::replace(&mut rig.cache_region, region);
    std::mem::swap(&mut rig.cache, &mut fresh);
    rig.layers[0].placement = layout.place(4096, rig.cache.bytes()).unwrap();
    exercise(&mut rig);
    fresh.check("which the layer left");
    rig.session.release_region(old).unwrap();
    exercise(&mut rig);
    assert_eq!(compiled(), before, "a rebind prepares nothing");
}

#[test]
fn a_worker_that_sleeps_releases_its_layers_and_registers_again() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(padded(DataType::Float32), 64)], 8);
    let specs = rig.specs(8);
    rig.session.release_layers().unwrap();
    rig.session.release_region(rig.cache_region).unwrap();
    let refusal = rig.copy(Direction::Gather, 0, &Indices::Int32(vec![0]), None).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::NotSealed, "{refusal}");
    let refusal = rig.session.register_layers(specs.clone(), Vec::new()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::RegionUnknown, "{refusal}");

    rig.cache_region = rig.session.share(&rig.cache);
    let published = rig.session.register_layers(rig.specs(8), Vec::new()).unwrap();
    rig.layers[0].published = published.bindings[0].clone();
    exercise(&mut rig);
}
