//! The device suite over the stub driver, so that it works when there is a device.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]
#![expect(clippy::print_stdout, reason = "the lines of a run are what a reader of its test wants")]

use std::process::Command;

use statecopy_stub_cuda::{Knob, Stub};
use statecopy_tests::binary;

/// Runs the cases whose names contain one of these, or all, and gives the lines.
fn suite(stub: &Stub, arguments: &[&str]) -> String {
    stub.provide_compiler().unwrap();
    let output = tempfile::tempdir().unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_statecopy-device-suite"))
        .args(["run", "--stub", "--statecopyd"])
        .arg(binary("statecopyd", "statecopyd"))
        .arg("--output")
        .arg(output.path())
        .args(arguments)
        .envs(stub.environment())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{said}{}", String::from_utf8_lossy(&run.stderr));
    println!("{said}");
    said
}

mod slow {
    use super::*;

    #[test]
    fn every_case_that_needs_no_device_holds_over_the_stub_driver() {
        let stub = Stub::create().unwrap();
        stub.set(Knob::SharedConnections, true);
        let said = suite(&stub, &[]);
        assert!(said.trim_end().ends_with(" ok, 0 failed, without MPS"), "{said}");
    }

    #[test]
    fn so_do_those_of_streams_with_mps_where_streams_share_two_connections() {
        let stub = Stub::create().unwrap();
        stub.set(Knob::Mps, true);
        stub.set(Knob::SharedConnections, true);
        let said = suite(
            &stub,
            &["--mps", "stream", "bell", "ring", "rung", "killed", "graph", "replay", "capture"],
        );
        assert!(said.trim_end().ends_with(" ok, 0 failed, with MPS"), "{said}");
    }
}

#[test]
fn a_run_that_wants_mps_fails_where_there_is_none() {
    let stub = Stub::create().unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_statecopy-device-suite"))
        .args(["run", "--stub", "--mps", "--output", "/nonexistent/output", "--statecopyd", "none"])
        .envs(stub.environment())
        .output()
        .unwrap();
    assert!(!run.status.success());
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(said.contains("The driver does not share device 0 by MPS"), "{said}");
}
