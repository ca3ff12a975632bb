//! What the driver says of a worker's memory.

use statecopy_proto::HandleKind;
use statecopy_stub_cuda::{Function, GRANULARITY_BYTES};

use super::*;
use crate::device::PieceHandle;

const SHARED: Allocator = Allocator::Virtual { piece_bytes: 0, shared: true };

#[test]
fn memory_of_the_default_allocator_is_one_legacy_handle() {
    let bed = Bed::open();
    let memory = bed.allocate(5 << 20, Allocator::Default);
    for offset in [0, 512, (5 << 20) - 1] {
        let mut export = bed.exporter.export(memory.address() + offset, 1).unwrap();
        let announced = Announced { kind: HandleKind::CudaIpc, bytes: 5 << 20, pieces: 1 };
        assert_eq!((export.announced(), export.offset()), (announced, offset));
        assert_eq!(export.device(), bed.device.description().uuid);
        let pieces = export.next_pieces(10).unwrap();
        let [Piece { bytes, buffer, handle: PieceHandle::Value(handle) }] = &pieces[..] else {
            panic!("{pieces:?}");
        };
        assert_eq!((*bytes, handle.len()), (5 << 20, 64));
        assert_ne!(*buffer, 0);
        assert!(export.next_pieces(10).unwrap().is_empty());
    }
    let buffer = |memory: &CudaMemory| bed.export(memory).1[0].buffer;
    let other = bed.allocate(5 << 20, Allocator::Default);
    assert_ne!(buffer(&memory), buffer(&other));
}

#[test]
fn virtual_memory_is_the_pieces_that_hold_the_range() {
    let bed = Bed::open();
    let memory = bed.allocate(5 * GRANULARITY_BYTES, SHARED);
    let start = memory.address();
    for (offset, bytes, first, pieces) in [
        (0, 5 * GRANULARITY_BYTES, 0, 5),
        (0, 1, 0, 1),
        (GRANULARITY_BYTES - 1, 2, 0, 2),
        (GRANULARITY_BYTES, GRANULARITY_BYTES, 1, 1),
        (2 * GRANULARITY_BYTES + 64, GRANULARITY_BYTES, 2, 2),
    ] {
        let export = bed.exporter.export(start + offset, bytes).unwrap();
        let kind = HandleKind::CudaVmm;
        let whole = pieces as u64 * GRANULARITY_BYTES;
        assert_eq!(export.announced(), Announced { kind, bytes: whole, pieces });
        assert_eq!(export.offset(), offset - first * GRANULARITY_BYTES);
    }
}

#[test]
fn descriptors_come_in_bounded_batches() {
    let bed = Bed::open();
    let memory = bed.allocate(40 * GRANULARITY_BYTES, SHARED);
    let mut export = bed.exporter.export(memory.address(), memory.bytes()).unwrap();
    let held = bed.held();
    let used = bed.used_bytes();
    let mut import = bed.device.import(export.announced()).unwrap();
    let mut batches = Vec::new();
    loop {
        let batch = export.next_pieces(7).unwrap();
        if batch.is_empty() {
            break;
        }
        batches.push(batch.len());
        for piece in batch {
            import.add(piece).unwrap();
        }
    }
    assert_eq!(batches, [7, 7, 7, 7, 7, 5]);
    drop(import);
    assert_eq!(bed.held(), held);
    drop((memory, export));
    assert_eq!(bed.used_bytes(), used - 40 * GRANULARITY_BYTES, "no descriptor is left");
}

#[test]
fn memory_that_cannot_be_shared_is_refused_by_the_name_of_its_allocator() {
    let bed = Bed::open();
    let refused = |address: u64| {
        let refusal = bed.exporter.export(address, 16).map(|_| ()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleUnsupported, "{refusal}");
        refusal
    };
    let hidden =
        bed.allocate(GRANULARITY_BYTES, Allocator::Virtual { piece_bytes: 0, shared: false });
    assert!(refused(hidden.address()).sentence().contains("without a handle type"));
    let pool = bed.allocate(4096, Allocator::Pool);
    let refusal = refused(pool.address());
    assert!(refusal.sentence().contains("cudaMallocAsync"), "{refusal}");
    assert!(refusal.remedy().contains("default allocator"), "{refusal}");
    let current = bed.device.context.enter().unwrap();
    let host = current.allocate_host(4096).unwrap();
    let refusal = refused(host.addr().get() as u64);
    assert!(refusal.sentence().contains("Host memory"), "{refusal}");
    // SAFETY: the memory is from above, and nobody uses it.
    unsafe { current.free_host(host) }.unwrap();
}

#[test]
fn a_range_that_is_no_memory_is_refused() {
    let bed = Bed::open();
    let legacy = bed.allocate(4096, Allocator::Default);
    let pieces = bed.allocate(2 * GRANULARITY_BYTES, SHARED);
    let freed = bed.allocate(4096, Allocator::Default).address();
    for (address, bytes) in [
        (0, 16),
        (freed, 16),
        (legacy.address(), 0),
        (legacy.address(), 4097),
        (legacy.address() + 4096, 1),
        (pieces.address() + 16, 2 * GRANULARITY_BYTES),
        (pieces.address(), u64::MAX),
        (u64::MAX, 1),
    ] {
        let refusal = bed.exporter.export(address, bytes).map(|_| ()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{bytes}: {refusal}");
    }
}

#[test]
fn exporting_leaves_the_context_of_the_thread_alone() {
    let bed = Bed::open();
    let memory = bed.allocate(4 * GRANULARITY_BYTES, SHARED);
    let before = bed.report();
    let _pieces = bed.export(&memory);
    let hidden =
        bed.allocate(GRANULARITY_BYTES, Allocator::Virtual { piece_bytes: 0, shared: false });
    let between = bed.report();
    let _refused = bed.exporter.export(hidden.address(), 16).unwrap_err();
    let after = bed.report();
    for (report, from) in [(&between, &before), (&after, &between)] {
        let more = |function| report.count(function) - from.count(function);
        assert_eq!(more(Function::cuCtxPushCurrent_v2), more(Function::cuCtxPopCurrent_v2));
    }
    let made_current = Function::cuCtxSetCurrent;
    assert_eq!(after.count(made_current), between.count(made_current));
}
