//! Names of errors, which need no process.

use std::ffi::c_char;
use std::ptr;

use super::Out;
use crate::abi::CUresult;

fn name(error: CUresult, name: Out<*const c_char>) -> CUresult {
    let known = error.name();
    let put = name.put(known.map_or(ptr::null(), |name| name.as_ptr()));
    match put {
        Ok(()) if known.is_some() => CUresult::SUCCESS,
        _ => CUresult::INVALID_VALUE,
    }
}

/// `cuGetErrorName` of `cuda.h`.
///
/// # Safety
/// The pointer is null or points to a pointer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(
    error: CUresult,
    text: Out<*const c_char>,
) -> CUresult {
    name(error, text)
}

/// `cuGetErrorString` of `cuda.h`: the name again.
///
/// # Safety
/// The pointer is null or points to a pointer.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(
    error: CUresult,
    text: Out<*const c_char>,
) -> CUresult {
    name(error, text)
}
