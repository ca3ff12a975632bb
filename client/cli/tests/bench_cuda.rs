//! The benchmark on a GPU, over a driver that has none: every path must run and copy right, and the record must say what was
//! measured. No speed is asserted.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use statecopy_stub_cuda::Stub;

fn bench(stub: &Stub, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_statecopy"));
    command.arg("bench").args(arguments).env_remove("STATECOPY_ADDR");
    command.envs(stub.environment()).env("STATECOPY_ARTIFACT_STORE", stub.fill_store());
    // The stub's folder has a compiler where a test asked for one.
    let nvrtc = stub.library().parent().unwrap().to_owned();
    command.env("STATECOPY_CUDA__NVRTC_DIRECTORY", nvrtc).output().unwrap()
}

#[test]
fn a_run_on_a_gpu_measures_every_path_and_names_the_device() {
    let stub = Stub::create().unwrap();
    let file = stub.directory().join("run.json");
    let output = file.to_str().unwrap();
    let chosen = ["--cases", "empty,24576/s8/,kimi-k3-tp8/s1/scatter"];
    let small = ["--device", "cuda:0", "--cache-rows", "9", "--trials", "2"];
    let ran = bench(&stub, &[&["--output", output], &chosen[..], &small].concat());
    assert!(ran.status.success(), "{ran:?}");

    let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(record["device"]["kind"], "cuda");
    assert_eq!(record["settings"]["daemon"]["devices"], "cuda:0");
    assert!(record["device"]["configuration"]["architecture"].as_str().unwrap().starts_with("sm_"));
    let paths = ["control", "grpc", "inproc", "inproc_nocheck", "inproc_preallocated", "ring"];
    for case in ["empty", "24576/s8/gather", "24576/s8/clear", "kimi-k3-tp8/s1/scatter"] {
        for mode in ["host_enqueue", "wall"] {
            let measured = record["samples_us"][case][mode].as_object().unwrap();
            assert_eq!(measured.keys().collect::<Vec<_>>(), paths, "{case} {mode}");
            for (path, samples) in measured {
                assert_eq!(samples.as_array().unwrap().len(), 2, "{case} {mode} {path}");
            }
        }
    }
    let table = String::from_utf8(ran.stdout).unwrap();
    assert!(table.contains("kimi-k3-tp8/s1/scatter: ring / inproc"), "{table}");
}

/// A rival that says what it was asked, and nothing true.
const RIVAL: &str = r#"
import json, sys
print(json.dumps({"facts": {"name": "a stand-in"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    times = {"own": [2.0], "control": [2.0], "triton": [1.0]}
    kernels = {"calls": request.get("calls", 0), "graph_us": {"8": times}, "memcpy_bytes": 1, "memcpy_us": [1.0]}
    if request["ask"] == "kernels":
        code = open(request["code"], "rb").read()
        assert code.startswith(b"\x7fELF") and ["shape", 0, 4] in request["arguments"], request
    answers = {"prepare": {}, "time": {"us": 1e6}, "kernels": {"kernels": kernels}}
    if request["ask"] == "time":
        assert not set(request["before"]) & set(request["rows"]), request
    print(json.dumps(answers[request["ask"]]), flush=True)
"#;

#[test]
fn a_rival_is_measured_beside_the_daemon_and_reported_with_what_was_seen_beside() {
    let stub = Stub::create().unwrap();
    stub.provide_compiler().unwrap();
    let file = stub.directory().join("run.json");
    let program = stub.directory().join("rival.py");
    fs::write(&program, RIVAL).unwrap();
    let rival = format!("python3 {}", program.display());
    let output = file.to_str().unwrap();
    let chosen = ["--cases", "24576/s1/,two_workers,start,kernels,register"];
    let small = ["--device", "cuda:0", "--cache-rows", "9", "--trials", "1", "--rival", &rival];
    let ran = bench(&stub, &[&["--output", output], &chosen[..], &small].concat());
    assert!(ran.status.success(), "{ran:?}");

    let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(record["rival"]["name"], "a stand-in");
    assert_eq!(record["kernels"]["calls"], 100);
    for path in ["triton", "triton_preallocated", "triton_jit", "torch_index"] {
        assert_eq!(record["medians_us"]["24576/s1/gather"]["wall"][path], 1e6, "{path}");
    }
    let extras = &record["extras"];
    for times in ["start_ms", "register_filled_ms", "register_empty_ms"] {
        assert_eq!(extras[times].as_array().unwrap().len(), 5, "{times}");
    }
    let small = extras["two_workers"]["small_beside_us"].as_array().unwrap();
    assert_eq!(small.len(), extras["two_workers"]["small_alone_us"].as_array().unwrap().len());
    let table = String::from_utf8(ran.stdout).unwrap();
    for text in ["TRITON JIT", "S=8: own / triton", "exec to /readyz", "launches waited for"] {
        assert!(table.contains(text), "{text} is missing in:\n{table}");
    }
}

#[test]
fn chains_in_the_order_of_a_stream_are_checked_measured_and_reported() {
    let stub = Stub::create().unwrap();
    stub.provide_compiler().unwrap();
    let file = stub.directory().join("run.json");
    let few = ["--cases", "order", "--cache-rows", "64", "--trials", "2", "--idle-ms", "40"];
    let output = ["--output", file.to_str().unwrap(), "--device", "cuda:0"];
    let ran = bench(&stub, &[&output[..], &few[..]].concat());
    assert!(ran.status.success(), "{ran:?}");

    let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let order = &record["extras"]["order"];
    for how in ["stream", "graph"] {
        for selected in [1, 8, 64] {
            for who in ["daemon", "control", "inproc"] {
                let samples = &order["chain_us"][format!("{how}/s{selected}")][who];
                assert_eq!(samples.as_array().unwrap().len(), 2, "{how} {selected} {who}");
            }
        }
    }
    assert_eq!(order["enqueue_us"]["s8"].as_array().unwrap().len(), 2);
    for idle in ["open", "armed", "unrung"] {
        assert!(order["idle_cpu_percent"][idle].is_number(), "{idle}");
    }
    let table = String::from_utf8(ran.stdout).unwrap();
    for text in ["graph/s64", "host enqueue of a stream-ordered gather", "idle executor, armed"] {
        assert!(table.contains(text), "{text} is missing in:\n{table}");
    }
}

#[test]
fn a_rival_that_fails_is_an_error_and_leaves_no_file() {
    let stub = Stub::create().unwrap();
    let file = stub.directory().join("run.json");
    let program = stub.directory().join("rival.py");
    fs::write(&program, "print('{\"facts\": {}}'); input(); print('{\"error\": \"no torch\"}')")
        .unwrap();
    let rival = format!("python3 -u {}", program.display());
    let few = ["--cases", "24576/s1/gather", "--cache-rows", "9", "--device", "cuda:0"];
    let arguments = [&["--output", file.to_str().unwrap(), "--rival", &rival], &few[..]].concat();
    let failed = bench(&stub, &arguments);
    assert_eq!(failed.status.code(), Some(3), "{failed:?}");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("no torch"), "{failed:?}");
    assert!(!file.exists());
}

#[test]
fn a_case_that_selects_more_rows_than_there_are_is_wrong_usage() {
    let stub = Stub::create().unwrap();
    let file = stub.directory().join("run.json");
    let few = ["--cases", "24576/s8/gather", "--cache-rows", "7", "--device", "cuda:0"];
    let refused = bench(&stub, &[&["--output", file.to_str().unwrap()], &few[..]].concat());
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(!file.exists());
}

/// The daemon of a test; it ends with it.
struct Serving(std::process::Child);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_command_names_one_device_of_a_daemon_that_serves_several() {
    let stub = Stub::create().unwrap();
    let runtime = stub.directory().join("run");
    let address = runtime.to_str().unwrap();
    let statecopy = || Command::new(env!("CARGO_BIN_EXE_statecopy"));
    let mut daemon = statecopy();
    daemon.args(["daemon", "serve", "--http-address", "off", "--runtime-dir", address]);
    daemon.args(["--device", "cuda:0", "--device", "host"]);
    daemon.envs(stub.environment()).env("STATECOPY_ARTIFACT_STORE", stub.fill_store());
    let _daemon = Serving(daemon.stderr(Stdio::null()).spawn().unwrap());
    let ping = || statecopy().args(["ping", "--address", address]).output().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !ping().status.success() {
        assert!(Instant::now() < deadline, "the daemon does not answer: {:?}", ping());
        thread::sleep(Duration::from_millis(10));
    }
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/small-trace.jsonl");
    let demo = ["demo", "--preset", "tiny", "--steps", "4", "--address", address];
    let replay = ["replay", trace, "--requests", "5", "--address", address];
    for command in [&demo[..], &replay] {
        let copied = statecopy().args(command).args(["--device", "host"]).output().unwrap();
        assert!(copied.status.success(), "{copied:?}");
        let refused = statecopy().args(command).args(["--device", "cuda:0"]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let told = String::from_utf8(refused.stderr).unwrap();
        assert!(told.contains("cuda:0 does not copy host memory"), "{told}");
        assert!(told.contains("--device host"), "{told}");
    }
    for (device, kind) in [("host", "host"), ("cuda:0", "cuda")] {
        let file = stub.directory().join(kind).with_extension("json");
        let few = ["--cases", "24576/s1/gather", "--trials", "1", "--cache-rows", "9"];
        let named = ["--output", file.to_str().unwrap(), "--device", device, "--address", address];
        let ran = bench(&stub, &[&named[..], &few].concat());
        assert!(ran.status.success(), "{ran:?}");
        let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(record["device"]["kind"], kind);
    }
}
