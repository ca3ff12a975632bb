//! The Rust client against the real daemon.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::thread;

use rustix::process::Signal;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, ConnectOptions, DataType, Flags, Indices, Layer, Leaves, Memory, RefusalCode, Region,
    Registration, Request, Strides, Use,
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

impl Worker {
    fn new(daemon: &Daemon) -> Self {
        let options = ConnectOptions { wait_for: PATIENCE, ..ConnectOptions::default() };
        let address = Address::in_directory(daemon.runtime()).unwrap();
        let client = Client::connect(address, options).unwrap();
        let cache = client.allocate("cache", 6 * PAGE * 4).unwrap();
        let packed = client.allocate("packed", 4 * PAYLOAD as u64).unwrap();
        let region = client.register_region(&cache, Use::Cache).unwrap();
        let packed_region = client.register_region(&packed, Use::Packed).unwrap();
        let registration = Registration::new().layer(Layer {
            name: "layers.0".to_owned(),
            dtype: DataType::Float32,
            shape: [6, 2, 4, 16],
            strides: Strides::PageStride(PAGE),
            region,
            offset_bytes: 0,
            max_selected: 4,
            check_unique: false,
        });
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
    let worker = Worker::new(&daemon);
    worker.serves();
    let status = worker.client.inspect().unwrap();
    assert_eq!(status.sessions.len(), 1);
    worker.client.close().unwrap();
    until("the session is gone", || daemon.inspect().sessions.is_empty());
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
    let mut daemon = DaemonOptions::default().runtime(&runtime).start();
    let worker = Worker::new(&daemon);
    worker.serves();
    let device = daemon.device_process();
    daemon.signal(Signal::KILL);
    daemon.wait();
    until("the device process ends", || !runs(device));
    let next = DaemonOptions::default().runtime(&runtime).start();
    worker.serves();
    assert_eq!(next.inspect().sessions.len(), 1);
}

#[test]
fn a_copy_that_was_under_way_when_the_daemon_died_is_unavailable_and_unknown() {
    let mut daemon = Daemon::start();
    let worker = Worker::new(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
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
