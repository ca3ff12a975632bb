//! Python's plain client on a CUDA device, over the stub driver: the whole way from a DLPack tensor to the device's memory.

use std::env;
use std::path::Path;
use std::process::Command;

use statecopy_tests::{CudaBed, until};

/// An interpreter, as `tests/run` made it.
const PYTHON: &str = "TEST_PYTHON";
/// The folder that the package lies in.
const PACKAGE: &str = "TEST_PACKAGE";

const CASES: [&str; 9] = [
    "indices and flags of the host go with the request",
    "indices and flags of the device are read where they lie",
    "packed is read where it lies, and no byte beside the rows is written",
    "results go where they are wanted, and may be waited for later",
    "memory that cannot be shared is refused",
    "buffers go back to the pool",
    "a layer sleeps, and wakes in other memory",
    "every tensor that was lent was given back",
    "",
];

#[test]
fn a_python_worker_copies_device_memory_and_gives_back_what_it_shared() {
    #[expect(clippy::disallowed_methods, reason = "where tests/run put them")]
    let (Some(python), Some(package)) = (env::var_os(PYTHON), env::var_os(PACKAGE)) else {
        println!("skipped: {PYTHON} and {PACKAGE} name no interpreter and package");
        return;
    };
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda_worker.py");
    let worked = Command::new(python)
        .arg(script)
        .env("PYTHONPATH", package)
        .env("STATECOPY_ADDR", daemon.runtime())
        .envs(bed.stub.environment())
        .output()
        .expect("the interpreter starts");
    let said = String::from_utf8_lossy(&worked.stdout);
    let complained = String::from_utf8_lossy(&worked.stderr);
    assert!(worked.status.success(), "{said}\n{complained}\n{}", daemon.log());
    assert_eq!(said.split('\n').collect::<Vec<_>>(), CASES, "{complained}");
    until("the session ends with the worker", || daemon.inspect().sessions.is_empty());
}
