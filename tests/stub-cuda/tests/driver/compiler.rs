//! The compiler that stands in for NVRTC, as the product opens and calls it.

use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, CompileError, Compiler};
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Stub, StubDevice, Whose};

use crate::calls::{Answer, Driver, out};
use crate::peer::Peer;

fn load(driver: &Driver, code: &[u8]) -> Answer<u64> {
    out(|at| driver.cuModuleLoadData(at, code.as_ptr().cast()))
}

#[test]
fn code_runs_on_the_chip_that_it_was_compiled_for() {
    let newer = StubDevice { capability: (9, 3), ..StubDevice::default() };
    let stub = Stub::create_with(&[newer]).unwrap();
    stub.provide_compiler().unwrap();
    let mut peer = Peer::open(&stub);
    assert_eq!(peer.ask("compile sm_90"), "0", "9.0 runs on 9.3");
    assert_eq!(peer.ask("compile sm_100"), "209");
    assert_eq!(peer.ask("compile sm_80"), "209");
    assert_eq!(peer.ask("compile sm_75"), "unknown chip");
    let driver = Driver::open(&stub);
    load(&driver, b"\x7fELF of another compiler").unwrap();
}

#[test]
fn a_compiler_fails_or_aborts_on_demand() {
    let stub = Stub::create().unwrap();
    stub.provide_compiler().unwrap();
    let mut peer = Peer::open(&stub);
    stub.arm(Function::nvrtcCompileProgram, Fault::next(Act::Answer(CUresult(6))));
    assert_eq!(peer.ask("compile sm_90"), "The stub compiler was told to fail");
    assert_eq!(peer.ask("compile sm_90"), "0");
    assert_eq!(stub.process(peer.pid()).unwrap().count(Function::nvrtcCompileProgram), 2);
    stub.abort_on_allocation(Some(Whose::Any));
    peer.tell("compile sm_90");
    assert!(!peer.wait().success());
}

/// What the peer says of `compile`: what came of loading the code, or why there is none.
pub(crate) fn compile(driver: &Driver, arch: &str) -> Answer<String> {
    let arch: Arch = arch.parse().unwrap();
    let compiled =
        Compiler::open(None).and_then(|compiler| compiler.compile(arch, CudaClass::all()[0]));
    match compiled {
        Ok(code) => load(driver, &code).map(|_| "0".into()),
        Err(CompileError::Arch { .. }) => Ok("unknown chip".into()),
        Err(CompileError::Failed { log, .. }) => Ok(log),
        Err(error) => Ok(error.to_string()),
    }
}
