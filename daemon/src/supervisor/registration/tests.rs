use std::sync::Arc;

use statecopy_proto::{HandleKind, PlanKind};

use super::*;
use crate::record::{PublishedBinding, RegionRecord};
use crate::supervisor::testing::{UUID, layer};

/// Regions 1 and 2 are two memories; 3 is region 1 once more.
fn regions() -> BTreeMap<RegionId, HeldRegion> {
    let region = |id: u64, allocation: u64| {
        let record = RegionRecord {
            id: RegionId(id),
            kind: HandleKind::Memfd,
            bytes: 4096,
            pieces: Arc::new([]),
        };
        let held = HeldRegion { record, allocation: AllocationId(1, allocation) };
        (RegionId(id), held)
    };
    [region(1, 1), region(2, 2), region(3, 1)].into()
}

fn parse_within(
    limits: &Limits,
    layers: Vec<v1::LayerSpec>,
    sets: Vec<v1::BindingSetSpec>,
) -> Result<RegistrationRecord, Refusal> {
    let regions = regions();
    let ground = Ground { device: UUID, regions: &regions, limits };
    ground.parse(layers, sets, (1..).map(BindingId))
}

fn parse(
    layers: Vec<v1::LayerSpec>,
    sets: Vec<v1::BindingSetSpec>,
) -> Result<RegistrationRecord, Refusal> {
    parse_within(&Limits::default(), layers, sets)
}

/// The refusal of one changed layer; it must name the layer.
fn refused(change: impl FnOnce(&mut v1::LayerSpec)) -> Refusal {
    let mut bad = layer("bad", 1, 0);
    change(&mut bad);
    let refusal = parse(vec![layer("good", 2, 0), bad], Vec::new()).unwrap_err();
    assert_eq!(refusal.subject(), "bad", "{refusal}");
    assert!(refusal.sentence().contains("bad"), "{refusal}");
    refusal
}

fn set(name: &str, layers: &[&str]) -> v1::BindingSetSpec {
    let layers = layers.iter().map(|layer| (*layer).to_owned()).collect();
    v1::BindingSetSpec { name: name.to_owned(), layers }
}

#[test]
fn a_good_registration_becomes_records_with_an_id_for_each_layer_and_set() {
    let layers = vec![layer("a", 1, 0), layer("b", 1, 32), layer("c", 2, 4)];
    let record = parse(layers, vec![set("a", &["b", "a"])]).unwrap();
    let ids: Vec<u64> = record.layers.iter().map(|layer| layer.binding.0).collect();
    assert_eq!((ids, record.sets[0].binding.0), (vec![1, 2, 3], 4));
    assert_eq!(record.sets[0].layers, [BindingId(2), BindingId(1)]);
    assert_eq!((record.layers[2].region, record.layers[2].placement.offset()), (RegionId(2), 4));
}

#[test]
fn every_rule_of_the_layout_is_checked_and_the_layer_named() {
    for change in [
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().shape[0] = 0,
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().strides[0] = 7,
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().strides[0] = u64::MAX,
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().shape.truncate(3),
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().dtype = 0,
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().dtype = 17,
        |layer: &mut v1::LayerSpec| layer.layout.as_mut().unwrap().dtype = -1,
        |layer: &mut v1::LayerSpec| layer.layout = None,
        |layer: &mut v1::LayerSpec| layer.offset_bytes = 2,
        |layer: &mut v1::LayerSpec| layer.offset_bytes = u64::MAX - 3,
        |layer: &mut v1::LayerSpec| layer.max_selected = 0,
    ] {
        assert_eq!(refused(change).code(), RefusalCode::LayoutInvalid);
    }
}

#[test]
fn the_span_may_end_with_the_region_and_not_one_byte_later() {
    // Three pages of 64 bytes and a payload of 32.
    let last = 4096 - (3 * 64 + 32);
    parse(vec![layer("a", 1, last)], Vec::new()).unwrap();
    let refusal = refused(|layer| layer.offset_bytes = last + 4);
    assert_eq!(refusal.code(), RefusalCode::LayoutInvalid);
    assert!(refusal.sentence().contains("4096"), "{refusal}");
}

#[test]
fn an_unknown_region_and_too_large_a_selection_are_named_with_their_limit() {
    let refusal = refused(|layer| layer.region_id = 9);
    assert_eq!(refusal.code(), RefusalCode::RegionUnknown);
    let refusal = refused(|layer| layer.max_selected = 16_385);
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    for part in ["16385", "limits.selected_max = 16384"] {
        assert!(refusal.sentence().contains(part), "{refusal}");
    }
}

#[test]
fn the_number_of_layers_is_limited_and_not_zero() {
    let limits = Limits { layers_max: 2, ..Limits::default() };
    let many = |count: u64| -> Vec<_> {
        (0..count).map(|at| layer(&at.to_string(), 1, at * 256)).collect()
    };
    parse_within(&limits, many(2), Vec::new()).unwrap();
    let refusal = parse_within(&limits, many(3), Vec::new()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    assert!(refusal.sentence().contains("limits.layers_max = 2"), "{refusal}");
    let sets = vec![set("a", &["0"]), set("b", &["0"]), set("c", &["0"])];
    let refusal = parse_within(&limits, many(1), sets).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    assert_eq!(parse(Vec::new(), Vec::new()).unwrap_err().code(), RefusalCode::LayoutInvalid);
}

#[test]
fn names_are_short_unique_and_not_empty() {
    let code = |names: [&str; 2]| {
        let layers = names.iter().enumerate().map(|(at, name)| layer(name, at as u64 + 1, 0));
        parse(layers.collect(), Vec::new()).map_err(|refusal| refusal.code())
    };
    assert_eq!(code(["a", "a"]), Err(RefusalCode::LayoutInvalid));
    assert_eq!(code(["a", ""]), Err(RefusalCode::LayoutInvalid));
    assert_eq!(code(["a", &"ä".repeat(129)]), Err(RefusalCode::LayoutInvalid));
    assert!(code(["a", &"ä".repeat(128)]).is_ok());
}

#[test]
fn payloads_of_one_memory_may_interleave_and_not_overlap() {
    // 32 bytes of payload in pages of 64: two layers fill them, a third has no place.
    parse(vec![layer("a", 1, 0), layer("b", 1, 32)], Vec::new()).unwrap();
    for (region, offset) in [(1, 16), (1, 64), (3, 0), (3, 60)] {
        let overlapping = vec![layer("a", 1, 0), layer("b", region, offset)];
        let refusal = parse(overlapping, Vec::new()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::Overlap, "{region} {offset}");
        assert!(refusal.sentence().contains("layers a and b"), "{refusal}");
    }
    parse(vec![layer("a", 1, 0), layer("b", 2, 0)], Vec::new()).unwrap();
}

#[test]
fn the_workers_signature_must_be_the_daemons() {
    let record = parse(vec![layer("a", 1, 0)], Vec::new()).unwrap();
    let regions = regions();
    let limits = Limits::default();
    let ground = Ground { device: UUID, regions: &regions, limits: &limits };
    let right = ground.signature(&record.layers[0].placement);
    let with = |signature| vec![v1::LayerSpec { signature, ..layer("a", 1, 0) }];
    parse(with(right.0), Vec::new()).unwrap();
    let refusal = parse(with(right.0 ^ 1), Vec::new()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::SignatureMismatch);
    assert!(refusal.sentence().contains(&right.to_string()), "{refusal}");
}

#[test]
fn a_set_has_known_layers_of_one_signature_each_once() {
    let layers = || vec![layer("a", 1, 0), layer("b", 1, 32), layer("odd", 2, 4)];
    let code = |names: &[&str]| {
        let refusal = parse(layers(), vec![set("all", names)]).unwrap_err();
        assert!(refusal.sentence().contains("all"), "{refusal}");
        refusal.code()
    };
    assert_eq!(code(&[]), RefusalCode::LayoutInvalid);
    assert_eq!(code(&["a", "missing"]), RefusalCode::LayoutInvalid);
    assert_eq!(code(&["a", "b", "a"]), RefusalCode::Overlap);
    assert_eq!(code(&["a", "odd"]), RefusalCode::SignatureMismatch);
    let twice = parse(layers(), vec![set("all", &["a"]), set("all", &["b"])]).unwrap_err();
    assert_eq!(twice.code(), RefusalCode::LayoutInvalid);
}

#[test]
fn a_rebind_keeps_the_signature_and_overlaps_nothing_that_stays() {
    let registration = parse(vec![layer("a", 1, 0), layer("b", 1, 32)], Vec::new()).unwrap();
    let mut regions = regions();
    let limits = Limits::default();
    let signature = {
        let ground = Ground { device: UUID, regions: &regions, limits: &limits };
        ground.signature(&registration.layers[0].placement)
    };
    let answer = |binding| PublishedBinding { binding, signature, plan: PlanKind::Fused };
    let answers = [answer(BindingId(1)), answer(BindingId(2))];
    assert!(Publication::join(registration.clone(), &answers[..1]).is_none());
    let published = Publication::join(registration, &answers).unwrap();
    let to = |binding_id, region_id, offset_bytes| v1::RebindLayer {
        binding_id,
        layout: layer("", 0, 0).layout,
        region_id,
        offset_bytes,
    };
    let code = |regions: &BTreeMap<RegionId, HeldRegion>, layers| {
        let ground = Ground { device: UUID, regions, limits: &limits };
        ground.parse_rebind(layers, &published).map_err(|refusal| refusal.code())
    };
    assert_eq!(code(&regions, vec![to(1, 2, 64)]).unwrap()[0].placement.offset(), 64);
    assert_eq!(code(&regions, vec![to(1, 1, 32)]), Err(RefusalCode::Overlap));
    assert_eq!(code(&regions, vec![to(1, 3, 48)]), Err(RefusalCode::Overlap));
    // Both change places.
    assert!(code(&regions, vec![to(1, 1, 32), to(2, 1, 0)]).is_ok());
    assert_eq!(code(&regions, vec![to(1, 2, 0), to(1, 2, 0)]), Err(RefusalCode::LayoutInvalid));
    assert_eq!(code(&regions, vec![to(3, 2, 0)]), Err(RefusalCode::StalePlan));
    assert_eq!(code(&regions, vec![to(1, 2, 4)]), Err(RefusalCode::SignatureMismatch));
    assert_eq!(code(&regions, vec![to(1, 9, 0)]), Err(RefusalCode::RegionUnknown));
    assert_eq!(code(&regions, Vec::new()), Err(RefusalCode::LayoutInvalid));
    // A layer whose region was released sleeps, and lies in nobody's way.
    regions.remove(&RegionId(1));
    assert!(code(&regions, vec![to(1, 3, 32)]).is_ok());
}
