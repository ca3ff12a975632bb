//! Memory that processes share, and what the end or the fault of one does to the others.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;

use statecopy_stub_cuda::{
    Act, CUresult, Fault, Function, GRANULARITY_BYTES, Knob, Object, Stub, StubDevice, Whose,
};

use crate::calls::Driver;
use crate::peer::Peer;
use crate::until;

const ABORTED: i32 = 6;

/// Descriptors that a process has open.
fn descriptors(peer: &Peer) -> usize {
    fs::read_dir(format!("/proc/{}/fd", peer.pid())).unwrap().count()
}

#[test]
fn a_legacy_handle_is_the_memory_of_another_process() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    let handle = peer.hold(5000, 7);
    let driver = Driver::open(&stub);
    let memory = driver.open_handle(handle).unwrap();
    assert_eq!(driver.read(memory, 5000), Ok(vec![7; 5000]));
    assert_eq!(driver.read(memory, 5001), Err(CUresult::INVALID_VALUE));
    assert_eq!(driver.open_handle(handle), Ok(memory), "opened again, the same address");
    driver.cuIpcCloseMemHandle(memory).unwrap();
    driver.read(memory, 1).unwrap();
    driver.cuIpcCloseMemHandle(memory).unwrap();
    assert_eq!(driver.cuIpcCloseMemHandle(memory), Err(CUresult::INVALID_VALUE));
    assert_eq!(driver.read(memory, 1), Err(CUresult::INVALID_VALUE));
}

#[test]
fn handles_of_the_own_process_of_nobody_and_of_freed_memory_are_refused() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let own = driver.export(driver.allocate(100).unwrap()).unwrap();
    assert_eq!(driver.open_handle(own), Err(CUresult::INVALID_CONTEXT));
    let mut peer = Peer::open(&stub);
    let mut handle = peer.hold(100, 1);
    assert_eq!(peer.ask("free"), "0");
    assert_eq!(driver.open_handle(handle), Err(CUresult::INVALID_VALUE));
    handle.0[60] = 1;
    assert_eq!(driver.open_handle(handle), Err(CUresult::INVALID_VALUE));
}

#[test]
fn a_handle_can_come_back_for_other_memory() {
    let stub = Stub::create().unwrap();
    stub.set(Knob::ReuseHandles, true);
    let mut peer = Peer::open(&stub);
    let first = peer.hold(4096, 1);
    let driver = Driver::open(&stub);
    let memory = driver.open_handle(first).unwrap();
    assert_eq!(peer.ask("free"), "0");
    let second = peer.hold(8192, 2);
    assert_eq!(first, second);
    assert_eq!(driver.open_handle(second), Ok(memory), "it is still open");
    assert_eq!(driver.read(memory, 1), Ok(vec![1]), "the old bytes");
    driver.cuIpcCloseMemHandle(memory).unwrap();
    driver.cuIpcCloseMemHandle(memory).unwrap();
    let memory = driver.open_handle(second).unwrap();
    assert_eq!(driver.read(memory, 8192), Ok(vec![2; 8192]));
}

#[test]
fn opened_memory_outlives_its_process_and_is_then_opened_by_nobody_else() {
    let stub = Stub::create().unwrap();
    let device = StubDevice::default();
    let (mut peer, mut late) = (Peer::open(&stub), Peer::open(&stub));
    let handle = peer.hold(4096, 9);
    let driver = Driver::open(&stub);
    let memory = driver.open_handle(handle).unwrap();
    let pid = peer.pid();
    peer.kill();
    assert_eq!(driver.read(memory, 4096), Ok(vec![9; 4096]));
    assert_eq!(late.take(handle), "1", "its process is gone");
    assert_eq!(stub.used_bytes(&device).unwrap(), 4096);
    driver.cuIpcCloseMemHandle(memory).unwrap();
    until("nobody uses the memory", || stub.used_bytes(&device).unwrap() == 0);
    assert_eq!(driver.open_handle(handle), Err(CUresult::INVALID_VALUE));
    let report = stub.process(pid).unwrap();
    assert!(!report.alive);
    assert_eq!(report.live(Object::Allocation), 1, "what it held at its end");
}

#[test]
fn all_processes_share_the_memory_of_a_device() {
    let memory = 4 * GRANULARITY_BYTES;
    let stub = Stub::create_with(&[StubDevice { memory, ..StubDevice::default() }]).unwrap();
    let mut peer = Peer::open(&stub);
    peer.hold(6 << 20, 1);
    let driver = Driver::open(&stub);
    assert_eq!(driver.allocate(4 << 20), Err(CUresult::OUT_OF_MEMORY));
    assert_eq!(peer.ask("free-bytes"), (2 << 20).to_string());
    peer.kill();
    until("a dead process's memory is free", || driver.allocate(4 << 20).is_ok());
}

#[test]
fn a_process_may_see_devices_in_an_order_of_its_own() {
    let named = |name: &str, byte| StubDevice {
        uuid: [byte; 16],
        name: name.into(),
        ..StubDevice::default()
    };
    let (first, second) = (named("First", 1), named("Second", 2));
    let stub = Stub::create_with(&[first.clone(), second.clone()]).unwrap();
    let mut plain = Peer::open(&stub);
    let mut other = Peer::start_with(&stub, Some(StubDevice::describe(&[second, first])));
    assert_eq!(other.ask("open"), "0");
    assert_eq!((plain.ask("name"), other.ask("name")), ("First".into(), "Second".into()));
    let driver = Driver::open(&stub);
    let handle = other.hold(100, 1);
    assert_eq!(driver.open_handle(handle), Err(CUresult::INVALID_DEVICE), "of the other device");
}

#[test]
fn a_fault_hits_the_process_and_the_call_that_it_is_for() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    let driver = Driver::open(&stub);
    let refused = Act::Answer(CUresult::OUT_OF_MEMORY);
    stub.arm(Function::cuMemAlloc_v2, Fault::next(refused).nth(2).of(peer.pid()));
    for _ in 0..3 {
        driver.allocate(100).unwrap();
    }
    assert_eq!(peer.hold(100, 1).0[..8], *b"stub-ipc");
    assert_eq!(peer.ask("hold 100 1"), "2");
    peer.hold(100, 1);
}

#[test]
fn a_call_that_hangs_returns_when_it_is_let_go() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    stub.arm(Function::cuMemAlloc_v2, Fault::next(Act::Hang).of(peer.pid()));
    peer.tell("hold 100 1");
    let calls = |stub: &Stub| stub.process(peer.pid()).unwrap().count(Function::cuMemAlloc_v2);
    until("the call has begun", || calls(&stub) == 1);
    let logged = stub.process(peer.pid()).unwrap().names();
    assert!(!logged.contains(&"cuMemAlloc_v2"), "and has not returned");
    stub.clear(Function::cuMemAlloc_v2);
    assert_ne!(peer.answer(), "");
}

#[test]
fn a_sealed_process_that_allocates_is_aborted() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    peer.hold(100, 1);
    stub.abort_on_allocation(Some(Whose::Process(peer.pid())));
    assert_eq!(peer.ask("free"), "0", "other calls are no allocations");
    peer.tell("hold 100 1");
    assert_eq!(peer.wait().signal(), Some(ABORTED));
}

#[test]
fn a_faulted_kernel_hurts_its_own_process_only() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    let driver = Driver::open(&stub);
    stub.fault_next_kernel(Some(Whose::Process(peer.pid())));
    assert_eq!(peer.ask("launch"), "700");
    assert_eq!(peer.ask("hold 100 1"), "700");
    driver.allocate(100).unwrap();
    Peer::open(&stub).hold(100, 1);
}

#[test]
fn under_mps_a_faulted_kernel_hurts_all_and_new_processes_wait_for_their_end() {
    let stub = Stub::create().unwrap();
    stub.set(Knob::Mps, true);
    let (mut peer, mut other) = (Peer::open(&stub), Peer::open(&stub));
    stub.fault_next_kernel(Some(Whose::Process(peer.pid())));
    assert_eq!(peer.ask("launch"), "700");
    assert_eq!(other.ask("hold 100 1"), "700");
    let mut new = Peer::start(&stub);
    assert_eq!(new.ask("open"), "807");
    peer.kill();
    assert_eq!(new.ask("open"), "807", "one of the old processes still lives");
    other.kill();
    assert_eq!(new.ask("open"), "0");
    new.hold(100, 1);
}

#[test]
fn under_mps_a_process_killed_in_its_kernel_hurts_all_and_an_idle_one_nobody() {
    let stub = Stub::create().unwrap();
    stub.set(Knob::Mps, true);
    let (mut idle, mut busy, mut other) = (Peer::open(&stub), Peer::open(&stub), Peer::open(&stub));
    idle.kill();
    other.hold(100, 1);
    stub.hold_kernels(Some(Whose::Process(busy.pid())));
    busy.tell("launch");
    until("the kernel runs", || stub.process(busy.pid()).unwrap().kernels() == 1);
    busy.kill();
    assert_eq!(other.ask("hold 100 1"), "700");
    other.kill();
    Peer::open(&stub).hold(100, 1);
}

#[test]
fn thousands_of_pieces_take_no_descriptor() {
    let stub = Stub::create().unwrap();
    let mut peer = Peer::open(&stub);
    let before = descriptors(&peer);
    assert_eq!(peer.ask("pieces 3000"), "0");
    peer.hold(100, 1);
    assert_eq!(descriptors(&peer), before);
    assert_eq!(stub.process(peer.pid()).unwrap().live(Object::Mapping), 3000);
}
