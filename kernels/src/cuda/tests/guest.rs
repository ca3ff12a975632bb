//! A device in a process whose threads have contexts of their own.

use statecopy_stub_cuda::{Act, CUresult, Fault, Function, GRANULARITY_BYTES};

use super::*;

fn guest(bed: &Bed) -> CudaGuest {
    bed.exporter.guest(CudaSelector::Ordinal(0)).unwrap()
}

/// The context that is current in this thread.
pub(super) fn current(bed: &Bed) -> usize {
    type GetCurrent = unsafe extern "C" fn(*mut usize) -> i32;
    let mut context = 1;
    // SAFETY: the symbol is a function of the driver's interface, of this type.
    let get = unsafe { bed.entered.library().get::<GetCurrent>(b"cuCtxGetCurrent") }.unwrap();
    // SAFETY: the driver writes one handle.
    assert_eq!(unsafe { get(&raw mut context) }, 0);
    context
}

#[test]
fn a_guest_leaves_the_context_of_the_thread_alone() {
    let bed = Bed::open();
    let guest = guest(&bed);
    let before = bed.report();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = guest.allocate(GRANULARITY_BYTES + 1).unwrap();
            assert_eq!(memory.bytes(), GRANULARITY_BYTES + 1);
            guest.settle().unwrap();
            // SAFETY: the legacy default stream always lives.
            unsafe { guest.synchronize(0) }.unwrap();
            assert!(guest.memory_left().unwrap().free > 0);
            let mut export = bed.exporter.export(memory.address(), memory.bytes()).unwrap();
            assert_eq!(export.next_pieces(10).unwrap().len(), 1, "one piece of virtual memory");
            drop(memory);
            let error = guest.allocate(1 << 60).unwrap_err();
            assert!(matches!(error, OpenError::OutOfMemory { .. }), "{error}");
            assert_eq!(current(&bed), 0, "the thread has no context, as before");
        });
    });
    let after = bed.report();
    let more = |function| after.count(function) - before.count(function);
    assert_eq!(more(Function::cuCtxPushCurrent_v2), more(Function::cuCtxPopCurrent_v2));
}

#[test]
fn memory_is_given_back_only_once_the_device_has_done_what_it_was_asked() {
    let bed = Bed::open();
    let guest = guest(&bed);
    let used = bed.used_bytes();
    let settled = || bed.report().count(Function::cuCtxSynchronize);
    let before = settled();
    drop(guest.allocate(GRANULARITY_BYTES).unwrap());
    assert_eq!((bed.used_bytes(), settled()), (used, before + 1));
    let memory = guest.allocate(GRANULARITY_BYTES).unwrap();
    let capturing = Act::Answer(CUresult::INVALID_VALUE);
    bed.stub.arm(Function::cuCtxSynchronize, Fault::next(capturing));
    drop(memory);
    assert_eq!(bed.used_bytes(), used + GRANULARITY_BYTES, "whoever reads it may go on");
}

#[test]
fn another_allocation_at_the_same_address_has_another_number() {
    let bed = Bed::open();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let memory = bed.allocate(4096, Allocator::Default);
        let export = bed.exporter.export(memory.address() + 16, 16).unwrap();
        let [buffer] = export.buffers() else { panic!("{export:?}") };
        assert_eq!(buffer.address, memory.address());
        assert_eq!(bed.exporter.buffer_at(memory.address() + 4095), Ok(buffer.number));
        assert!(!seen.contains(&buffer.number));
        seen.push(buffer.number);
        let address = memory.address();
        drop((export, memory));
        assert_ne!(bed.exporter.buffer_at(address), Ok(seen[seen.len() - 1]));
    }
}

#[test]
fn every_piece_of_a_region_is_numbered() {
    let bed = Bed::open();
    let shared = Allocator::Virtual { piece_bytes: 0, shared: true };
    let memory = bed.allocate(3 * GRANULARITY_BYTES, shared);
    let export = bed.exporter.export(memory.address(), memory.bytes()).unwrap();
    let places = [0, 1, 2].map(|piece| memory.address() + piece * GRANULARITY_BYTES);
    let numbers = places.map(|place| bed.exporter.buffer_at(place).unwrap());
    let expected: Vec<Buffer> = places
        .into_iter()
        .zip(numbers)
        .map(|(address, number)| Buffer { address, number })
        .collect();
    assert_eq!(export.buffers(), expected);
    assert_ne!(numbers[0], numbers[1]);
}
