//! The Rust client against the real daemon.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::path::Path;
use std::thread;

use rustix::process::Signal;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, ConnectOptions, DataType, Error, Flags, Indices, Layer, Leaves, Memory, Rebind,
    RefusalCode, Region, Registration, Request, Strides, Transport, Use,
};
use statecopy_tests::{Daemon, DaemonOptions, PATIENCE, runs, send_signal, until};

const PAYLOAD: usize = 2 * 4 * 16 * 4;
const PAGE: u64 = 200;

/// A client with one layer of six rows, each filled with its own number.
struct Worker {
    client: Client,
    cache: Memory,
    packed: Memory,
    packed_region: Region,
    plan: Plan,
}

fn layer(region: &Region) -> Layer {
    Layer {
        name: "layers.0".to_owned(),
        dtype: DataType::Float32,
        shape: [6, 2, 4, 16],
        strides: Strides::PageStride(PAGE),
        region: region.clone(),
        offset_bytes: 0,
        max_selected: 4,
        check_unique: false,
    }
}

impl Worker {
    fn new(daemon: &Daemon) -> Self {
        Self::over(daemon, Transport::default())
    }

    fn over(daemon: &Daemon, transport: Transport) -> Self {
        let options = ConnectOptions { wait_for: PATIENCE, transport, ..ConnectOptions::default() };
        let address = Address::in_directory(daemon.runtime()).unwrap();
        let client = Client::connect(address, options).unwrap();
        let cache = client.allocate("cache", 6 * PAGE * 4).unwrap();
        let packed = client.allocate("packed", 4 * PAYLOAD as u64).unwrap();
        let region = client.register_region(&cache, Use::Cache).unwrap();
        let packed_region = client.register_region(&packed, Use::Packed).unwrap();
        let registration = Registration::new().layer(layer(&region));
        let bindings = client.register(&registration, |_| {}).unwrap();
        let plan = bindings.layer("layers.0").unwrap().clone();
        for row in 0..6_u8 {
            cache.fill(u64::from(row) * PAGE * 4, PAYLOAD as u64, 10 + row).unwrap();
        }
        Self { client, cache, packed, packed_region, plan }
    }

    /// Gathers rows 5, 0 and a cleared one, and scatters other bytes to row 2.
    fn serves(&self) {
        self.packed.fill(0, 4 * PAYLOAD as u64, 99).unwrap();
        let gather = Request::new(Indices::Int32(&[5, 0, 3, -1]), self.packed_region.at(0));
        let flags = [true, true, false, true];
        let moved = self.plan.gather(gather.flags(Flags::Bools(&flags))).unwrap();
        assert_eq!((moved.copied, moved.masked), (2, 2));
        let states = self.packed.read_vec(0, 4 * PAYLOAD).unwrap();
        let expected = [[15; PAYLOAD], [10; PAYLOAD], [0; PAYLOAD], [0; PAYLOAD]].concat();
        assert_eq!(states, expected);
        let scatter = Request::new(Indices::Int64(&[2, 6]), self.packed_region.at(0));
        let moved = self.plan.scatter(scatter).unwrap();
        assert_eq!((moved.copied, moved.masked), (1, 1));
        assert_eq!(self.cache.read_vec(2 * PAGE * 4, PAYLOAD).unwrap(), [15; PAYLOAD]);
        self.cache.fill(2 * PAGE * 4, PAYLOAD as u64, 12).unwrap();
    }
}

#[test]
fn a_client_registers_copies_and_gives_everything_back() {
    let daemon = Daemon::start();
    for transport in [Transport::Ring, Transport::Grpc] {
        let worker = Worker::over(&daemon, transport);
        worker.serves();
        let status = worker.client.inspect().unwrap();
        assert_eq!(status.sessions.len(), 1);
        worker.client.close().unwrap();
        until("the session is gone", || daemon.inspect().sessions.is_empty());
    }
}

#[test]
fn a_closed_client_keeps_no_connection_whatever_of_it_is_left() {
    let mut daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    worker.serves();
    let clone = worker.client.clone();
    worker.client.close().unwrap();
    clone.clone().close().unwrap();
    assert!(matches!(clone.ping().unwrap_err(), Error::Closed));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let log = daemon.log();
    assert!(!log.contains("clients kept their connections"), "{log}");
    drop((worker.plan, clone));
}

#[test]
fn copies_on_the_ring_go_past_the_supervisor() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    stop(daemon.supervisor());
    worker.serves();
    daemon.signal(Signal::CONT);
    worker.client.ping().unwrap();
}

#[test]
fn several_copies_are_in_flight_at_once_and_each_is_waited_for_later() {
    let daemon = Daemon::start();
    for transport in [Transport::Ring, Transport::Grpc] {
        let worker = Worker::over(&daemon, transport);
        let at = |slot: u64| worker.packed_region.at(slot * PAYLOAD as u64);
        let flights = [4_i32, 3, 2, 1].map(|row| {
            let slot = u64::from(4 - row.cast_unsigned());
            worker.plan.submit_gather(Request::new(Indices::Int32(&[row]), at(slot))).unwrap()
        });
        for flight in flights {
            assert_eq!(flight.wait().unwrap().copied, 1);
        }
        let expected = [[14; PAYLOAD], [13; PAYLOAD], [12; PAYLOAD], [11; PAYLOAD]].concat();
        assert_eq!(worker.packed.read_vec(0, 4 * PAYLOAD).unwrap(), expected);

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let options = ConnectOptions { transport, ..ConnectOptions::default() };
            let address = Address::in_directory(daemon.runtime()).unwrap();
            let client = statecopy_client::Client::connect(address, options).await.unwrap();
            let region = client.register_region(&worker.cache, Use::Cache).await.unwrap();
            let packed = client.register_region(&worker.packed, Use::Packed).await.unwrap();
            let registration = Registration::new().layer(layer(&region));
            let bindings = client.register(&registration, |_| {}).await.unwrap();
            let plan = bindings.layer("layers.0").unwrap();
            let ask = |row: &'static [i32]| Request::new(Indices::Int32(row), packed.at(0));
            let first = plan.submit_gather(ask(&[0])).await.unwrap();
            // Only the ring keeps the order of a lane: gRPC calls overtake each other.
            if transport == Transport::Grpc {
                worker.packed.fill(0, PAYLOAD as u64, 10).unwrap();
            }
            let second = plan.submit_scatter(ask(&[5])).await.unwrap();
            assert_eq!(second.wait().await.unwrap().copied, 1);
            assert_eq!(first.wait().await.unwrap().copied, 1);
            assert_eq!(plan.gather(ask(&[1])).await.unwrap().copied, 1);
            client.close().await.unwrap();
        });
        assert_eq!(worker.cache.read_vec(5 * PAGE * 4, PAYLOAD).unwrap(), [10; PAYLOAD]);
    }
}

/// Stops a process, and waits until none of its threads runs.
fn stop(pid: u32) {
    send_signal(pid, Signal::STOP).unwrap();
    let stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    until("every thread stands still", || {
        std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(stopped)
    });
}

#[test]
fn copies_in_flight_when_the_device_process_dies_are_answered_by_the_next() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let device = daemon.device_process();
    stop(device);
    let ask = |row: &'static [i32]| Request::new(Indices::Int32(row), worker.packed_region.at(0));
    let flights = [worker.plan.submit_gather(ask(&[5])), worker.plan.submit_scatter(ask(&[1]))];
    send_signal(device, Signal::KILL).unwrap();
    for flight in flights {
        assert_eq!(flight.unwrap().wait().unwrap().copied, 1);
    }
    assert_eq!(worker.cache.read_vec(PAGE * 4, PAYLOAD).unwrap(), [15; PAYLOAD]);
}

#[test]
fn a_copy_that_no_device_process_had_begun_when_the_daemon_died_moved_nothing() {
    let mut daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let device = daemon.device_process();
    stop(device);
    let ask = Request::new(Indices::Int32(&[1]), worker.packed_region.at(0));
    let flight = worker.plan.submit_gather(ask).unwrap();
    daemon.signal(Signal::KILL);
    daemon.wait();
    let error = flight.wait().unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::Unavailable), "{error}");
    assert_eq!(error.leaves(), Leaves::NothingMoved, "{error}");
    assert!(!runs(device), "it was known dead before it was said");
}

#[test]
fn a_client_sees_a_pause_when_the_device_process_dies() {
    let daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    for _ in 0..2 {
        send_signal(daemon.device_process(), Signal::KILL).unwrap();
        worker.serves();
    }
}

#[test]
fn a_client_registers_with_the_next_daemon_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = folder.path().join("run");
    let daemon = DaemonOptions::default().runtime(&runtime).start();
    let worker = Worker::new(&daemon);
    worker.serves();
    let next = replace(daemon, &runtime);
    worker.serves();
    assert_eq!(next.inspect().sessions.len(), 1);
}

#[test]
fn layers_that_sleep_while_the_daemon_is_replaced_wake_by_a_rebind() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = folder.path().join("run");
    let daemon = DaemonOptions::default().runtime(&runtime).start();
    let worker = Worker::new(&daemon);
    let asleep = worker.client.layer("layers.0").unwrap().region;
    worker.client.release_region(asleep).unwrap();
    let gather = || Request::new(Indices::Int32(&[5]), worker.packed_region.at(0));
    let error = worker.plan.gather(gather()).unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::RegionUnknown), "{error}");

    let next = replace(daemon, &runtime);
    let error = worker.plan.gather(gather()).unwrap_err();
    assert_eq!(error.leaves(), Leaves::NothingMoved, "{error}");
    let region = worker.client.register_region(&worker.cache, Use::Cache).unwrap();
    let wake = Rebind { layer: "layers.0".to_owned(), region, offset_bytes: 0 };
    worker.client.rebind(&[wake]).unwrap();
    worker.serves();
    drop(next);
}

/// Kills a daemon, and starts the next one in its place.
fn replace(mut daemon: Daemon, runtime: &Path) -> Daemon {
    let device = daemon.device_process();
    daemon.signal(Signal::KILL);
    daemon.wait();
    until("the device process ends", || !runs(device));
    DaemonOptions::default().runtime(runtime).start()
}

#[test]
fn a_copy_that_was_under_way_when_the_daemon_died_is_unavailable_and_unknown() {
    let mut daemon = Daemon::start();
    let worker = Worker::over(&daemon, Transport::Grpc);
    let device = daemon.device_process();
    stop(device);
    let (plan, packed) = (worker.plan.clone(), worker.packed_region.clone());
    let copy = thread::spawn(move || plan.gather(Request::new(Indices::Int32(&[1]), packed.at(0))));
    until("it is under way", || daemon.metric("statecopy_requests_pending") == 1.0);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let error = copy.join().unwrap().unwrap_err();
    assert_eq!(error.code(), Some(RefusalCode::Unavailable), "{error}");
    assert_eq!(error.leaves(), Leaves::Unknown, "{error}");
    until("the device process ends", || !runs(device));
}
