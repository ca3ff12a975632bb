//! Regions: which memory the daemon takes, and that it pays for none of it.
#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use statecopy_descriptors::SealedMemory;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::descriptor_socket::{DaemonRecord, WorkerRecord};
use statecopy_proto::v1::{self, DescriptorRef, HandleKind, RegisterRegionRequest};
use statecopy_proto::{DataType, Direction, RefusalCode};
use statecopy_tests::{
    Daemon, DaemonOptions, Footprint, Indices, Rig, Session, Shared, layer_spec, random_bytes,
    wire_layout,
};

fn small() -> CacheLayout {
    CacheLayout::with_page_stride(DataType::Float32, [6, 2, 4, 16], 200).unwrap()
}

fn unsealed(seals: SealFlags, bytes: u64) -> OwnedFd {
    let memory = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, bytes).unwrap();
    fcntl_add_seals(&memory, seals).unwrap();
    memory
}

#[test]
fn only_sealed_memory_of_the_announced_size_becomes_a_region() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let bytes = 1 << 16;
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let cases: Vec<(&str, OwnedFd)> = vec![
        ("an unsealed memfd", unsealed(SealFlags::empty(), bytes)),
        ("a memfd that may shrink", unsealed(SealFlags::GROW, bytes)),
        ("a memfd that may grow", unsealed(SealFlags::SHRINK, bytes)),
        ("a memfd sealed against writing", unsealed(both | SealFlags::WRITE, bytes)),
        ("more than announced", unsealed(both, bytes + 4096)),
        ("less than announced", unsealed(both, bytes - 4096)),
        ("a regular file", file.into()),
        ("a device", File::open("/dev/zero").unwrap().into()),
        ("a folder", File::open("/").unwrap().into()),
    ];
    let device = daemon.device_process();
    let baseline = Footprint::of(device);
    for (what, descriptor) in &cases {
        let refusal = session.offer(descriptor.as_fd(), bytes).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{what}: {refusal}");
    }
    Footprint::wait_for(&[(device, baseline)]);
    let sealed = SealedMemory::create("sealed", bytes).unwrap();
    session.offer(sealed.as_fd(), bytes).unwrap();
}

#[test]
fn memory_that_a_worker_tries_to_shrink_later_stays_as_it_was() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(small(), 0)], 4);
    // The seal forbids it to the worker itself, so that nobody reads past an end that has moved.
    assert!(ftruncate(rig.cache.descriptor(), 4096).is_err());
    assert!(ftruncate(rig.packed.descriptor(), 0).is_err());
    for direction in Direction::ALL {
        rig.copy(direction, 0, &Indices::Int32(vec![5, 0, -1]), None).unwrap();
    }
}

#[test]
fn handles_of_another_kind_or_length_are_refused() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 16]);
    let tag = session.send(&[memory.descriptor()]);
    let good = session.region_request(tag, memory.bytes());
    let piece = |size_bytes, handle| v1::RegionPiece {
        size_bytes,
        buffer_id: 1,
        handle: random_bytes(handle, handle),
    };
    let by_value = |kind: HandleKind, bytes| RegisterRegionRequest {
        kind: kind.into(),
        descriptors: None,
        pieces: vec![piece(memory.bytes(), bytes)],
        ..good.clone()
    };
    let half = memory.bytes() / 2;
    let mut cases = vec![
        ("no kind", RegisterRegionRequest { kind: 0, ..good.clone() }),
        ("an unknown kind", RegisterRegionRequest { kind: 99, ..good.clone() }),
        ("bytes for a memfd", by_value(HandleKind::Memfd, 64)),
        ("no descriptors", by_value(HandleKind::Memfd, 0)),
        (
            "two pieces for a memfd",
            RegisterRegionRequest { pieces: vec![piece(half, 0); 2], ..good.clone() },
        ),
        (
            "a piece of another size",
            RegisterRegionRequest { pieces: vec![piece(half, 0)], ..good.clone() },
        ),
        ("no size", RegisterRegionRequest { size_bytes: 0, ..good.clone() }),
    ];
    for bytes in [0, 1, 63, 64, 65, 1 << 20] {
        cases.push(("a CUDA handle", by_value(HandleKind::CudaIpc, bytes)));
    }
    for (what, request) in cases {
        let cuda = request.kind() == HandleKind::CudaIpc;
        let refusal = session.register_region(request).unwrap_err();
        let code = if cuda { RefusalCode::HandleUnsupported } else { RefusalCode::HandleInvalid };
        assert_eq!(refusal.code(), code, "{what}: {refusal}");
    }
    let region = session.share(&memory);
    session.release_region(region).unwrap();
}

#[test]
fn a_handle_past_the_message_limit_is_an_error_and_the_daemon_lives() {
    let daemon = Daemon::start();
    let session = Session::open(daemon.wire());
    let mut request = session.region_request(1, 1 << 16);
    request.kind = HandleKind::CudaIpc.into();
    let handle = vec![7; 64 << 20];
    request.pieces = vec![v1::RegionPiece { size_bytes: 1 << 16, buffer_id: 1, handle }];
    let wire = daemon.connect();
    let mut registry = wire.registry().max_encoding_message_size(usize::MAX);
    let status = wire.ask(registry.register_region(request)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status}");
    assert_eq!(daemon.inspect().sessions.len(), 1);
    let mut session = session;
    session.share(&Shared::new(vec![0; 4096]));
}

#[test]
fn a_count_of_descriptors_other_than_announced_is_refused() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 16]);
    let supervisor = Footprint::of(daemon.supervisor());
    // In the registration.
    for (sent, announced) in [(1, 0), (1, 2), (1, u32::MAX), (2, 1), (2, 2)] {
        let tag = session.send(&vec![memory.descriptor(); sent]);
        let mut request = session.region_request(tag, memory.bytes());
        request.descriptors = Some(DescriptorRef { tag, count: announced });
        let refusal = session.register_region(request).unwrap_err();
        let code = RefusalCode::HandleInvalid;
        assert_eq!(refusal.code(), code, "{sent} sent, {announced} announced: {refusal}");
    }
    // In the record beside which they travel.
    for (sent, announced) in [(1, 2), (2, 1), (0, 1)] {
        let tag = session.tag();
        let record = WorkerRecord::Descriptors { tag, count: announced }.encode();
        let answer = session.say(&record, &vec![memory.descriptor(); sent]);
        let Some(DaemonRecord::Refused { code: RefusalCode::HandleInvalid, .. }) = answer else {
            panic!("{sent} sent, {announced} announced: {answer:?}");
        };
    }
    Footprint::wait_for(&[(daemon.supervisor(), supervisor)]);
    session.share(&memory);
}

#[test]
fn layers_of_a_released_region_sleep_until_they_are_bound_again() {
    let daemon = Daemon::start();
    let mut rig = Rig::new(daemon.wire(), &[(small(), 0)], 4);
    let indices = Indices::Int32(vec![5, 0]);
    let device = daemon.device_process();
    let awake = Footprint::of(device);
    rig.session.release_region(rig.cache_region).unwrap();
    assert!(Footprint::of(device).mapped_bytes < awake.mapped_bytes, "the memory is really freed");
    let refusal = rig.copy(Direction::Scatter, 0, &indices, None).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::RegionUnknown, "{refusal}");
    let refusal = rig.session.release_region(rig.cache_region).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::RegionUnknown, "{refusal}");

    rig.cache_region = rig.session.share(&rig.cache);
    let layer = v1::RebindLayer {
        binding_id: rig.layers[0].published.binding_id,
        layout: Some(wire_layout(&small())),
        region_id: rig.cache_region,
        offset_bytes: 0,
    };
    let compiled = daemon.counter("statecopy_entries_total", "compiler");
    rig.session.rebind(vec![layer]).unwrap();
    assert_eq!(daemon.counter("statecopy_entries_total", "compiler"), compiled);
    for direction in Direction::ALL {
        rig.copy(direction, 0, &indices, None).unwrap();
    }
}

#[test]
fn gaps_stay_holes() {
    let daemon = Daemon::start();
    let mut session = Session::open(daemon.wire());
    // Two layers of 16 KiB payload in pages of 1 MiB: the rest of each page is never touched.
    let layout = CacheLayout::with_page_stride(DataType::Float32, [9, 4, 16, 64], 1 << 18).unwrap();
    let bytes = 9 << 20;
    let memory = SealedMemory::create("sparse", bytes).unwrap();
    let mapping = memory.map().unwrap();
    let offsets = [0, 1 << 19];
    for place in (0..9).flat_map(|row| offsets.map(|offset| (row << 20) + offset)) {
        mapping.write(place, &random_bytes(place, layout.payload_bytes())).unwrap();
    }
    let touched = memory.data_ranges().unwrap();
    assert_eq!(touched.len(), 18);
    let packed = Shared::new(random_bytes(4, 16 << 14));
    let region_id = session.offer(memory.as_fd(), bytes).unwrap();
    let packed_region = session.share(&packed);
    let placements = offsets.map(|offset| layout.place(offset, bytes).unwrap());
    let layers = placements.iter().enumerate().map(|(at, it)| layer_spec(at, it, region_id, 16));
    let published = session.register_layers(layers.collect(), Vec::new()).unwrap();
    let indices = Indices::Int64(vec![8, 0, 1, 2, -1, 3, 4, 9, 5, 6, 7]);
    for direction in Direction::ALL {
        for binding in &published.bindings {
            let request = v1::CopyRequest {
                session: session.reference(),
                binding_id: binding.binding_id,
                signature: binding.signature,
                selected: 11,
                indices: Some(indices.to_wire()),
                packed: Some(v1::RegionSlice { region_id: packed_region, offset_bytes: 0 }),
                packed_dtype: v1::DataType::Float32.into(),
                packed_bytes: 11 << 14,
                ..v1::CopyRequest::default()
            };
            session.copy(direction, request).unwrap();
        }
    }
    assert_eq!(memory.data_ranges().unwrap(), touched, "a page of a gap was touched");
}

/// A library that does nothing, compiled here.
fn hook(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("hook.c"), folder.join("hook.so"));
    std::fs::write(&source, "int statecopy_test_hook(void) { return 7; }\n").unwrap();
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(status.expect("a C compiler").success());
    library
}

#[test]
fn a_preloaded_library_in_the_device_process_is_a_hook_unless_the_configuration_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let library = hook(folder.path());
    let options = DaemonOptions::default().variable("LD_PRELOAD", &library);
    let layers = |region| vec![layer_spec(0, &small().place(0, 1 << 20).unwrap(), region, 8)];

    let daemon = options.clone().start();
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 20]);
    let region = session.share(&memory);
    let refusal = session.register_layers(layers(region), Vec::new()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HookPresent, "{refusal}");
    assert!(refusal.sentence().contains("hook.so"), "{refusal}");
    assert!(daemon.inspect().sessions[0].layers.is_empty());
    memory.check("after a refused registration");

    let daemon = options.setting("allowed_preloads", "[\"hook.so\"]").start();
    let mut session = Session::open(daemon.wire());
    let region = session.share(&memory);
    session.register_layers(layers(region), Vec::new()).unwrap();
}
