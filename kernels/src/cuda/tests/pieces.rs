//! Imports of virtual memory: all or nothing, whatever comes.

use std::fs::File;

use rustix::fs::{MemfdFlags, memfd_create};
use statecopy_proto::HandleKind;
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, GRANULARITY_BYTES, Knob, StubDevice};

use super::super::memory_calls::Shareable;
use super::super::pieces::{MemoryHandle, PieceMapping};
use super::*;
use crate::conformance::{assert_bytes, noise};
use crate::device::PieceHandle;

const SHARED: Allocator = Allocator::Virtual { piece_bytes: 0, shared: true };
const THREE: u64 = 3 * GRANULARITY_BYTES;

#[test]
fn pieces_lie_side_by_side_in_the_order_in_which_they_came() {
    let bed = Bed::open();
    // The first memory makes the worker's context.
    drop(bed.allocate(THREE, SHARED));
    let (used, held) = (bed.used_bytes(), bed.held());
    let memory = bed.allocate(THREE, SHARED);
    let pattern = noise(THREE, 3);
    memory.write(0, &pattern).unwrap();
    let (announced, pieces) = bed.export(&memory);
    let region = bed.import(announced, pieces).unwrap();
    assert_eq!(region.bytes(), THREE);
    // The worker's own mapping is not needed for the memory to live.
    drop(memory);
    let mut found = vec![0; pattern.len()];
    region.read(0, &mut found).unwrap();
    assert_bytes(&found, &pattern, || "the imported region");
    drop(region);
    assert_eq!(bed.held(), held);
    assert_eq!(bed.used_bytes(), used, "no descriptor is left");
}

#[test]
fn an_import_that_fails_at_any_step_leaves_nothing() {
    let bed = Bed::open();
    let memory = bed.allocate(THREE, SHARED);
    for (function, calls) in [
        (Function::cuMemGetAllocationGranularity, 1),
        (Function::cuMemAddressReserve, 1),
        (Function::cuMemImportFromShareableHandle, 3),
        (Function::cuMemGetAllocationPropertiesFromHandle, 3),
        (Function::cuMemMap, 3),
        (Function::cuMemSetAccess, 1),
    ] {
        for nth in 1..=calls {
            let (announced, pieces) = bed.export(&memory);
            let fault = Fault::next(Act::Answer(CUresult(1)));
            bed.stub.arm(function, fault.nth(nth));
            let refusal = bed.refused(announced, pieces);
            assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
            assert!(refusal.sentence().contains("CUDA_ERROR_INVALID_VALUE"), "{refusal}");
            if calls > 1 {
                let piece = format!("piece {}", nth - 1);
                assert_eq!(refusal.subject(), piece, "{refusal}");
            }
        }
    }
    let (announced, pieces) = bed.export(&memory);
    bed.import(announced, pieces).unwrap();
}

#[test]
fn an_import_that_ends_early_leaves_nothing() {
    let bed = Bed::open();
    let memory = bed.allocate(THREE, SHARED);
    let held = bed.held();
    for given in 0..3 {
        let (announced, pieces) = bed.export(&memory);
        let mut import = bed.device.import(announced).unwrap();
        for piece in pieces.into_iter().take(given) {
            import.add(piece).unwrap();
        }
        if given == 1 {
            drop(import);
        } else {
            let refusal = import.finish().map(|_| ()).unwrap_err();
            assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
        }
        assert_eq!(bed.held(), held);
    }
}

#[test]
fn sizes_other_than_announced_are_refused() {
    let bed = Bed::open();
    let memory = bed.allocate(THREE, SHARED);
    let with = |change: &dyn Fn(&mut Announced, &mut Vec<Piece>)| {
        let (mut announced, mut pieces) = bed.export(&memory);
        change(&mut announced, &mut pieces);
        let refusal = bed.refused(announced, pieces);
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
        refusal
    };
    with(&|announced, _| announced.bytes += GRANULARITY_BYTES);
    with(&|announced, _| announced.bytes -= GRANULARITY_BYTES);
    with(&|announced, _| announced.bytes += 1);
    with(&|announced, _| announced.bytes = 0);
    with(&|announced, _| announced.bytes = u64::MAX);
    with(&|announced, _| announced.bytes = u64::MAX / GRANULARITY_BYTES * GRANULARITY_BYTES);
    with(&|announced, _| announced.pieces = 2);
    with(&|announced, _| announced.pieces = 4);
    with(&|announced, _| announced.pieces = 0);
    with(&|_, pieces| pieces[1].bytes = 0);
    with(&|_, pieces| pieces[1].bytes += 1);
    with(&|_, pieces| pieces[1].bytes = u64::MAX);
    // More than there is behind the descriptor: the piece is named.
    let refusal = with(&|_, pieces| pieces[1].bytes = 2 * GRANULARITY_BYTES);
    assert_eq!(refusal.subject(), "piece 1");
}

#[test]
fn what_is_no_handle_of_the_announced_kind_is_refused() {
    let bed = Bed::open();
    bed.stub.set(Knob::Fabric, true);
    let bytes = GRANULARITY_BYTES;
    let descriptors: [fn() -> PieceHandle; 3] = [
        || PieceHandle::Descriptor(File::open("/dev/null").unwrap().into()),
        || PieceHandle::Descriptor(memfd_create("test", MemfdFlags::CLOEXEC).unwrap()),
        || PieceHandle::Descriptor(rustix::pipe::pipe().unwrap().0),
    ];
    let values = [0, 1, 63, 64, 65, 1 << 20].map(|length| noise(length, 9));
    for kind in [HandleKind::CudaIpc, HandleKind::CudaVmm, HandleKind::CudaFabric] {
        let handles = descriptors.iter().map(|make| make());
        let handles = handles.chain(values.iter().cloned().map(|it| PieceHandle::Value(it.into())));
        for handle in handles {
            let announced = Announced { kind, bytes, pieces: 1 };
            let refusal = bed.refused(announced, vec![Piece { bytes, buffer: 1, handle }]);
            assert_eq!(refusal.code(), RefusalCode::HandleInvalid, "{refusal}");
        }
    }
    let announced = Announced { kind: HandleKind::Memfd, bytes, pieces: 1 };
    let refusal = bed.device.import(announced).map(|_| ()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HandleUnsupported);
}

#[test]
fn memory_of_another_device_is_refused() {
    let other = StubDevice { uuid: [5; 16], ..StubDevice::default() };
    let bed = Bed::over(Stub::create_with(&[StubDevice::default(), other]).unwrap());
    let memory = bed.exporter.allocate(CudaSelector::Ordinal(1), THREE, SHARED).unwrap();
    let (announced, pieces) = bed.export(&memory);
    let refusal = bed.refused(announced, pieces);
    assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
}

#[test]
fn fabric_handles_are_imported_like_descriptors() {
    let bed = Bed::open();
    bed.stub.set(Knob::Fabric, true);
    let context = &bed.device.context;
    let mut memory = PieceMapping::reserve(context, THREE).unwrap();
    for _ in 0..3 {
        let how = Some(Shareable::Fabric);
        let piece = MemoryHandle::create(context, GRANULARITY_BYTES, how).unwrap();
        memory.map(GRANULARITY_BYTES, &piece).unwrap();
    }
    memory.open_access().unwrap();
    let pattern = noise(THREE, 4);
    // SAFETY: the range is mapped.
    unsafe { context.enter().unwrap().write(memory.range().start, &pattern) }.unwrap();
    let mut export = bed.exporter.export(memory.range().start, THREE).unwrap();
    let announced = export.announced();
    assert_eq!(announced, Announced { kind: HandleKind::CudaFabric, bytes: THREE, pieces: 3 });
    let region = bed.import(announced, export.next_pieces(usize::MAX).unwrap()).unwrap();
    let mut found = vec![0; pattern.len()];
    region.read(0, &mut found).unwrap();
    assert_bytes(&found, &pattern, || "the imported region");
}

#[test]
fn two_imports_of_one_memory_are_two_allocations() {
    let bed = Bed::open();
    let memory = bed.allocate(THREE, SHARED);
    let import = || {
        let (announced, pieces) = bed.export(&memory);
        bed.import(announced, pieces).unwrap()
    };
    let (one, two) = (import(), import());
    assert_ne!(one.allocation(), two.allocation());
    one.write(GRANULARITY_BYTES, &[7; 16]).unwrap();
    let mut found = [0; 16];
    two.read(GRANULARITY_BYTES, &mut found).unwrap();
    assert_eq!(found, [7; 16], "they are the same memory all the same");
}

#[test]
fn a_sticky_error_is_the_device_lost_and_nothing_is_given_back_after_it() {
    let bed = Bed::open();
    let memory = bed.allocate(THREE, SHARED);
    let (announced, pieces) = bed.export(&memory);
    bed.stub.arm(Function::cuMemMap, Fault::next(Act::Answer(CUresult(719))).nth(2));
    let before = bed.report();
    let refusal = bed.import(announced, pieces).map(|_| ()).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::DeviceLost, "{refusal}");
    assert!(refusal.sentence().contains("CUDA_ERROR_LAUNCH_FAILED"), "{refusal}");
    let after = bed.report();
    for function in [Function::cuMemUnmap, Function::cuMemAddressFree, Function::cuMemRelease] {
        let calls = after.count(function) - before.count(function);
        // The first piece's handle was released while all was well.
        assert_eq!(calls, u64::from(function == Function::cuMemRelease), "{}", function.name());
    }
}
