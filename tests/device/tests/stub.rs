//! The device suite over the stub driver, so that it works when there is a device.

use std::process::Command;

use statecopy_stub_cuda::Stub;
use statecopy_tests::binary;

mod slow {
    use super::*;

    #[test]
    fn every_case_that_needs_no_device_holds_over_the_stub_driver() {
        let stub = Stub::create().unwrap();
        stub.provide_compiler().unwrap();
        let output = tempfile::tempdir().unwrap();
        let run = Command::new(env!("CARGO_BIN_EXE_statecopy-device-suite"))
            .args(["run", "--stub", "--statecopyd"])
            .arg(binary("statecopyd", "statecopyd"))
            .arg("--output")
            .arg(output.path())
            .envs(stub.environment())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success(), "{said}{}", String::from_utf8_lossy(&run.stderr));
        assert!(said.trim_end().ends_with(" ok, 0 failed"), "{said}");
        println!("{said}");
    }
}
