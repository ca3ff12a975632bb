//! CUDA devices: opened, refused, chosen, lost and found, over the stub driver.

use std::fs;

use rustix::process::Signal;
use statecopy_client::blocking::Client;
use statecopy_client::{Address, ConnectOptions, Error, RefusalCode};
use statecopy_kernels::cuda::{Allocator, CudaSelector};
use statecopy_proto::v1::OpenRequest;
use statecopy_proto::{PROTOCOL_NEWEST, Refusal};
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Object, StubDevice};
use statecopy_tests::{
    CudaBed, CudaWorker, DaemonOptions, PIECES, Session, WorkerProcess, send_signal, until,
};

fn device(byte: u8, name: &str) -> StubDevice {
    StubDevice { uuid: [byte; 16], name: name.to_owned(), ..StubDevice::default() }
}

const FIRST: &str = "01010101-0101-0101-0101-010101010101";
const SECOND: &str = "02020202-0202-0202-0202-020202020202";

/// A daemon that must not come up: its exit code, and what it says.
fn refused(options: DaemonOptions) -> (Option<i32>, String) {
    let mut daemon = options.spawn();
    let status = daemon.wait();
    assert!(!daemon.control_socket().exists());
    (status.code(), daemon.log())
}

fn refusal(error: Error) -> Refusal {
    match error {
        Error::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_daemon_serves_in_spite_of_a_store_that_it_cannot_use_and_warns() {
    let bed = CudaBed::default();
    let filled = bed.stub.store();
    let damaged = bed.stub.directory().join("damaged");
    for chip in fs::read_dir(&filled).unwrap().map(Result::unwrap) {
        for class in fs::read_dir(chip.path()).unwrap().map(Result::unwrap) {
            let directory = damaged.join(chip.file_name()).join(class.file_name());
            fs::create_dir_all(&directory).unwrap();
            for file in fs::read_dir(class.path()).unwrap().map(Result::unwrap) {
                fs::write(directory.join(file.file_name()), "damaged").unwrap();
            }
        }
    }
    let blocked = bed.stub.directory().join("file");
    fs::write(&blocked, "").unwrap();
    let mut daemon = bed
        .daemon()
        .setting("artifact_store", &format!("{:?}", blocked.join("kernels")))
        .setting("artifact_stores", &format!("[{damaged:?}, {filled:?}]"))
        .start();
    drop(CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES)));
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let log = daemon.log();
    let warned = |parts: &[&str]| {
        let mut warnings = log.lines().filter(|line| line.contains(" WARN "));
        warnings.any(|line| parts.iter().all(|part| line.contains(part)))
    };
    let (blocked, damaged) = (blocked.display().to_string(), damaged.display().to_string());
    assert!(warned(&[&blocked, "Not a directory", "remedy", "artifact_store"]), "{log}");
    assert!(warned(&[&damaged, "is broken", "remedy", "Remove the file"]), "{log}");
}

#[test]
fn a_device_that_cannot_serve_ends_the_start_and_says_what_is_missing() {
    let bed = CudaBed::over(&[device(1, "one")]);
    for (options, code, parts) in [
        (
            bed.daemon().setting("cuda.driver_library", "\"/nowhere/libcuda.so.1\""),
            69,
            vec!["DEVICE_NOT_VISIBLE", "/nowhere/libcuda.so.1", "Install NVIDIA's driver"],
        ),
        (
            bed.daemon().setting("devices", "[\"cuda:3\"]"),
            69,
            vec!["Device cuda:3 does not serve", "DEVICE_NOT_VISIBLE", "cuda:0 (one, 01010101-"],
        ),
        (
            bed.daemon().setting("artifact_stores", "[]"),
            69,
            vec!["PREPARE_FAILED", "one (sm_90)", "hold kernels for none", "NVRTC"],
        ),
        (
            bed.daemon().setting("artifact_stores", "[\"/nowhere/kernels\"]"),
            69,
            vec!["PREPARE_FAILED", "/nowhere/kernels"],
        ),
        (
            bed.daemon().setting("devices", &format!("[\"cuda:0\", \"cuda:GPU-{FIRST}\"]")),
            78,
            vec!["cuda:0", "same device", FIRST],
        ),
        (
            bed.daemon().setting("devices", "[\"cuda:all\"]"),
            78,
            vec!["devices", "cuda:all", "cuda:ORDINAL"],
        ),
    ] {
        let (status, log) = refused(options);
        assert_eq!(status, Some(code), "{log}");
        for part in parts {
            assert!(log.contains(part), "{part} in:\n{log}");
        }
    }
}

#[test]
fn a_device_whose_every_kernel_is_broken_is_not_served() {
    let bed = CudaBed::over(&[device(1, "one")]);
    for class in fs::read_dir(bed.stub.directory().join("kernels/sm_90")).unwrap() {
        for artifact in fs::read_dir(class.unwrap().path()).unwrap() {
            let artifact = artifact.unwrap().path();
            let whole = fs::read(&artifact).unwrap();
            fs::write(&artifact, &whole[..whole.len() - 1]).unwrap();
        }
    }
    let (status, log) = refused(bed.daemon());
    assert_eq!(status, Some(69), "{log}");
    assert!(log.contains("hold kernels for sm_90, and none for sm_90 is whole"), "{log}");
}

#[test]
fn a_device_without_room_for_the_daemon_is_not_served() {
    let bed = CudaBed::over(&[StubDevice { memory: 1 << 20, ..device(1, "one") }]);
    let (status, log) = refused(bed.daemon());
    assert_eq!(status, Some(69), "{log}");
    assert!(log.contains("no memory left") && log.contains("1048576"), "{log}");
}

#[test]
fn a_worker_finds_its_device_by_uuid_whatever_the_ordinals_are() {
    let devices = [device(1, "one"), device(2, "two")];
    let bed = CudaBed::over(&devices);
    let [one, two] = devices;
    let turned = StubDevice::describe(&[two, one]);
    // For the daemon the second device is the first.
    let daemon = bed.daemon().variable("STATECOPY_STUB_CUDA_DEVICES", turned).start();
    let served = daemon.inspect().devices.remove(0).device.unwrap();
    assert_eq!((served.kind.as_str(), served.uuid.as_str()), ("cuda", SECOND));
    assert_eq!((served.name.as_str(), served.family.as_str()), ("two", "sm_90"));
    let client = bed.client(&daemon);
    let allocate = |ordinal| {
        let device = CudaSelector::Ordinal(ordinal);
        bed.exporter.allocate(device, 1 << 20, Allocator::Default).unwrap()
    };
    let (other, memory) = (allocate(0), allocate(1));
    client.register_device_memory(memory.address(), memory.bytes()).unwrap();
    let refused = client.register_device_memory(other.address(), other.bytes()).unwrap_err();
    let refused = refusal(refused);
    assert_eq!(refused.code(), RefusalCode::DeviceNotVisible);
    assert!(refused.sentence().contains(FIRST) && refused.sentence().contains(SECOND), "{refused}");
    assert_eq!(daemon.inspect().sessions[0].regions.len(), 1);
}

#[test]
fn a_slice_of_a_device_is_not_the_device() {
    let whole = device(1, "whole");
    let slice = StubDevice { parent: Some(whole.uuid), ..device(3, "slice") };
    let bed = CudaBed::over(&[slice]);
    let seen = StubDevice::describe(&[whole]);
    let daemon = bed.daemon().variable("STATECOPY_STUB_CUDA_DEVICES", seen).start();
    let memory = bed.allocate(1 << 20, PIECES);
    let client = bed.client(&daemon);
    let refused = client.register_device_memory(memory.address(), memory.bytes()).unwrap_err();
    let refused = refusal(refused);
    assert_eq!(refused.code(), RefusalCode::DeviceNotVisible, "{refused}");
    let device = Some("MIG-03030303-0303-0303-0303-030303030303".to_owned());
    let options = ConnectOptions { device, ..bed.options() };
    let address = Address::in_directory(daemon.runtime()).unwrap();
    let refused = refusal(Client::connect(address, options).unwrap_err());
    assert_eq!(refused.code(), RefusalCode::DeviceNotVisible, "{refused}");
    assert!(refused.sentence().contains(FIRST), "{refused}");
}

#[test]
fn a_session_chooses_among_several_devices_by_uuid() {
    let bed = CudaBed::over(&[device(1, "one"), device(2, "two")]);
    let devices = format!("[\"host\", \"cuda:1\", \"cuda:MIG-{FIRST}\"]");
    let daemon = bed.daemon().setting("devices", &devices).start();
    let inspected = daemon.inspect();
    let kinds: Vec<String> = inspected
        .devices
        .iter()
        .map(|device| device.device.as_ref().unwrap().name.clone())
        .collect();
    assert_eq!(kinds[1..], ["two", "one"]);
    let pids: std::collections::BTreeSet<u32> =
        inspected.devices.iter().map(|device| device.device_process_pid).collect();
    assert_eq!(pids.len(), 3, "each has a process of its own");
    let open = |uuid: &str| {
        let device_uuid = uuid.to_owned();
        let protocol_version = PROTOCOL_NEWEST;
        let request = OpenRequest { protocol_version, device_uuid, ..OpenRequest::default() };
        Session::open_as(daemon.wire(), request)
    };
    for (named, uuid) in
        [(FIRST, FIRST), (SECOND, SECOND), ("GPU-02020202-0202-0202-0202-020202020202", SECOND)]
    {
        let session = open(named).unwrap();
        assert_eq!(session.opened.device.as_ref().unwrap().uuid, uuid);
    }
    for named in ["", "03030303-0303-0303-0303-030303030303", "cuda:0"] {
        let refusal = open(named).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::DeviceNotVisible);
        for part in [FIRST, SECOND, "one", "two"] {
            assert!(refusal.sentence().contains(part), "{refusal}");
        }
    }
    // The client's own way, and memory of either device.
    let address = Address::in_directory(daemon.runtime()).unwrap();
    for (uuid, ordinal) in [(FIRST, 0), (SECOND, 1)] {
        let device = Some(format!("GPU-{uuid}"));
        let options = ConnectOptions { device, ..bed.options() };
        let client = Client::connect(address.clone(), options).unwrap();
        let selector = CudaSelector::Ordinal(ordinal);
        let memory = bed.exporter.allocate(selector, 1 << 20, Allocator::Default).unwrap();
        client.register_device_memory(memory.address(), memory.bytes()).unwrap();
        client.close().unwrap();
    }
}

#[test]
fn what_the_daemon_takes_of_the_device_is_told_and_taken_before_it_is_ready() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let device = daemon.device_process();
    let environment = fs::read(format!("/proc/{device}/environ")).unwrap();
    let connections = b"CUDA_DEVICE_MAX_CONNECTIONS=32".as_slice();
    assert!(environment.split(|byte| *byte == 0).any(|variable| variable == connections));
    let footprint = daemon.inspect().devices[0].footprint.unwrap();
    assert!(footprint.tables_bytes > 0 && footprint.words_bytes > 0, "{footprint:?}");
    let scraped = daemon.get("/metrics").body;
    let tables = format!(
        "statecopy_device_footprint_bytes{{device=\"{}\",part=\"tables\"}} {}",
        daemon.inspect().devices[0].device.as_ref().unwrap().uuid,
        footprint.tables_bytes
    );
    assert!(scraped.contains(&tables), "{tables} in:\n{scraped}");
    let ready = bed.report(device).live(Object::Allocation);
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    worker.copy_both_ways();
    assert_eq!(bed.report(device).live(Object::Allocation), ready);
}

#[test]
fn a_device_process_that_died_is_followed_by_one_that_knows_every_binding() {
    let bed = CudaBed::default();
    for allocator in [Allocator::Default, PIECES] {
        let daemon = bed.daemon().start();
        let memory = bed.allocate(8 << 20, allocator);
        let mut worker = CudaWorker::register(&bed, bed.client(&daemon), memory);
        worker.copy_both_ways();
        let signature = worker.plan.as_async().signature();
        let died = daemon.device_process();
        let held = bed.report(died).held();
        send_signal(died, Signal::KILL).unwrap();
        until("another device process serves", || {
            let device = &daemon.inspect().devices[0];
            device.ready && device.restarts == 1
        });
        worker.copy_both_ways();
        assert_eq!(worker.plan.as_async().signature(), signature);
        bed.wait_for(daemon.device_process(), &held);
    }
}

#[test]
fn a_legacy_handle_of_a_worker_with_the_device_process_number_is_opened_by_the_next_one() {
    const PEER_ACCESS_NOT_POSSIBLE: CUresult = CUresult(201);
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let open = Function::cuIpcOpenMemHandle_v2;
    bed.stub.arm(open, Fault::next(Act::Answer(PEER_ACCESS_NOT_POSSIBLE)));
    let memory = bed.allocate(1 << 20, Allocator::Default);
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), memory);
    worker.copy_both_ways();
    assert_eq!(daemon.inspect().devices[0].restarts, 1);

    // Where it is not the number that is in the way, nobody tries for ever.
    let always = Fault { lasting: true, ..Fault::next(Act::Answer(PEER_ACCESS_NOT_POSSIBLE)) };
    bed.stub.arm(open, always);
    let memory = bed.allocate(1 << 20, Allocator::Default);
    let refused = worker.client.register_device_memory(memory.address(), memory.bytes());
    let refused = refusal(refused.unwrap_err());
    assert_eq!(refused.code(), RefusalCode::HandleInvalid, "{refused}");
    assert!(refused.sentence().contains("same number"), "{refused}");
}

#[test]
fn layers_whose_memory_does_not_come_back_sleep_until_they_are_bound_to_other_memory() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let memory = bed.allocate(1 << 20, Allocator::Default);
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), memory);
    // The packed buffer's handle is opened first, then that of the cache.
    let gone = Fault::next(Act::Answer(CUresult::INVALID_VALUE)).nth(2);
    bed.stub.arm(Function::cuIpcOpenMemHandle_v2, gone);
    for restarts in 1..=2 {
        send_signal(daemon.device_process(), Signal::KILL).unwrap();
        until("another device process serves", || {
            let device = &daemon.inspect().devices[0];
            device.ready && device.restarts == restarts
        });
        let refused = refusal(worker.try_copy_both_ways().unwrap_err());
        assert_eq!(refused.code(), RefusalCode::RegionUnknown, "{refused}");
    }
    worker.wake();
    worker.copy_both_ways();
}

#[test]
fn a_killed_worker_gives_its_device_memory_back() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let device = daemon.device_process();
    let mut survivor =
        CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, Allocator::Default));
    let held = bed.report(device).held();
    let used = bed.stub.used_bytes(&StubDevice::default()).unwrap();
    let mut worker = WorkerProcess::start_in(&daemon.control_socket(), bed.stub.environment());
    assert_eq!(worker.say("device"), "shared");
    assert_ne!(bed.report(device).held(), held);
    survivor.copy_both_ways();
    worker.kill();
    bed.wait_for(device, &held);
    until("the memory itself is free", || {
        bed.stub.used_bytes(&StubDevice::default()).unwrap() == used
    });
    survivor.copy_both_ways();
    assert_eq!(daemon.inspect().sessions.len(), 1);
}
