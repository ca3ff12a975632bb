//! The part of NVRTC that the product uses, for tests without a compiler.

use std::ffi::{CStr, c_char};

use super::{In, Out};
use crate::abi::CUresult;
use crate::compiler::{self, ARCHITECTURES, Program, Status, programs};

impl From<CUresult> for Status {
    /// Of a null pointer.
    fn from(_: CUresult) -> Self {
        Self::INVALID_INPUT
    }
}

fn status(outcome: Result<(), Status>) -> Status {
    outcome.err().unwrap_or(Status::SUCCESS)
}

fn put_size(at: Out<usize>, program: u64, part: impl Fn(&Program) -> &[u8]) -> Result<(), Status> {
    Ok(at.put(part(programs().get(program)?).len())?)
}

fn put_bytes(at: Out<u8>, program: u64, part: impl Fn(&Program) -> &[u8]) -> Result<(), Status> {
    let mut programs = programs();
    let bytes = part(programs.get(program)?);
    bytes.iter().enumerate().try_for_each(|(place, byte)| Ok(at.offset(place).put(*byte)?))
}

/// Declares exported functions of `nvrtc.h` that answer a status.
macro_rules! exported {
    ($($name:ident($($argument:ident: $type:ty),*) $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `nvrtc.h`.")]
            ///
            /// # Safety
            /// As `nvrtc.h` says: every pointer is null or points to what the function reads or writes.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> Status {
                let outcome = || -> Result<(), Status> { $body };
                status(outcome())
            }
        )*
    };
}

exported! {
    nvrtcVersion(major: Out<i32>, minor: Out<i32>) {
        major.put(13)?;
        Ok(minor.put(0)?)
    };
    nvrtcGetNumSupportedArchs(count: Out<u32>) {
        let known = ARCHITECTURES.len().try_into();
        Ok(count.put(known.map_err(|_| Status::INVALID_INPUT)?)?)
    };
    nvrtcGetSupportedArchs(architectures: Out<u32>) {
        let mut each = ARCHITECTURES.iter().enumerate();
        each.try_for_each(|(place, number)| Ok(architectures.offset(place).put(*number)?))
    };
    nvrtcCreateProgram(
        program: Out<u64>, source: In<c_char>, _name: In<c_char>, headers: i32, _texts: In<In<c_char>>, _names: In<In<c_char>>
    ) {
        source.text()?;
        if headers != 0 {
            return Err(Status::INVALID_INPUT);
        }
        Ok(program.put(programs().add())?)
    };
    nvrtcCompileProgram(program: u64, count: i32, options: In<In<c_char>>) {
        let count = usize::try_from(count).map_err(|_| Status::INVALID_INPUT)?;
        let texts: Result<Vec<_>, _> = options.all(count)?.into_iter().map(In::text).collect();
        compiler::compile(program, &texts?)
    };
    nvrtcDestroyProgram(program: In<u64>) programs().remove(program.get()?);
    nvrtcGetProgramLogSize(program: u64, bytes: Out<usize>) {
        put_size(bytes, program, |program| &program.log)
    };
    nvrtcGetProgramLog(program: u64, log: Out<u8>) {
        put_bytes(log, program, |program| &program.log)
    };
    nvrtcGetCUBINSize(program: u64, bytes: Out<usize>) {
        put_size(bytes, program, |program| &program.code)
    };
    nvrtcGetCUBIN(program: u64, code: Out<u8>) {
        put_bytes(code, program, |program| &program.code)
    };
}

/// `nvrtcGetErrorString` of `nvrtc.h`.
///
/// # Safety
/// None: it takes any status.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvrtcGetErrorString(error: Status) -> *const c_char {
    let text: &CStr = match error {
        Status::SUCCESS => c"NVRTC_SUCCESS",
        Status::INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        Status::INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        Status::INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        Status::COMPILATION => c"NVRTC_ERROR_COMPILATION",
        Status(_) => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}
