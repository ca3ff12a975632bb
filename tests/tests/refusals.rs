//! Refusals: nothing moves, and the next call is served.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::copy_request::{Flags, Indices as WireIndices};
use statecopy_proto::v1::{self, CopyRequest, IndexType, RegionSlice, SharedIndices};
use statecopy_proto::{DataType, Direction, RefusalCode};
use statecopy_tests::{Daemon, Indices, Rig, Shared, Wire};

const ROWS: u64 = 6;
const MAX_SELECTED: u64 = 4;

fn layout() -> CacheLayout {
    CacheLayout::with_page_stride(DataType::Float32, [ROWS, 2, 4, 16], 200).unwrap()
}

/// Two layers of one signature, and more memory of the same session.
struct Scene {
    rig: Rig,
    arguments: Shared,
    arguments_region: u64,
}

impl Scene {
    fn new(wire: &Wire) -> Self {
        let layers = [(layout(), 0), (layout(), 1 << 16)];
        let mut rig = Rig::new(wire, &layers, MAX_SELECTED);
        let arguments = Shared::new(vec![0; 4096]);
        let arguments_region = rig.session.share(&arguments);
        Self { rig, arguments, arguments_region }
    }

    fn request(&self) -> CopyRequest {
        self.rig.request(0, &Indices::Int32(vec![2, 0]), Some(&[1, 1]))
    }

    /// A copy that is well formed moves exactly what it should.
    fn serves(&mut self) {
        for direction in Direction::ALL {
            self.rig.compute(3);
            self.rig.copy(direction, 0, &Indices::Int32(vec![5, -1, 1]), None).unwrap();
        }
    }
}

type Change = fn(&mut CopyRequest, &Scene);

/// Requests that each break one rule, and the code for it.
const MALFORMED: &[(&str, RefusalCode, Change)] = &[
    ("no session", RefusalCode::SessionUnknown, |it, _| it.session = None),
    ("another session", RefusalCode::SessionUnknown, |it, _| {
        it.session.as_mut().unwrap().session_id += 1000;
    }),
    ("another incarnation", RefusalCode::IncarnationMismatch, |it, _| {
        it.session.as_mut().unwrap().incarnation[3] ^= 1;
    }),
    ("half an incarnation", RefusalCode::IncarnationMismatch, |it, _| {
        it.session.as_mut().unwrap().incarnation.truncate(8);
    }),
    ("an unknown binding", RefusalCode::StalePlan, |it, _| it.binding_id += 1_000_000),
    ("no binding", RefusalCode::StalePlan, |it, _| it.binding_id = 0),
    ("another signature", RefusalCode::SignatureMismatch, |it, _| it.signature ^= 1),
    ("no signature", RefusalCode::SignatureMismatch, |it, _| it.signature = 0),
    ("more than max_selected", RefusalCode::SelectedTooLarge, |it, scene| {
        *it = scene.rig.request(0, &Indices::Int32(vec![0; 5]), None);
    }),
    ("no indices", RefusalCode::IndexType, |it, _| it.indices = None),
    ("fewer indices than selected", RefusalCode::IndexType, |it, _| {
        it.indices = Some(Indices::Int32(vec![1]).to_wire());
    }),
    ("more indices than selected", RefusalCode::IndexType, |it, _| {
        it.indices = Some(Indices::Int64(vec![1, 2, 3]).to_wire());
    }),
    ("shared indices of no type", RefusalCode::IndexType, |it, scene| {
        it.indices = shared_indices(scene, IndexType::Unspecified, 0);
    }),
    ("shared indices off their alignment", RefusalCode::IndexType, |it, scene| {
        it.indices = shared_indices(scene, IndexType::IndexInt32, 8);
    }),
    ("shared indices past their region", RefusalCode::OutOfRegion, |it, scene| {
        it.indices = shared_indices(scene, IndexType::IndexInt64, 4096);
    }),
    ("shared indices at the end of the address space", RefusalCode::OutOfRegion, |it, scene| {
        it.indices = shared_indices(scene, IndexType::IndexInt64, u64::MAX - 15);
    }),
    ("shared indices in no region", RefusalCode::RegionUnknown, |it, _| {
        let at = Some(RegionSlice { region_id: 999, offset_bytes: 0 });
        let kind = IndexType::IndexInt32.into();
        it.indices = Some(WireIndices::Shared(SharedIndices { r#type: kind, at }));
    }),
    ("shared indices inside packed", RefusalCode::Overlap, |it, scene| {
        let at = Some(RegionSlice { region_id: scene.rig.packed_region, offset_bytes: 64 });
        let kind = IndexType::IndexInt32.into();
        it.indices = Some(WireIndices::Shared(SharedIndices { r#type: kind, at }));
    }),
    ("fewer flags than selected", RefusalCode::FlagsMismatch, |it, _| {
        it.flags = Some(Flags::InlineFlags(vec![1]));
    }),
    ("no flags where some are announced", RefusalCode::FlagsMismatch, |it, _| {
        it.flags = Some(Flags::InlineFlags(Vec::new()));
    }),
    ("shared flags off their alignment", RefusalCode::FlagsMismatch, |it, scene| {
        it.flags = shared_flags(scene.arguments_region, 8);
    }),
    ("shared flags past their region", RefusalCode::OutOfRegion, |it, scene| {
        it.flags = shared_flags(scene.arguments_region, 4096);
    }),
    ("shared flags in no region", RefusalCode::RegionUnknown, |it, _| {
        it.flags = shared_flags(999, 0);
    }),
    ("shared flags inside packed", RefusalCode::Overlap, |it, scene| {
        it.flags = shared_flags(scene.rig.packed_region, 80);
    }),
    ("no packed buffer", RefusalCode::PackedMismatch, |it, _| it.packed = None),
    ("packed one row short", RefusalCode::PackedMismatch, |it, _| it.packed_bytes /= 2),
    ("packed one byte long", RefusalCode::PackedMismatch, |it, _| it.packed_bytes += 1),
    ("packed of no size", RefusalCode::PackedMismatch, |it, _| it.packed_bytes = 0),
    ("packed of another type", RefusalCode::PackedMismatch, |it, _| {
        it.packed_dtype = v1::DataType::Int32.into();
    }),
    ("packed of no type", RefusalCode::PackedMismatch, |it, _| it.packed_dtype = 0),
    ("packed of an unknown type", RefusalCode::PackedMismatch, |it, _| it.packed_dtype = -7),
    ("packed off its alignment", RefusalCode::PackedMismatch, |it, _| {
        it.packed.as_mut().unwrap().offset_bytes += 8;
    }),
    ("packed past its region", RefusalCode::OutOfRegion, |it, scene| {
        it.packed.as_mut().unwrap().offset_bytes = scene.rig.packed.bytes().next_multiple_of(16);
    }),
    ("packed at the end of the address space", RefusalCode::OutOfRegion, |it, _| {
        it.packed.as_mut().unwrap().offset_bytes = u64::MAX - 15;
    }),
    ("packed in no region", RefusalCode::RegionUnknown, |it, _| {
        it.packed.as_mut().unwrap().region_id = 0;
    }),
    ("packed over the cache", RefusalCode::Overlap, |it, scene| {
        it.packed = Some(RegionSlice { region_id: scene.rig.cache_region, offset_bytes: 1600 });
    }),
];

fn shared_indices(scene: &Scene, kind: IndexType, offset_bytes: u64) -> Option<WireIndices> {
    let at = Some(RegionSlice { region_id: scene.arguments_region, offset_bytes });
    Some(WireIndices::Shared(SharedIndices { r#type: kind.into(), at }))
}

#[expect(clippy::unnecessary_wraps, reason = "it is what the request's field holds")]
fn shared_flags(region_id: u64, offset_bytes: u64) -> Option<Flags> {
    Some(Flags::SharedFlags(RegionSlice { region_id, offset_bytes }))
}

#[test]
fn a_malformed_copy_moves_nothing_and_the_next_one_is_served() {
    let daemon = Daemon::start();
    let mut scene = Scene::new(daemon.wire());
    for (what, code, change) in MALFORMED {
        for direction in Direction::ALL {
            let mut request = scene.request();
            change(&mut request, &scene);
            let refusal = scene.rig.session.copy(direction, request).unwrap_err();
            assert_eq!(refusal.code(), *code, "{what}: {refusal}");
            assert!(!refusal.sentence().is_empty() && !refusal.remedy().is_empty(), "{refusal}");
            scene.rig.check(what);
            scene.arguments.check(what);
        }
        scene.serves();
    }
    let status = daemon.inspect();
    assert_eq!(status.devices[0].restarts, 0);
}

#[test]
fn a_set_is_held_against_the_memory_of_all_its_layers() {
    let daemon = Daemon::start();
    let mut scene = Scene::new(daemon.wire());
    let indices = Indices::Int32(vec![1]);
    let payload = layout().payload_bytes();
    let sized =
        |packed_bytes| CopyRequest { packed_bytes, ..scene.rig.set_request(&indices, None) };
    // The last bytes of the first row of the second layer.
    let offset_bytes = (1 << 16) + payload - 32;
    let packed = Some(RegionSlice { region_id: scene.rig.cache_region, offset_bytes });
    let cases = [
        ("packed for one layer", RefusalCode::PackedMismatch, sized(payload)),
        ("packed for three layers", RefusalCode::PackedMismatch, sized(3 * payload)),
        (
            "packed over the last layer",
            RefusalCode::Overlap,
            CopyRequest { packed, ..sized(2 * payload) },
        ),
    ];
    for (what, code, request) in cases {
        let refusal = scene.rig.session.copy(Direction::Scatter, request).unwrap_err();
        assert_eq!(refusal.code(), code, "{what}: {refusal}");
        scene.rig.check(what);
    }
    scene.rig.copy_all(Direction::Scatter, &indices, None).unwrap();
}

#[test]
fn another_workers_binding_is_refused_and_moves_nothing() {
    let daemon = Daemon::start();
    let mut mine = Scene::new(daemon.wire());
    let mut other = Scene::new(&daemon.connect());
    let mut request = mine.request();
    request.binding_id = other.rig.layers[0].published.binding_id;
    for direction in Direction::ALL {
        let refusal = mine.rig.session.copy(direction, request.clone()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::StalePlan, "{refusal}");
    }
    // Nor can it name another worker's memory.
    let mut request = mine.request();
    request.packed = Some(RegionSlice { region_id: other.rig.packed_region, offset_bytes: 64 });
    let refusal = mine.rig.session.copy(Direction::Gather, request).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::RegionUnknown, "{refusal}");
    mine.rig.check("of the worker that asked");
    other.rig.check("of the other worker");
    mine.serves();
    other.serves();
}

#[test]
fn every_refusal_is_counted_under_its_code() {
    let daemon = Daemon::start();
    let scene = Scene::new(daemon.wire());
    let mut request = scene.request();
    request.packed_bytes += 1;
    for _ in 0..3 {
        scene.rig.session.copy(Direction::Gather, request.clone()).unwrap_err();
    }
    let text = daemon.get("/metrics").body;
    let line = text.lines().find(|line| {
        line.starts_with("statecopy_refusals_total") && line.contains("PACKED_MISMATCH")
    });
    assert_eq!(line.and_then(|line| line.rsplit(' ').next()), Some("3"), "{text}");
    assert_eq!(daemon.inspect().sessions[0].refusals, 3);
}
