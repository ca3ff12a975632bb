//! `statecopy doctor` as a user runs it: over a driver that does what a test wants, and on a machine that has none.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Knob, Stub, StubDevice};

/// The exit code of a machine with a problem.
const UNFIT: Option<i32> = Some(4);

/// Doctor on a machine with nothing: no driver, no compiler, no MPS, no daemon, no store.
fn doctor(place: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_statecopy"));
    command.arg("doctor").args(arguments).env_remove("STATECOPY_ADDR").stdin(Stdio::null());
    command.env("XDG_RUNTIME_DIR", place).env("STATECOPY_ARTIFACT_STORE", place.join("kernels"));
    command.env("CUDA_MPS_PIPE_DIRECTORY", place.join("pipes"));
    command.env("STATECOPY_CUDA__NVRTC_DIRECTORY", "/nowhere");
    command.env("STATECOPY_CUDA__DRIVER_LIBRARY", "/nowhere/libcuda.so.1");
    command.env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
    command
}

/// Doctor over a stub whose store is full.
fn over(stub: &Stub, arguments: &[&str]) -> Command {
    let mut command = doctor(stub.directory(), &[&["--json"], arguments].concat());
    command.envs(stub.environment()).env("STATECOPY_ARTIFACT_STORE", stub.fill_store());
    command.env("STATECOPY_CUDA__DRIVER_LIBRARY", stub.library());
    command
}

/// What was found, and the exit code, which must fit it.
fn report(command: &mut Command) -> (Value, Option<i32>) {
    let output: Output = command.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let exit = output.status.code();
    assert_eq!(exit == Some(0), report["problems"] == 0, "{report}");
    (report, exit)
}

fn all<'a>(report: &'a Value, check: &str) -> Vec<&'a Value> {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().filter(|finding| finding["check"] == check).collect()
}

fn only<'a>(report: &'a Value, check: &str) -> &'a Value {
    let found = all(report, check);
    assert_eq!(found.len(), 1, "{check} in {report}");
    found[0]
}

fn assert_found(report: &Value, check: &str, severity: &str, parts: &[&str]) {
    let finding = only(report, check);
    assert_eq!(finding["severity"], severity, "{finding}");
    let text = finding.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in {finding}");
    }
}

#[test]
fn a_sound_machine_is_described_and_has_no_problem() {
    let stub = Stub::create().unwrap();
    let (report, exit) = report(&mut over(&stub, &["--device", "cuda:0"]));
    assert_eq!(exit, Some(0), "{report}");
    assert_found(&report, "driver", "ok", &["CUDA 13.0"]);
    assert_found(&report, "nvrtc", "note", &["/nowhere", "sm_90"]);
    assert_found(&report, "device", "ok", &["Stub H200", "capability 9.0", "Fused is served"]);
    assert_found(&report, "compute_mode", "ok", &["default"]);
    assert_found(&report, "sharing", "note", &["Time slices", "do not share", "there is no"]);
    assert_found(&report, "connections", "ok", &["not set: 8", "statecopyd has 32"]);
    assert_found(&report, "memory", "ok", &["64.00 GiB"]);
    assert_found(&report, "stream_operations", "ok", &["64-bit word"]);
    assert_found(&report, "copies", "warning", &["11.2 us", "295", "one H200", "not here", "MPS"]);
    for check in
        ["page_size", "shared_memory", "cpus", "open_files", "locked_memory", "runtime_directory"]
    {
        only(&report, check);
    }
    assert_found(&report, "daemon", "note", &["no such socket"]);
    let page = include_str!("../../../docs/doctor.md");
    for finding in report["findings"].as_array().unwrap() {
        let row = format!("\n| `{}` |", finding["check"].as_str().unwrap());
        assert!(page.contains(&row), "{row} is missing in docs/doctor.md");
    }
    for process in stub.processes().unwrap() {
        assert_eq!(process.held(), [], "the probe gives back what it made");
    }
}

#[test]
fn the_report_has_one_shape_and_the_worst_comes_first() {
    let stub = Stub::create().unwrap();
    stub.set(Knob::Exclusive, true);
    let (report, exit) = report(&mut over(&stub, &[]));
    assert_eq!(exit, UNFIT);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&report), ["findings", "problems", "version", "warnings"]);
    let order = ["problem", "warning", "note", "ok"];
    let mut last = 0;
    for finding in report["findings"].as_array().unwrap() {
        assert_eq!(keys(finding), ["check", "device", "evidence", "meaning", "remedy", "severity"]);
        let place = order.iter().position(|name| finding["severity"] == **name).unwrap();
        assert!(place >= last, "{report}");
        last = place;
        let bad = place < 2;
        let told = |part: &str| !finding[part].as_str().unwrap().is_empty();
        assert!(told("evidence") && (!bad || told("meaning") && told("remedy")), "{finding}");
    }
    assert_found(&report, "compute_mode", "problem", &["Only one of worker and daemon"]);

    let text = over(&stub, &[]).output().unwrap();
    assert_eq!(text.status.code(), UNFIT);
    let text = doctor(stub.directory(), &[])
        .envs(stub.environment())
        .env("STATECOPY_CUDA__DRIVER_LIBRARY", stub.library())
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("PROBLEM "), "{text}");
    assert!(text.contains("\n        Do: "), "{text}");
}

#[test]
fn a_driver_that_hangs_is_ended_and_the_cause_is_named() {
    let hanging = |function, step: &str, pipes: bool| {
        let stub = Stub::create().unwrap();
        stub.arm(function, Fault::next(Act::Hang).lasting());
        if pipes {
            fs::create_dir(stub.directory().join("pipes")).unwrap();
            fs::write(stub.directory().join("pipes/control"), "").unwrap();
        }
        let begun = Instant::now();
        let (report, exit) = report(&mut over(&stub, &["--driver-timeout-ms", "500"]));
        assert_eq!(exit, UNFIT);
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert_found(&report, "driver_answers", "problem", &[step, "500ms", "was killed"]);
        let pid = stub.processes().unwrap().pop().unwrap().pid;
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the probe is killed and reaped");
        only(&report, "daemon");
        report
    };
    let report = hanging(Function::cuInit, "cuInit", true);
    assert_found(&report, "driver_answers", "problem", &["another user", "-multiuser-server"]);
    let report = hanging(Function::cuDevicePrimaryCtxRetain, "a context on cuda:0", false);
    assert_found(&report, "driver_answers", "problem", &["MPS is not to be seen", "Xid"]);
    only(&report, "device");
}

#[test]
fn a_driver_that_ends_the_process_is_a_problem() {
    let stub = Stub::create().unwrap();
    stub.arm(Function::cuInit, Fault::next(Act::Abort));
    let (report, _) = report(&mut over(&stub, &[]));
    assert_found(&report, "driver_answers", "problem", &["signal: 6", "cuInit"]);
}

#[test]
fn an_mps_server_that_takes_no_client_is_a_problem_with_its_remedy() {
    for function in [Function::cuInit, Function::cuDevicePrimaryCtxRetain] {
        let stub = Stub::create().unwrap();
        stub.arm(function, Fault::next(Act::Answer(CUresult::MPS_SERVER_NOT_READY)));
        let (report, exit) = report(&mut over(&stub, &[]));
        assert_eq!(exit, UNFIT);
        let check = if function == Function::cuInit { "driver" } else { "context" };
        assert_found(&report, check, "problem", &["(807)", "used the MPS server before its fault"]);
    }
}

#[test]
fn mps_is_told_from_time_slices_and_from_what_is_left_of_it() {
    let stub = Stub::create().unwrap();
    stub.set(Knob::Mps, true);
    stub.set(Knob::Exclusive, true);
    let (shared, exit) = report(&mut over(&stub, &[]));
    assert_eq!(exit, Some(0), "{shared}");
    assert_found(&shared, "sharing", "note", &["MPS: the driver says"]);
    assert_found(&shared, "copies", "ok", &["23.7", "not here"]);
    assert_found(&shared, "compute_mode", "ok", &["exclusive"]);
    assert_found(&shared, "connections", "ok", &["not set: 2"]);

    let stub = Stub::create().unwrap();
    fs::create_dir(stub.directory().join("pipes")).unwrap();
    fs::write(stub.directory().join("pipes/control"), "").unwrap();
    let (left, _) = report(&mut over(&stub, &[]));
    assert_found(&left, "sharing", "warning", &["Unclear", "pipes/control is there"]);
}

#[test]
fn too_little_memory_is_a_problem_and_little_a_warning() {
    for (memory, severity) in [(1_u64 << 20, "problem"), (100 << 20, "warning")] {
        let device = StubDevice { memory, ..StubDevice::default() };
        let stub = Stub::create_with(&[device]).unwrap();
        let (report, _) = report(&mut over(&stub, &[]));
        assert_found(&report, "memory", severity, &["MiB are free", "gpu_memory_utilization"]);
    }
    let stub = Stub::create().unwrap();
    let full = Fault::next(Act::Answer(CUresult::OUT_OF_MEMORY));
    stub.arm(Function::cuDevicePrimaryCtxRetain, full);
    let (report, _) = report(&mut over(&stub, &[]));
    assert_found(&report, "context", "problem", &["no memory left for a context"]);
}

#[test]
fn stream_operations_are_tried_and_not_trusted() {
    let not_supported = Act::Answer(CUresult::NOT_SUPPORTED);
    let nothing = Act::Answer(CUresult::SUCCESS);
    for (function, act, told) in [
        (Function::cuStreamWaitValue64_v2, not_supported, "CUDA_ERROR_NOT_SUPPORTED"),
        (Function::cuMemHostRegister_v2, not_supported, "cuMemHostRegister"),
        (Function::cuStreamWriteValue64_v2, nothing, "did not arrive"),
        (Function::cuStreamWaitValue64_v2, nothing, "went past its wait"),
    ] {
        let stub = Stub::create().unwrap();
        stub.arm(function, Fault::next(act).lasting());
        let (report, exit) = report(&mut over(&stub, &[]));
        assert_eq!(exit, UNFIT);
        assert_found(&report, "stream_operations", "problem", &[told]);
        assert_found(&report, "copies", "note", &["stream_operations"]);
    }
}

#[test]
fn every_device_is_looked_at_or_the_one_named() {
    let device = |number: u8, capability| StubDevice {
        uuid: [number; 16],
        name: format!("GPU {number}"),
        capability,
        ..StubDevice::default()
    };
    let devices = [device(1, (9, 0)), device(2, (7, 5))];
    let stub = Stub::create_with(&devices).unwrap();
    let named = |report: &Value| -> Vec<String> {
        let found = all(report, "stream_operations");
        found.iter().map(|finding| finding["device"].as_str().unwrap().to_owned()).collect()
    };
    let (both, _) = report(&mut over(&stub, &[]));
    assert_eq!(named(&both), ["cuda:0", "cuda:1"]);
    let uuid = "cuda:02020202-0202-0202-0202-020202020202";
    let (second, _) = report(&mut over(&stub, &["--device", uuid]));
    assert_eq!(named(&second), ["cuda:1"]);
    // The store is full for another chip.
    assert_found(&second, "device", "problem", &["GPU 2", "No store holds kernels for sm_75"]);
    stub.provide_compiler().unwrap();
    let nvrtc = stub.library().parent().unwrap().to_owned();
    let mut compiling = over(&stub, &["--device", uuid]);
    let (second, _) = report(compiling.env("STATECOPY_CUDA__NVRTC_DIRECTORY", nvrtc));
    assert_found(&second, "nvrtc", "ok", &["nvrtc-", "looked for in"]);
    assert_found(&second, "device", "warning", &["no Fused plans"]);
    let (none, exit) = report(&mut over(&stub, &["--device", "cuda:2"]));
    assert_eq!(exit, UNFIT);
    assert_found(&none, "devices", "problem", &["cuda:2 is not among the devices"]);
}

#[test]
fn a_missing_driver_is_a_problem_only_where_a_gpu_is_wanted() {
    let place = tempfile::tempdir().unwrap();
    let (wanted, exit) = report(&mut doctor(place.path(), &["--json", "--device", "cuda:0"]));
    assert_eq!(exit, UNFIT);
    assert_found(&wanted, "driver", "problem", &["cannot be loaded", "Install NVIDIA's driver"]);
    assert_found(&wanted, "nvrtc", "problem", &["no compiler", "statecopy kernels build"]);
    let (unwanted, exit) = report(&mut doctor(place.path(), &["--json"]));
    assert_eq!(exit, Some(0), "{unwanted}");
    assert_found(&unwanted, "driver", "note", &["cannot be loaded", "no GPU"]);
    let mut configured = doctor(place.path(), &["--json"]);
    let (configured, _) = report(configured.env("STATECOPY_DEVICES", "cuda:0"));
    assert_found(&configured, "driver", "problem", &["cannot be loaded"]);
    let (host, exit) = report(&mut doctor(place.path(), &["--json", "--device", "host"]));
    assert_eq!(exit, Some(0));
    assert!(all(&host, "driver").is_empty(), "{host}");
}

#[test]
fn this_machine_without_a_driver_can_serve_its_memory() {
    let place = tempfile::tempdir().unwrap();
    let mut command = doctor(place.path(), &["--json"]);
    let (report, exit) = report(command.env_remove("STATECOPY_CUDA__DRIVER_LIBRARY"));
    let loaded = |finding: &&Value| !finding["evidence"].to_string().contains("cannot be loaded");
    if all(&report, "driver").iter().any(loaded) || !all(&report, "driver_answers").is_empty() {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    assert_eq!(exit, Some(0), "{report}");
    assert_found(&report, "driver", "note", &["libcuda.so.1", "no GPU"]);
}

#[test]
fn a_driver_without_a_device_is_told_apart_from_none() {
    let stub = Stub::create_with(&[]).unwrap();
    let (report, exit) = report(&mut over(&stub, &[]));
    assert_eq!(exit, Some(0), "{report}");
    assert_found(&report, "devices", "note", &["sees no device", "CUDA_VISIBLE_DEVICES"]);
}

#[test]
fn connections_that_a_framework_limits_are_a_warning() {
    let stub = Stub::create().unwrap();
    for (text, severity) in [("1", "warning"), ("32", "ok"), ("many", "warning")] {
        let mut command = over(&stub, &[]);
        let (report, _) = report(command.env("CUDA_DEVICE_MAX_CONNECTIONS", text));
        assert_found(&report, "connections", severity, &[text]);
    }
}

#[test]
fn settings_that_the_daemon_refuses_are_a_problem() {
    let place = tempfile::tempdir().unwrap();
    let mut command = doctor(place.path(), &["--json", "--device", "host"]);
    let (report, exit) = report(command.env("STATECOPY_SLOTS", "3"));
    assert_eq!(exit, UNFIT);
    assert_found(&report, "settings", "problem", &["slots", "statecopyd config"]);
}

/// A process that ends with its test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_daemon_that_serves_is_found() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("statecopy");
    let daemon = Command::new(env!("CARGO_BIN_EXE_statecopy"))
        .args(["daemon", "serve", "--http-address", "off", "--runtime-dir"])
        .arg(&run)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Ending)
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let found = loop {
        let (report, _) = report(&mut doctor(place.path(), &["--json", "--device", "host"]));
        let finding = only(&report, "daemon").clone();
        if finding["severity"] == "ok" || Instant::now() > deadline {
            break finding;
        }
        thread::sleep(Duration::from_millis(20));
    };
    drop(daemon);
    assert_eq!(found["severity"], "ok", "{found}");
    let (report, _) = report(&mut doctor(place.path(), &["--json", "--device", "host"]));
    assert_found(&report, "daemon", "note", &["cannot be reached"]);
}

#[test]
fn help_teaches_what_is_looked_at_and_what_the_exit_codes_mean() {
    let place = tempfile::tempdir().unwrap();
    let help = doctor(place.path(), &["--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for part in
        ["Examples:", "--device host", "doctor itself never hangs", "Exit code 0", "4: at least"]
    {
        assert!(help.contains(part), "{part} in\n{help}");
    }
}
