//! The exported functions: what C calls, turned into calls of [`Process`](crate::process::Process).

mod compiler;
mod devices;
mod entry;
mod errors;
mod graphs;
mod launches;
mod memory;
mod virtual_memory;

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use statecopy_kernels::cuda::Production;
use statecopy_kernels::cuda::arguments::Arguments;

use crate::abi::{
    CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp, CUresult, CUstreamBatchMemOpParams,
    HANDLE_BYTES, KernelNodeParams,
};
use crate::process::Answer;

/// A pointer that a caller gave to be written to. Nobody but a caller in C makes one.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(Option<NonNull<T>>);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    fn put(self, value: T) -> Answer {
        let at = self.0.ok_or(CUresult::INVALID_VALUE)?;
        // SAFETY: the caller in C gave a pointer to a value of this type, or null.
        unsafe { at.write(value) };
        Ok(())
    }

    /// What stands there before it is written.
    fn get(self) -> Answer<T>
    where
        T: Plain,
    {
        In(self.0).get()
    }

    /// The same pointer, to something else.
    fn cast<U>(self) -> Out<U> {
        Out(self.0.map(NonNull::cast))
    }

    /// The pointer `count` elements on.
    fn offset(self, count: usize) -> Self {
        // SAFETY: the caller in C gave room for more elements than these.
        Self(self.0.map(|at| unsafe { at.add(count) }))
    }
}

/// A pointer that a caller gave to be read. Nobody but a caller in C makes one.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct In<T>(Option<NonNull<T>>);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

/// Types that are plain bits, so that a caller's value can be copied.
pub(crate) trait Plain {}
impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for [u8; HANDLE_BYTES] {}
impl Plain for CUmemAllocationProp {}
impl Plain for CUmemAccessDesc {}
impl Plain for CUstreamBatchMemOpParams {}
impl Plain for Arguments {}
impl<T> Plain for KernelNodeParams<In<T>> {}
impl Plain for Production {}
impl<T> Plain for In<T> {}

impl<T: Plain> In<T> {
    fn get(self) -> Answer<T> {
        let at = self.0.ok_or(CUresult::INVALID_VALUE)?;
        // SAFETY: the caller in C gave a pointer to a value of this type, or null.
        Ok(unsafe { at.read_unaligned() })
    }

    /// So many values, one after the other.
    fn all(self, count: usize) -> Answer<Vec<T>> {
        let first = self.0.ok_or(CUresult::INVALID_VALUE)?;
        (0..count)
            .map(|place| {
                // SAFETY: the caller in C says that there are `count` values.
                let at = unsafe { first.add(place) };
                Self(Some(at)).get()
            })
            .collect()
    }
}

impl<T> In<T> {
    /// The same pointer, to something else.
    fn cast<U>(self) -> In<U> {
        In(self.0.map(NonNull::cast))
    }
}

impl In<u8> {
    /// The byte that lies so far on.
    fn byte(self, place: usize) -> Answer<u8> {
        // SAFETY: the caller in C says that there are so many bytes.
        Self(self.0.map(|at| unsafe { at.add(place) })).get()
    }
}

impl In<c_char> {
    /// The bytes of a text that ends with a zero.
    fn text(self) -> Answer<Vec<u8>> {
        let at = self.0.ok_or(CUresult::INVALID_VALUE)?;
        // SAFETY: the caller in C gave a text that ends with a zero, or null.
        Ok(unsafe { CStr::from_ptr(at.as_ptr()) }.to_bytes().to_owned())
    }
}

/// An argument as the number that the log shows.
trait Word {
    fn word(&self) -> u64;
}

impl Word for u64 {
    fn word(&self) -> u64 {
        *self
    }
}

impl Word for usize {
    fn word(&self) -> u64 {
        *self as u64
    }
}

impl Word for u32 {
    fn word(&self) -> u64 {
        (*self).into()
    }
}

impl Word for i32 {
    fn word(&self) -> u64 {
        self.cast_unsigned().into()
    }
}

impl Word for u8 {
    fn word(&self) -> u64 {
        (*self).into()
    }
}

impl Word for CUipcMemHandle {
    /// The slot: what differs between the handles of one process.
    fn word(&self) -> u64 {
        let slot = self.0[16..24].try_into();
        slot.map_or(0, u64::from_le_bytes)
    }
}

impl<T> Word for Out<T> {
    fn word(&self) -> u64 {
        self.0.map_or(0, |at| at.addr().get() as u64)
    }
}

impl<T> Word for In<T> {
    fn word(&self) -> u64 {
        self.0.map_or(0, |at| at.addr().get() as u64)
    }
}

/// Declares exported functions: each one call, with the process as the first argument of what it does.
macro_rules! exported {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
            ///
            /// # Safety
            /// As `cuda.h` says: every pointer is null or points to what the function reads or writes.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> crate::abi::CUresult {
                crate::process::call(
                    crate::functions::Function::$name,
                    &[$($crate::exports::Word::word(&$argument)),*],
                    $body,
                )
            }
        )*
    };
}
use exported;
