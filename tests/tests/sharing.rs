//! Pooled buffers, and memory that is registered at first sight, against the real daemon.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::any::Any;
use std::process;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::sharing::{Buffer, Pool, Regions};
use statecopy_client::{
    Address, ConnectOptions, DataType, Error, Indices, Layer, Memory, RefusalCode, Registration,
    Request, Slice, Strides,
};
use statecopy_kernels::cuda::Allocator;
use statecopy_stub_cuda::{Function, GRANULARITY_BYTES};
use statecopy_tests::{CudaBed, CudaWorker, Daemon, DaemonOptions, PATIENCE, PIECES, until};

const PAYLOAD: usize = 2 * 4 * 16 * 4;

fn connect(daemon: &Daemon) -> Client {
    let options = ConnectOptions { wait_for: PATIENCE, ..ConnectOptions::default() };
    Client::connect(Address::in_directory(daemon.runtime()).unwrap(), options).unwrap()
}

/// How many regions the daemon has, of all sessions.
fn regions(daemon: &Daemon) -> usize {
    daemon.inspect().sessions.iter().map(|session| session.regions.len()).sum()
}

/// A layer of six rows, each filled with its own number.
fn layer(client: &Client, regions: &Regions) -> (Memory, Plan) {
    let cache = client.allocate("cache", 6 * PAYLOAD as u64).unwrap();
    for row in 0..6_u8 {
        let at = u64::from(row) * PAYLOAD as u64;
        cache.fill(at, PAYLOAD as u64, 10 + row).unwrap();
    }
    let Slice { region, offset } = regions.pin_memory(&cache, 0, cache.bytes()).unwrap();
    let layer = Layer {
        name: "layers.0".to_owned(),
        dtype: DataType::Float32,
        shape: [6, 2, 4, 16],
        strides: Strides::PageStride(2 * 4 * 16),
        region,
        offset_bytes: offset,
        max_selected: 4,
        check_unique: false,
    };
    let bindings = client.register(&Registration::new().layer(layer), |_| {}).unwrap();
    (cache, bindings.layer("layers.0").unwrap().clone())
}

/// Gathers row 3 into a buffer and looks at it.
fn gathers(plan: &Plan, into: &Buffer) {
    plan.gather(Request::new(Indices::Int32(&[3]), into.slice().clone())).unwrap();
    let bytes = into.memory().unwrap().read_vec(0, PAYLOAD).unwrap();
    assert_eq!(bytes, [13; PAYLOAD]);
}

fn holder() -> Arc<dyn Any + Send + Sync> {
    Arc::new(())
}

fn weak(holder: &Arc<dyn Any + Send + Sync>) -> Weak<dyn Any + Send + Sync> {
    Arc::downgrade(holder)
}

#[test]
fn a_buffer_that_came_back_is_lent_again_without_the_daemon() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let (_cache, plan) = layer(&client, &Regions::new(&client));
    let pool = Pool::new(&client, None, None);
    let first = pool.take(PAYLOAD as u64, 0).unwrap();
    gathers(&plan, &first);
    let address = first.address();
    let second = pool.take(PAYLOAD as u64, 0).unwrap();
    assert_ne!(second.address(), address);
    drop(first);
    let before = regions(&daemon);
    for _ in 0..100 {
        let again = pool.take(PAYLOAD as u64, 0).unwrap();
        assert_eq!(again.address(), address);
    }
    assert_eq!(regions(&daemon), before);
    let counters = pool.counters();
    assert_eq!((counters.hits, counters.misses, counters.buffers), (100, 2, 2));
    assert_eq!(counters.bytes_in_use, second.bytes());
}

#[test]
fn a_tensor_in_a_lent_buffer_is_found_and_one_in_a_free_buffer_is_not() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let pool = Pool::new(&client, None, None);
    assert!(pool.find(0, 1).is_none());
    let buffer = pool.take(4096, 0).unwrap();
    let (at, bytes) = (buffer.address(), buffer.bytes());
    let found = pool.find(at + 64, bytes - 64).unwrap();
    assert_eq!(found.offset, 64);
    assert!(pool.find(at + 64, bytes).is_none() && pool.find(at - 1, 2).is_none());
    drop(buffer);
    assert!(pool.find(at, 1).is_none());
}

#[test]
fn a_full_pool_says_its_limit_and_goes_on_when_something_came_back() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let pool = Pool::new(&client, Some(1 << 20), None);
    let half = pool.take(512 << 10, 0).unwrap();
    let Error::Refused(refusal) = pool.take(768 << 10, 0).unwrap_err() else { panic!() };
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    for figure in ["786432", "1048576", "524288"] {
        assert!(refusal.sentence().contains(figure), "{refusal}");
    }
    assert!(refusal.remedy().contains("pool"), "{}", refusal.remedy());
    let small = pool.take(64 << 10, 0).unwrap();
    drop((small, half));
    let large = pool.take(1 << 20, 0).unwrap();
    assert_eq!(regions(&daemon), 1, "what was free made room");
    assert_eq!(pool.counters().bytes, large.bytes());
    drop(large);
    assert_eq!(pool.trim(), 1 << 20);
    assert_eq!((regions(&daemon), pool.counters().bytes), (0, 0));
}

#[test]
fn buffers_outlive_the_daemon_and_serve_with_the_next_one() {
    let mut daemon = Daemon::start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let (_cache, plan) = layer(&client, &known);
    let pool = Pool::new(&client, None, None);
    let (lent, free) = (pool.take(4096, 0).unwrap(), pool.take(4096, 0).unwrap());
    let free_at = free.address();
    drop(free);
    gathers(&plan, &lent);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let runtime = daemon.runtime().to_owned();
    let next = DaemonOptions::default().runtime(&runtime).start();
    gathers(&plan, &lent);
    let again = pool.take(4096, 0).unwrap();
    assert_eq!(again.address(), free_at);
    gathers(&plan, &again);
    assert_eq!(regions(&next), 3);
}

#[test]
fn a_pool_without_a_daemon_is_trimmed_all_the_same() {
    const TIMEOUT: Duration = Duration::from_millis(200);
    let mut daemon = Daemon::start();
    let options =
        ConnectOptions { wait_for: PATIENCE, call_timeout: TIMEOUT, ..ConnectOptions::default() };
    let address = Address::in_directory(daemon.runtime()).unwrap();
    let client = Client::connect(address, options).unwrap();
    let (pool, known) = (Pool::new(&client, None, None), Regions::new(&client));
    let held = holder();
    let memories: Vec<Memory> =
        (0..64).map(|_| client.allocate("operand", 4096).unwrap()).collect();
    for memory in &memories {
        known.of_memory(memory, weak(&held), 0, 4096).unwrap().unwrap();
    }
    drop((0..64).map(|_| pool.take(4096, 0).unwrap()).collect::<Vec<_>>());
    daemon.signal(Signal::KILL);
    daemon.wait();
    let begun = Instant::now();
    assert_eq!((pool.trim(), known.trim()), (64 * (64 << 10), 64 * 4096));
    assert!(begun.elapsed() < 10 * 2 * TIMEOUT, "two calls that nobody answers, not 128");
    assert_eq!((pool.counters().buffers, known.counters().kept), (0, 0));
}

#[test]
fn buffers_of_a_closed_client_come_back_to_nobody() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let pool = Pool::new(&client, None, None);
    let (lent, free) = (pool.take(4096, 0).unwrap(), pool.take(4096, 0).unwrap());
    let memory = lent.memory().unwrap().clone();
    drop(free);
    client.close().unwrap();
    pool.close();
    memory.fill(0, 16, 7).unwrap();
    assert_eq!(pool.counters().buffers, 1);
    drop(lent);
    assert_eq!((pool.counters().buffers, pool.counters().bytes), (0, 0));
    assert!(matches!(pool.take(4096, 0), Err(Error::Closed)));
    let gone = Pool::new(&connect(&daemon), None, None);
    let last = gone.take(4096, 0).unwrap();
    drop(gone);
    until("the session went with its client", || daemon.inspect().sessions.is_empty());
    assert_eq!(last.memory().unwrap().read_vec(0, 4).unwrap(), [0; 4]);
}

#[test]
fn host_memory_is_registered_once_and_released_when_its_holder_is_gone() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let memory = client.allocate("operand", 1 << 20).unwrap();
    let held = holder();
    let place = |offset, bytes| known.of_memory(&memory, weak(&held), offset, bytes).unwrap();
    let offsets: Vec<u64> = [(0, 16), (4096, 1 << 16), (0, 1 << 20)]
        .map(|(at, bytes)| place(at, bytes).unwrap().offset)
        .into();
    assert_eq!(offsets, [0, 4096, 0]);
    assert_eq!((regions(&daemon), known.counters().registered), (1, 1));
    known.sweep();
    assert_eq!(regions(&daemon), 1, "it is still held");
    drop(held);
    known.sweep();
    assert_eq!((regions(&daemon), known.counters().dropped, known.counters().kept), (0, 1, 0));
}

#[test]
fn memory_that_a_request_is_about_stays_registered_while_others_are_let_go() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let (_cache, plan) = layer(&client, &known);
    let held = holder();
    let memories: Vec<Memory> =
        (0..2).map(|_| client.allocate("operand", PAYLOAD as u64).unwrap()).collect();
    let [asked, other] = [0, 1]
        .map(|at| known.of_memory(&memories[at], weak(&held), 0, PAYLOAD as u64).unwrap().unwrap());
    drop(other);
    assert_eq!(known.trim(), PAYLOAD as u64);
    plan.gather(Request::new(Indices::Int32(&[3]), asked)).unwrap();
    assert_eq!(memories[0].read_vec(0, PAYLOAD).unwrap(), [13; PAYLOAD]);
    assert_eq!(known.trim(), PAYLOAD as u64);
    assert_eq!(regions(&daemon), 1);
}

#[test]
fn of_many_regions_the_least_recently_used_are_released_and_pinned_ones_never() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let (_cache, plan) = layer(&client, &known);
    let held = holder();
    let memories: Vec<Memory> =
        (0..300).map(|_| client.allocate("operand", 4096).unwrap()).collect();
    for memory in &memories {
        known.of_memory(memory, weak(&held), 0, 16).unwrap().unwrap();
        known.of_memory(&memories[0], weak(&held), 0, 16).unwrap().unwrap();
    }
    let counters = known.counters();
    assert_eq!((counters.kept, counters.registered, counters.dropped), (257, 301, 44));
    assert_eq!(regions(&daemon), 257);
    known.freeze();
    let place = |memory| known.of_memory(memory, weak(&held), 0, 16).unwrap();
    assert!(place(&memories[0]).is_some() && place(&memories[299]).is_some());
    assert!(place(&memories[1]).is_none(), "nothing new once frozen");
    assert_eq!(known.trim(), 256 * 4096);
    assert_eq!(regions(&daemon), 1);
    let pool = Pool::new(&client, None, None);
    gathers(&plan, &pool.take(4096, 0).unwrap());
    known.pin_only(&[]);
    assert_eq!((known.counters().kept, known.trim()), (0, 0));
}

#[test]
fn the_daemons_own_limit_makes_room_by_releasing_what_nobody_pinned() {
    let daemon = DaemonOptions::default().setting("limits.regions_max", "8").start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let (_cache, _plan) = layer(&client, &known);
    let held = holder();
    let memories: Vec<Memory> =
        (0..20).map(|_| client.allocate("operand", 4096).unwrap()).collect();
    for memory in &memories {
        assert!(known.of_memory(memory, weak(&held), 0, 16).unwrap().is_some());
    }
    let pool = Pool::new(&client, None, None);
    known.trim();
    let lent: Vec<Buffer> = (0..7).map(|_| pool.take(16, 0).unwrap()).collect();
    assert!(
        known.of_memory(&memories[0], weak(&held), 0, 16).unwrap().is_none(),
        "copy it instead"
    );
    assert_eq!(pool.take(16, 0).unwrap_err().code(), Some(RefusalCode::QuotaExceeded));
    drop(lent);
}

#[test]
fn threads_share_a_pool_and_what_is_known_of_memory() {
    let daemon = Daemon::start();
    let client = connect(&daemon);
    let known = Regions::new(&client);
    let (_cache, plan) = layer(&client, &known);
    let pool = Pool::new(&client, Some(16 << 20), None);
    let held = holder();
    thread::scope(|scope| {
        for worker in 0..4_u8 {
            let (plan, pool, known, client, held) = (&plan, &pool, &known, &client, &held);
            scope.spawn(move || {
                let row = worker + 1;
                let rows = [i32::from(row)];
                let request = |at| Request::new(Indices::Int32(&rows), at).lane(worker.into());
                for round in 0..100_u64 {
                    let buffer = pool.take((round % 7 + 1) * PAYLOAD as u64, 0).unwrap();
                    plan.gather(request(buffer.slice().clone())).unwrap();
                    let gathered = buffer.memory().unwrap().read_vec(0, PAYLOAD).unwrap();
                    assert_eq!(gathered, [10 + row; PAYLOAD]);
                    let operand = client.allocate("operand", PAYLOAD as u64).unwrap();
                    let place = known.of_memory(&operand, weak(held), 0, PAYLOAD as u64).unwrap();
                    plan.gather(request(place.unwrap())).unwrap();
                    let gathered = operand.read_vec(0, PAYLOAD).unwrap();
                    assert_eq!(gathered, [10 + row; PAYLOAD]);
                    if round % 10 == 9 {
                        pool.trim();
                        known.trim();
                    }
                }
            });
        }
    });
    assert_eq!(pool.counters().bytes_in_use, 0);
    pool.trim();
    known.trim();
    assert_eq!((regions(&daemon), known.counters().kept), (1, 1));
}

#[test]
fn a_device_buffer_stays_with_its_stream_where_there_is_no_order_of_streams() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    let pool = Pool::new(&worker.client, Some(3 * GRANULARITY_BYTES), None);
    let waits = || bed.report(process::id()).count(Function::cuCtxSynchronize);
    let before = waits();
    let first = pool.take(4096, 1).unwrap();
    let address = first.address();
    assert_eq!(first.bytes(), GRANULARITY_BYTES);
    drop(first);
    assert_eq!(pool.take(4096, 1).unwrap().address(), address);
    let others = [(); 2].map(|()| pool.take(4096, 2).unwrap());
    assert!(others.iter().all(|other| other.address() != address));
    // No room: the first one is given up, and not freed before somebody may wait.
    let third = pool.take(4096, 2).unwrap();
    assert_eq!((waits(), pool.counters().misses), (before, 4));
    let gathered = Request::new(Indices::Int32(&[1, -1]), third.slice().clone());
    worker.plan.gather(gathered).unwrap();
    assert!(pool.find(third.address(), 4096).is_some());
    drop((others, third));
    assert_eq!(pool.trim(), 4 * GRANULARITY_BYTES);
    assert!(waits() > before);
    worker.copy_both_ways();
}

#[test]
fn device_memory_is_registered_once_and_anew_when_another_allocation_is_there() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let client = bed.client(&daemon);
    let known = Regions::new(&client);
    let mut places = Vec::new();
    for allocator in [Allocator::Default, PIECES] {
        let before = known.counters().registered;
        let mut memory = bed.allocate(4 * GRANULARITY_BYTES, allocator);
        for _ in 0..3 {
            for offset in [0, 64, GRANULARITY_BYTES + 16] {
                let place = known.of_device(memory.address() + offset, 3 * GRANULARITY_BYTES - 16);
                let Slice { region, offset } = place.unwrap().unwrap();
                assert!(offset < region.bytes());
            }
            places.push(memory.address());
            drop(memory);
            memory = bed.allocate(4 * GRANULARITY_BYTES, allocator);
        }
        let counters = known.counters();
        assert!(counters.registered >= before + 3, "{counters:?}");
        assert!(counters.registered <= before + 6, "{counters:?}");
    }
    assert!(places.windows(2).any(|pair| pair[0] == pair[1]), "the stub gives addresses again");
    known.trim();
    assert_eq!(regions(&daemon), 0);
}

#[test]
fn the_other_operand_of_a_request_is_known_by_the_first_where_one_allocation_holds_both() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let client = bed.client(&daemon);
    let known = Regions::new(&client);
    let asked = || bed.report(process::id()).count(Function::cuPointerGetAttribute);
    for allocator in [Allocator::Default, PIECES] {
        let memory = bed.allocate(4 * GRANULARITY_BYTES, allocator);
        let (start, end) = (memory.address(), memory.address() + 4 * GRANULARITY_BYTES);
        known.of_device(start, 4 * GRANULARITY_BYTES).unwrap().unwrap();
        let before = asked();
        let first = known.known(start + 64, 16).unwrap();
        assert_eq!(asked(), before + 1, "whether the allocation is the same");
        for address in [start, start + 32, start + 128] {
            let beside = Regions::known_beside(address, 16, &first).unwrap();
            assert_eq!(beside.offset + start + 64, first.offset + address);
        }
        // What was asked of one piece says nothing of the next.
        let last = Regions::known_beside(end - 16, 16, &first);
        assert_eq!(last.is_some(), matches!(allocator, Allocator::Default));
        assert!(Regions::known_beside(end - 16, 32, &first).is_none());
        assert!(Regions::known_beside(start - 16, 16, &first).is_none());
        assert_eq!(asked(), before + 1);
    }
}

#[test]
fn memory_that_cannot_be_shared_is_asked_about_once() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let client = bed.client(&daemon);
    let known = Regions::new(&client);
    let shared = bed.allocate(4096, Allocator::Default);
    assert!(known.of_device(shared.address(), 4096).unwrap().is_some());
    let hidden = bed.allocate(4096, Allocator::Virtual { piece_bytes: 0, shared: false });
    let asked = || bed.report(process::id()).count(Function::cuPointerGetAttribute);
    let place = || known.of_device(hidden.address(), 4096).unwrap();
    let before = asked();
    assert!(place().is_none());
    let first = asked() - before;
    assert!(place().is_none());
    assert_eq!(asked() - before - first, 1, "its number alone");
    let error = known.pin_device(hidden.address(), 4096).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::HandleUnsupported));
    let error = known.of_device(16, 16).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::HandleInvalid), "{error}");
}

#[test]
fn an_operand_that_was_freed_does_not_keep_the_next_session_from_opening() {
    let bed = CudaBed::default();
    let mut daemon = bed.daemon().start();
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    let known = Regions::new(&worker.client);
    let operand = bed.allocate(4096, Allocator::Default);
    known.of_device(operand.address(), 4096).unwrap().unwrap();
    drop(operand);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let runtime = daemon.runtime().to_owned();
    let _next = bed.daemon().runtime(&runtime).start();
    worker.copy_both_ways();
}
