//! Memory that one process has, and what the driver says of it.

use std::ptr;

use statecopy_stub_cuda::{CUresult, Function, Knob, Object, Stub, StubDevice};

use crate::calls::{Driver, out};
use crate::until;

const MEMORY_TYPE: u32 = 2;
const BUFFER_ID: u32 = 7;
const LEGACY_CAPABLE: u32 = 10;
const HANDLE_TYPES: u32 = 14;
const POOL: u32 = 17;
const MAPPING_SIZE: u32 = 18;
const MAPPING_BASE: u32 = 19;

#[test]
fn nothing_works_before_the_driver_is_initialised() {
    let stub = Stub::create().unwrap();
    let driver = Driver::load(&stub);
    assert_eq!(driver.allocate(1), Err(CUresult::NOT_INITIALIZED));
    driver.cuInit(0).unwrap();
    assert_eq!(driver.allocate(1), Err(CUresult::INVALID_CONTEXT));
}

#[test]
fn what_was_written_is_read() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let memory = driver.holding(&[7; 100]);
    driver.cuMemsetD8_v2(memory + 10, 1, 20).unwrap();
    let read = driver.read(memory, 100).unwrap();
    assert!(read[..10].iter().chain(&read[30..]).all(|byte| *byte == 7));
    assert!(read[10..30].iter().all(|byte| *byte == 1));
    assert_eq!(driver.read(memory, 101), Err(CUresult::INVALID_VALUE), "past the end");
    driver.cuMemFree_v2(memory).unwrap();
    assert_eq!(driver.read(memory, 1), Err(CUresult::INVALID_VALUE));
    assert_eq!(driver.cuMemFree_v2(memory), Err(CUresult::INVALID_VALUE));
}

#[test]
fn a_range_is_the_whole_allocation() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let memory = driver.allocate(5000).unwrap();
    let mut bytes = 0;
    let base = out(|at| driver.cuMemGetAddressRange_v2(at, &raw mut bytes, memory + 4999));
    assert_eq!((base, bytes), (Ok(memory), 5000));
    let beyond = driver.cuMemGetAddressRange_v2(ptr::null_mut(), ptr::null_mut(), memory + 5000);
    assert_eq!(beyond, Err(CUresult::NOT_FOUND));
}

#[test]
fn a_device_runs_out_of_memory_and_has_it_back() {
    let small = StubDevice { memory: 1 << 20, ..StubDevice::default() };
    let stub = Stub::create_with(&[small]).unwrap();
    let driver = Driver::open(&stub);
    let half = driver.allocate(1 << 19).unwrap();
    assert_eq!(driver.allocate((1 << 19) + 1), Err(CUresult::OUT_OF_MEMORY));
    let free = || {
        let mut total = 0;
        out(|at| driver.cuMemGetInfo_v2(at, &raw mut total)).unwrap()
    };
    assert_eq!(free(), 1 << 19);
    driver.cuMemFree_v2(half).unwrap();
    until("the memory is free again", || free() == 1 << 20);
    driver.allocate(1 << 20).unwrap();
    assert_eq!(driver.allocate(usize::MAX), Err(CUresult::OUT_OF_MEMORY));
    let host = out(|at| driver.cuMemHostAlloc(at, usize::MAX, 3));
    assert_eq!(host, Err(CUresult::OUT_OF_MEMORY));
}

#[test]
fn attributes_tell_the_allocators_apart() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let default = driver.allocate(4096).unwrap();
    let pool = out(|at| driver.cuMemAllocAsync(at, 4096, 0)).unwrap();
    let host = out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
    stub.set(Knob::PoolMemory, true);
    let knob = driver.allocate(4096).unwrap();
    let of = |at| {
        let int = |attribute| driver.attribute::<u32>(attribute, at).unwrap();
        let long = |attribute| driver.attribute::<u64>(attribute, at).unwrap();
        (int(MEMORY_TYPE), int(LEGACY_CAPABLE), long(HANDLE_TYPES), long(POOL) != 0)
    };
    assert_eq!(of(default + 100), (2, 1, 0, false));
    assert_eq!(of(pool), (2, 0, 0, true));
    assert_eq!(of(knob), (2, 0, 0, true));
    assert_eq!(of(host), (1, 0, 0, false));
    assert_eq!(driver.attribute(MAPPING_BASE, default + 100), Ok(default));
    assert_eq!(driver.attribute(MAPPING_SIZE, default + 100), Ok(4096_u64));
    let buffer = |at| driver.attribute::<u64>(BUFFER_ID, at).unwrap();
    assert_ne!(buffer(default), buffer(pool));
    assert_eq!(driver.attribute::<u64>(BUFFER_ID, 4096), Err(CUresult::INVALID_VALUE));
}

#[test]
fn an_address_that_comes_back_is_another_buffer() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let first = driver.allocate(4096).unwrap();
    let buffer = driver.attribute::<u64>(BUFFER_ID, first).unwrap();
    driver.cuMemFree_v2(first).unwrap();
    let second = driver.allocate(4096).unwrap();
    assert_ne!(driver.attribute::<u64>(BUFFER_ID, second), Ok(buffer));
}

#[test]
fn what_is_held_and_what_was_called_is_told() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let pid = std::process::id();
    let memory = driver.allocate(4096).unwrap();
    let freed = out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
    driver.cuMemFreeHost(freed).unwrap();
    out(|at| driver.cuMemHostAlloc(at, 4096, 3)).unwrap();
    let report = stub.process(pid).unwrap();
    assert!(report.alive);
    let held = [(Object::Context, 1), (Object::Allocation, 1), (Object::HostAllocation, 1)];
    assert_eq!(report.held(), held);
    driver.cuMemFree_v2(memory).unwrap();
    driver.close();
    let report = stub.process(pid).unwrap();
    assert!(!report.alive);
    assert_eq!(report.held(), []);
    assert_eq!(report.torn_down(), 1, "the host memory went with its context");
    let last =
        ["cuMemHostAlloc", "cuMemFree_v2", "cuCtxSetCurrent", "cuDevicePrimaryCtxRelease_v2"];
    assert!(report.names().ends_with(&last), "{:?}", report.names());
    let free = report.calls.iter().find(|call| call.function == Function::cuMemFree_v2).unwrap();
    assert_eq!((free.arguments[0], free.result), (memory, CUresult::SUCCESS));
    assert_eq!(report.count(Function::cuMemAlloc_v2), 1);
}

#[test]
fn devices_are_as_they_were_described() {
    let large = StubDevice { name: "Large".into(), capability: (10, 3), ..StubDevice::default() };
    let slice = StubDevice { uuid: [9; 16], parent: Some(large.uuid), ..StubDevice::default() };
    let stub = Stub::create_with(&[slice, large]).unwrap();
    let driver = Driver::open(&stub);
    assert_eq!(out(|at| driver.cuDeviceGetCount(at)), Ok(2));
    assert_eq!(out(|at| driver.cuDeviceGetUuid_v2(at, 0)), Ok([9; 16]));
    let mut name = [0_u8; 4];
    driver.cuDeviceGetName(name.as_mut_ptr().cast(), 4, 1).unwrap();
    assert_eq!(&name, b"Lar\0");
    let capability = [75, 76].map(|each| out(|at| driver.cuDeviceGetAttribute(at, each, 1)));
    assert_eq!(capability, [Ok(10), Ok(3)]);
    assert_eq!(
        driver.cuDeviceGetName(name.as_mut_ptr().cast(), 4, 2),
        Err(CUresult::INVALID_DEVICE)
    );
}

#[test]
fn new_memory_is_not_clear() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let memory = driver.allocate(1 << 20).unwrap();
    let read = driver.read(memory, 1 << 20).unwrap();
    assert!(read[0] != 0 && read[read.len() - 1] != 0);
}
