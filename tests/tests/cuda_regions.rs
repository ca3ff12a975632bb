//! Device memory that workers share, of every allocator and in any number of pieces, over the stub driver.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Resource, getrlimit, setrlimit};
use statecopy_client::{Error, RefusalCode};
use statecopy_descriptors::SealedMemory;
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::device::PieceHandle;
use statecopy_proto::Refusal;
use statecopy_proto::v1::{DescriptorRef, HandleKind, RegionPiece, RegisterRegionRequest};
use statecopy_stub_cuda::{GRANULARITY_BYTES, Knob, Object};
use statecopy_tests::{CudaBed, CudaWorker, Footprint, PIECES, Session, random_bytes};

fn refusal(error: Error) -> Refusal {
    match error {
        Error::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_of_every_allocator_is_shared_and_copied_right() {
    let bed = CudaBed::default();
    let large = Allocator::Virtual { piece_bytes: 10 * GRANULARITY_BYTES, shared: true };
    for (allocator, kind, pieces) in [
        (Allocator::Default, HandleKind::CudaIpc, 1),
        (PIECES, HandleKind::CudaVmm, 20),
        (large, HandleKind::CudaVmm, 2),
    ] {
        let daemon = bed.daemon().start();
        let memory = bed.allocate(20 * GRANULARITY_BYTES, allocator);
        let mut worker = CudaWorker::register(&bed, bed.client(&daemon), memory);
        worker.copy_both_ways();
        let regions = daemon.inspect().sessions.remove(0).regions;
        let cache = regions.iter().find(|region| region.size_bytes > 1 << 20).unwrap();
        assert_eq!((cache.kind(), cache.pieces), (kind, pieces), "{allocator:?}");
        assert_eq!(cache.size_bytes, 20 * GRANULARITY_BYTES);
    }
}

#[test]
fn fabric_handles_travel_by_value() {
    let bed = CudaBed::default();
    bed.stub.set(Knob::Fabric, true);
    let daemon = bed.daemon().start();
    let mut session = Session::open(daemon.wire());
    let pieces = vec![
        RegionPiece {
            size_bytes: GRANULARITY_BYTES,
            buffer_id: 1,
            handle: random_bytes(1, 64)
        };
        2
    ];
    let tag = session.tag();
    let request = RegisterRegionRequest {
        kind: HandleKind::CudaFabric.into(),
        descriptors: None,
        pieces,
        ..session.region_request(tag, 2 * GRANULARITY_BYTES)
    };
    let refusal = session.register_region(request).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
}

#[test]
fn memory_that_cannot_be_shared_is_refused_by_the_name_of_its_allocator() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let client = bed.client(&daemon);
    let register =
        |address, bytes| refusal(client.register_device_memory(address, bytes).unwrap_err());
    let hidden = bed.allocate(4096, Allocator::Virtual { piece_bytes: 0, shared: false });
    let refused = register(hidden.address(), 4096);
    assert_eq!(refused.code(), RefusalCode::HandleUnsupported, "{refused}");
    bed.stub.set(Knob::PoolMemory, true);
    let pool = bed.allocate(4096, Allocator::Default);
    let refused = register(pool.address(), 4096);
    assert_eq!(refused.code(), RefusalCode::HandleUnsupported, "{refused}");
    assert!(refused.sentence().contains("cudaMallocAsync"), "{refused}");
    assert!(refused.remedy().contains("default allocator"), "{refused}");
    for (address, bytes) in [(0, 16), (pool.address(), 0), (u64::MAX, 16)] {
        let refused = register(address, bytes);
        assert_eq!(refused.code(), RefusalCode::HandleInvalid, "{refused}");
    }
    assert!(daemon.inspect().sessions[0].regions.is_empty());
}

#[test]
fn one_allocation_behind_many_layers_is_one_region_until_the_last_lets_go() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let (client, device) = (bed.client(&daemon), daemon.device_process());
    let held = bed.report(device).held();
    for allocator in [Allocator::Default, PIECES] {
        let memory = bed.allocate(64 << 20, allocator);
        client.register_device_memory(memory.address(), memory.bytes()).unwrap();
        let layers: Vec<_> = (0..64_u64)
            .map(|layer| {
                let at = memory.address() + (layer << 20);
                client.register_device_memory(at, 1 << 20).unwrap()
            })
            .collect();
        let offsets: Vec<u64> = layers.iter().map(|layer| layer.offset >> 20).collect();
        assert_eq!(offsets, (0..64).collect::<Vec<_>>());
        assert_eq!(daemon.inspect().sessions[0].regions.len(), 1);
        // Registered in a session of its own it is the same mapping.
        let other = bed.client(&daemon);
        let legacy = bed.report(device).live(Object::OpenHandle);
        other.register_device_memory(memory.address(), memory.bytes()).unwrap();
        assert_eq!(bed.report(device).live(Object::OpenHandle), legacy);
        other.close().unwrap();
        let whole = layers[0].region.clone();
        for layer in layers {
            assert_eq!(daemon.inspect().sessions[0].regions.len(), 1);
            client.release_region(layer.region).unwrap();
        }
        client.release_region(whole).unwrap();
        assert!(daemon.inspect().sessions[0].regions.is_empty());
        bed.wait_for(device, &held);
    }
}

#[test]
fn a_handle_that_comes_back_for_another_allocation_is_noticed() {
    let bed = CudaBed::default();
    bed.stub.set(Knob::ReuseHandles, true);
    let daemon = bed.daemon().start();
    let client = bed.client(&daemon);
    let memory = bed.allocate(1 << 20, Allocator::Default);
    let old = client.register_device_memory(memory.address(), memory.bytes()).unwrap();
    drop(memory);
    let memory = bed.allocate(1 << 20, Allocator::Default);
    let refused = client.register_device_memory(memory.address(), memory.bytes()).unwrap_err();
    let refused = refusal(refused);
    assert_eq!(refused.code(), RefusalCode::HandleInvalid, "{refused}");
    assert!(refused.sentence().contains("another allocation"), "{refused}");
    client.release_region(old.region).unwrap();
    client.register_device_memory(memory.address(), memory.bytes()).unwrap();
}

#[test]
fn the_next_daemon_gets_the_same_memory_and_never_what_took_its_place() {
    let bed = CudaBed::default();
    let folder = tempfile::Builder::new().prefix("sc").tempdir().unwrap();
    let start = || bed.daemon().runtime(&folder.path().join("run")).start();
    for allocator in [Allocator::Default, PIECES] {
        let daemon = start();
        let memory = bed.allocate(4 * GRANULARITY_BYTES, allocator);
        let mut worker = CudaWorker::register(&bed, bed.client(&daemon), memory);
        let client = bed.client(&daemon);
        let gone = bed.allocate(GRANULARITY_BYTES, allocator);
        let at = client.register_device_memory(gone.address(), gone.bytes()).unwrap();
        drop(daemon);
        drop(gone);
        let _in_its_place = bed.allocate(GRANULARITY_BYTES, allocator);
        let daemon = start();
        worker.copy_both_ways();
        // No layer lies in what is gone: the session goes on without it.
        client.ping().unwrap();
        assert!(daemon.inspect().sessions.iter().all(|session| session.regions.len() != 1));
        let refused = refusal(client.release_region(at.region).unwrap_err());
        assert_eq!(refused.code(), RefusalCode::RegionUnknown, "{refused}");
    }
}

/// A request by hand, over pieces of what the exporter gives.
fn offered(
    bed: &CudaBed,
    session: &mut Session,
    allocator: Allocator,
    change: impl FnOnce(&mut RegisterRegionRequest, &mut Vec<OwnedFd>),
) -> Result<u64, Refusal> {
    let memory = bed.allocate(4 * GRANULARITY_BYTES, allocator);
    let mut export = bed.exporter.export(memory.address(), memory.bytes()).unwrap();
    let announced = export.announced();
    let mut descriptors = Vec::new();
    let pieces = export.next_pieces(64).unwrap().into_iter().map(|piece| {
        let handle = match piece.handle {
            PieceHandle::Value(value) => value.into_vec(),
            PieceHandle::Descriptor(descriptor) => {
                descriptors.push(descriptor);
                Vec::new()
            }
        };
        RegionPiece { size_bytes: piece.bytes, buffer_id: piece.buffer, handle }
    });
    let pieces = pieces.collect();
    let mut request = session.region_request(0, announced.bytes);
    request.kind = announced.kind.to_message().into();
    request.pieces = pieces;
    change(&mut request, &mut descriptors);
    request.descriptors = if descriptors.is_empty() {
        None
    } else {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let (tag, count) = (session.send(&borrowed), u32::try_from(borrowed.len()).unwrap());
        Some(DescriptorRef { tag, count })
    };
    session.register_region(request)
}

#[test]
fn what_is_not_as_it_was_announced_is_refused_and_leaves_nothing() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let device = daemon.device_process();
    let mut session = Session::open(daemon.wire());
    let (held, files) = (bed.report(device).held(), Footprint::of(daemon.supervisor()));
    type Change = fn(&mut RegisterRegionRequest, &mut Vec<OwnedFd>);
    let legacy: [(&str, Change); 4] = [
        ("random bytes", |request, _| request.pieces[0].handle = random_bytes(3, 64)),
        ("a handle cut short", |request, _| {
            request.pieces[0].handle.pop();
        }),
        ("a smaller size", |request, _| {
            request.size_bytes -= 16;
            request.pieces[0].size_bytes -= 16;
        }),
        ("a larger size", |request, _| {
            request.size_bytes *= 2;
            request.pieces[0].size_bytes *= 2;
        }),
    ];
    for (what, change) in legacy {
        let refusal = offered(&bed, &mut session, Allocator::Default, change).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{what}: {refusal}");
    }
    let pieces: [(&str, Change); 5] = [
        ("no memory", |_, descriptors| {
            descriptors[2] = std::fs::File::open("/dev/null").unwrap().into();
        }),
        ("a piece that is larger than announced", |request, _| {
            request.size_bytes -= GRANULARITY_BYTES / 2;
            request.pieces[3].size_bytes -= GRANULARITY_BYTES / 2;
        }),
        ("a piece that is smaller than announced", |request, _| {
            request.size_bytes += GRANULARITY_BYTES;
            request.pieces[3].size_bytes += GRANULARITY_BYTES;
        }),
        ("a descriptor less", |_, descriptors| {
            descriptors.pop();
        }),
        ("a piece less", |request, _| {
            request.pieces.pop();
        }),
    ];
    for (what, change) in pieces {
        let refusal = offered(&bed, &mut session, PIECES, change).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{what}: {refusal}");
    }
    let file = SealedMemory::create("file", 4096).unwrap();
    let refusal = session.offer(file.as_fd(), 4096).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HandleUnsupported, "{refusal}");
    assert!(refusal.sentence().contains("cuda_ipc or cuda_vmm"), "{refusal}");

    bed.wait_for(device, &held);
    Footprint::wait_for(&[(daemon.supervisor(), files)]);
    assert!(daemon.inspect().sessions[0].regions.is_empty());
    for allocator in [Allocator::Default, PIECES] {
        offered(&bed, &mut session, allocator, |_, _| {}).unwrap();
    }
    assert_eq!(daemon.device_process(), device, "it never died");
}

/// Pieces of one region: many more than a process may have files open.
const MANY: u64 = 3000;

#[test]
fn three_thousand_pieces_are_shared_in_bounded_batches_and_nobody_but_the_supervisor_keeps_any() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(1024);
    setrlimit(Resource::Nofile, limit).unwrap();
    let bed = CudaBed::default();
    let daemon = bed.daemon().descriptors(1024, 8192).start();
    let (supervisor, device) = (daemon.supervisor(), daemon.device_process());
    let client = bed.client(&daemon);
    let before = [std::process::id(), device, supervisor].map(|pid| Footprint::of(pid).descriptors);
    let memory = bed.allocate(MANY * GRANULARITY_BYTES, PIECES);
    let mut worker = CudaWorker::register(&bed, client, memory);
    worker.copy_both_ways();
    let regions = daemon.inspect().sessions.remove(0).regions;
    assert!(regions.iter().any(|region| u64::from(region.pieces) == MANY), "{regions:?}");
    let after = [std::process::id(), device, supervisor].map(|pid| Footprint::of(pid).descriptors);
    assert!(after[0] < before[0] + 16 && after[1] < before[1] + 16, "{before:?} {after:?}");
    assert!(after[2] >= before[2] + 3000, "the supervisor keeps them for the next device process");
    worker.client.release_region(worker.cache_at.region.clone()).unwrap();
    assert!(Footprint::of(supervisor).descriptors < before[2] + 16);
}

#[test]
fn more_descriptors_than_the_hard_limit_leaves_are_refused_by_its_name() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().descriptors(256, 256).start();
    let client = bed.client(&daemon);
    let memory = bed.allocate(400 * GRANULARITY_BYTES, PIECES);
    let refused = client.register_device_memory(memory.address(), memory.bytes()).unwrap_err();
    let refused = refusal(refused);
    assert_eq!(refused.code(), RefusalCode::QuotaExceeded, "{refused}");
    assert!(refused.sentence().contains("RLIMIT_NOFILE"), "{refused}");
    // What had come is closed again: there is room for what fits.
    assert_eq!(daemon.metric("statecopy_descriptors_pending"), 0.0);
    let small = bed.allocate(100 * GRANULARITY_BYTES, PIECES);
    client.register_device_memory(small.address(), small.bytes()).unwrap();
}
