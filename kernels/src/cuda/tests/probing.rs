//! Looking at a driver: what works, what is refused, and what only seems to work.

use std::time::Duration;

use statecopy_stub_cuda::{Act, CUresult, Fault, Function, StubDevice};

use super::*;
use crate::cuda::probe::{ComputeMode, HELD, Probe, StreamOperationsError};

/// How long the stub's streams may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one that never will is waited for.
const SHORT: Duration = Duration::from_millis(50);

fn probe(stub: &Stub) -> Probe {
    Probe::open(&stub.library(), Path::new("/nowhere")).unwrap()
}

fn held(stub: &Stub) -> Vec<(Object, u64)> {
    stub.process(process::id()).unwrap().held()
}

#[test]
fn a_device_is_described_and_its_streams_write_and_wait() {
    let old = StubDevice { uuid: [7; 16], capability: (7, 5), ..StubDevice::default() };
    let stub = Stub::create_with(&[StubDevice::default(), old]).unwrap();
    let _entered = stub.enter();
    let probe = probe(&stub);
    assert_eq!(probe.version(), 13_000);
    let devices = probe.devices(None).unwrap();
    let fuses: Vec<bool> = devices.iter().map(|device| device.fuses).collect();
    assert_eq!(fuses, [true, false]);
    assert_eq!(devices[0].compute_mode, ComputeMode::Shared);
    assert!(devices[0].unified_addressing);
    assert_eq!(probe.seen_from_outside(&devices[0]), None);
    assert_eq!(probe.devices(Some(CudaSelector::Ordinal(1))).unwrap()[0].ordinal, 1);

    let context = probe.enter(&devices[0]).unwrap();
    assert_eq!(context.memory_left().unwrap().total, 64 << 30);
    context.try_stream_operations(PATIENCE, HELD).unwrap();
    drop(context);
    assert_eq!(held(&stub), [], "what was made to be looked at is given back");
}

#[test]
fn stream_operations_that_the_driver_refuses_are_told_with_its_words() {
    for function in [
        Function::cuMemHostRegister_v2,
        Function::cuStreamWriteValue64_v2,
        Function::cuStreamWaitValue64_v2,
    ] {
        let stub = Stub::create().unwrap();
        let _entered = stub.enter();
        let probe = probe(&stub);
        let context = probe.enter(&probe.devices(None).unwrap()[0]).unwrap();
        stub.arm(function, Fault::next(Act::Answer(CUresult::NOT_SUPPORTED)));
        let error = context.try_stream_operations(PATIENCE, HELD).unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{error}");
        drop(context);
        assert_eq!(held(&stub), []);
    }
}

#[test]
fn stream_operations_that_succeed_and_do_nothing_are_found() {
    let told = |function| {
        let stub = Stub::create().unwrap();
        let _entered = stub.enter();
        let probe = probe(&stub);
        let context = probe.enter(&probe.devices(None).unwrap()[0]).unwrap();
        stub.arm(function, Fault::next(Act::Answer(CUresult::SUCCESS)).lasting());
        context.try_stream_operations(SHORT, HELD).unwrap_err()
    };
    let error = told(Function::cuStreamWriteValue64_v2);
    assert!(matches!(error, StreamOperationsError::NotWritten(SHORT)), "{error}");
    let error = told(Function::cuStreamWaitValue64_v2);
    assert!(matches!(error, StreamOperationsError::NotHeld), "{error}");
}

#[test]
fn what_a_daemon_takes_for_itself_is_known_before_it_starts() {
    let bed = Bed::open();
    assert_eq!(own_memory(SELECTED_MAX), Some(bed.device.footprint()));
    assert!(own_memory(u64::MAX).is_none());
}
