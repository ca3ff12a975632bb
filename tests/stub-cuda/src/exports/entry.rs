//! How a test puts the driver of its own process into a folder, without an environment.

use std::ffi::{OsString, c_char};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use super::In;
use crate::abi::CUresult;
use crate::process;

/// From now on this process uses the stub's folder with this path; everything from before is forgotten.
///
/// # Safety
/// The path ends with a zero. No other thread of the process uses the driver.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn statecopy_stub_cuda_enter(directory: In<c_char>) -> CUresult {
    match directory.text() {
        Ok(path) => process::enter(PathBuf::from(OsString::from_vec(path))),
        Err(error) => return error,
    }
    CUresult::SUCCESS
}

/// Forgets everything of this process, as its end would.
///
/// # Safety
/// Memory of the driver is used no more, by any thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn statecopy_stub_cuda_leave() -> CUresult {
    process::leave();
    CUresult::SUCCESS
}
