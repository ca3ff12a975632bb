//! What a daemon finds of the machine when it starts, over the stub driver.

use std::fs;

use rustix::process::Signal;
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Knob};
use statecopy_tests::{Answer, CudaBed, Daemon, get, until};

/// Whether a line of the log is of that level and holds every part.
fn logged(daemon: &Daemon, level: &str, parts: &[&str]) -> usize {
    let log = daemon.log();
    let fits = |line: &&str| {
        line.contains(&format!(" {level} ")) && parts.iter().all(|part| line.contains(part))
    };
    log.lines().filter(fits).count()
}

/// The one sample of a metric that is labelled with the device.
fn figure(daemon: &Daemon, name: &str) -> f64 {
    let text = daemon.get("/metrics").body;
    let begins = format!("{name}{{device=");
    let sample = text.lines().find(|line| line.starts_with(&begins)).expect(name);
    sample.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a figure")
}

fn found(daemon: &Daemon, check: &str) -> (String, String) {
    let findings = daemon.inspect().findings;
    let finding = findings.iter().find(|finding| finding.check == check).expect(check);
    (finding.severity.clone(), finding.evidence.clone())
}

#[test]
fn what_a_start_finds_stands_in_log_status_and_metrics() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    assert_eq!(logged(&daemon, "INFO", &["check=\"sharing\"", "Time slices"]), 1);
    assert_eq!(logged(&daemon, "WARN", &["check=\"copies\"", "295", "Start MPS"]), 1);
    assert_eq!(logged(&daemon, "INFO", &["check=\"stream_operations\""]), 1);
    assert_eq!(found(&daemon, "compute_mode").0, "ok");
    assert_eq!(found(&daemon, "copies").0, "warning");
    assert_eq!(found(&daemon, "page_size").0, "ok");
    let metrics = daemon.get("/metrics").body;
    for part in [
        "check=\"sharing\",severity=\"note\"} 1",
        "device=\"host\",check=\"page_size\",severity=\"ok\"} 1",
        "sharing=\"time_slices\",compute_mode=\"default\",mig=",
        "driver=\"13.0\"",
    ] {
        assert!(metrics.contains(part), "{part} in:\n{metrics}");
    }
    assert_eq!(figure(&daemon, "statecopy_device_stream_operations"), 1.0);
    assert_eq!(figure(&daemon, "statecopy_device_connections"), 32.0);
    assert!(figure(&daemon, "statecopy_device_memory_free_at_start_bytes") > 1e9);
    let expected = figure(&daemon, "statecopy_device_stream_ordered_copy_expected_seconds");
    assert!((expected - 295e-6).abs() < 1e-9, "{expected}");
}

#[test]
fn mps_and_stream_operations_that_do_not_work_are_told_at_the_start() {
    let bed = CudaBed::default();
    bed.stub.set(Knob::Mps, true);
    let refused = Act::Answer(CUresult::NOT_SUPPORTED);
    bed.stub.arm(Function::cuStreamWaitValue64_v2, Fault::next(refused).lasting());
    let daemon = bed.daemon().start();
    assert_eq!(found(&daemon, "stream_operations").0, "problem");
    assert_eq!(logged(&daemon, "ERROR", &["check=\"stream_operations\"", "NOT_SUPPORTED"]), 1);
    assert_eq!(figure(&daemon, "statecopy_device_stream_operations"), 0.0);
    assert!(daemon.get("/metrics").body.contains("sharing=\"mps\""));
}

#[test]
fn a_driver_that_hangs_leaves_health_answering_and_serves_once_it_answers() {
    for function in [Function::cuInit, Function::cuDevicePrimaryCtxRetain] {
        let bed = CudaBed::default();
        let pipes = bed.stub.directory().join("pipes");
        fs::create_dir(&pipes).unwrap();
        fs::write(pipes.join("control"), "").unwrap();
        bed.stub.arm(function, Fault::next(Act::Hang).lasting());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut daemon = bed
            .daemon()
            .setting("cuda.driver_timeout_ms", "400")
            .variable("STATECOPY_HTTP_ADDRESS", port.to_string())
            .variable("CUDA_MPS_PIPE_DIRECTORY", &pipes)
            .spawn();
        let ask = |path: &str| -> Option<Answer> { get(&port.to_string(), path).ok() };
        until("the cause is named", || {
            ask("/readyz").is_some_and(|it| {
                it.status == 503 && it.body.contains("MPS") && it.body.contains("-multiuser-server")
            })
        });
        assert_eq!(ask("/healthz").unwrap().status, 200);
        let metrics = ask("/metrics").unwrap().body;
        assert!(metrics.contains("statecopy_ready 0"), "{metrics}");
        let finding = "device=\"starting\",check=\"driver_answers\",severity=\"problem\"} 1";
        assert!(metrics.contains(finding), "{metrics}");
        bed.stub.clear(function);
        daemon.wait_until_ready();
        assert_eq!(logged(&daemon, "ERROR", &["driver_answers", "400ms", "-multiuser-server"]), 1);
        assert_eq!(ask("/readyz").unwrap().status, 200);
        daemon.signal(Signal::TERM);
        assert!(daemon.wait().success());
    }
}
