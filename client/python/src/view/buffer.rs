//! The consumer's side of the buffer protocol.
//!
//! Its functions and its struct are in the stable ABI from Python 3.11 on; 3.10 exports the very same ones, so they are
//! declared here.

#![expect(unsafe_code, reason = "the buffer protocol is a C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use statecopy_proto::DataType;

use super::{Element, Lent, View, Whose, dense_strides};
use crate::memory::Device;

/// `Py_buffer`.
#[repr(C)]
#[derive(Debug)]
struct Buffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

/// `PyBUF_FULL_RO`: strides, format, suboffsets, and no wish to write.
const FULL_RO: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut Buffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut Buffer);
}

/// A buffer that was lent. Boxed: the exporter may point into it.
#[derive(Debug)]
pub(super) struct Borrowed(Box<Buffer>);

// SAFETY: its pointers are read only while it is made; it is given back with the interpreter's lock held.
unsafe impl Send for Borrowed {}
// SAFETY: as above; a shared reference gives access to nothing.
unsafe impl Sync for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        Python::attach(|_| {
            // SAFETY: PyObject_GetBuffer filled it, it was not released before, and the interpreter's lock is held.
            unsafe { PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

/// A view of an object that has the buffer protocol; `None` of one that has not.
///
/// # Errors
/// What the exporter raises.
pub(super) fn view(object: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
    // SAFETY: a live object, with the interpreter's lock held.
    if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
        return Ok(None);
    }
    let mut buffer = Box::new(MaybeUninit::<Buffer>::zeroed());
    // SAFETY: a live object, room for one Py_buffer, and the interpreter's lock held.
    let got = unsafe { PyObject_GetBuffer(object.as_ptr(), buffer.as_mut_ptr(), FULL_RO) };
    if got != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    // SAFETY: all zeros is a valid Buffer, and the call filled it.
    let lent = Borrowed(unsafe { buffer.assume_init() });
    let found = &*lent.0;
    if !found.suboffsets.is_null() {
        return Ok(None);
    }
    let item = found.itemsize.max(1);
    let rank = usize::try_from(found.ndim).unwrap_or_default();
    let shape: Vec<i64> =
        axes(found.shape, rank).unwrap_or_else(|| vec![(found.len / item) as i64]);
    let strides = axes(found.strides, rank).filter(|strides| strides.len() == shape.len());
    // A stride that is no multiple of the item is no tensor's.
    let strides = match strides {
        Some(strides) if strides.iter().any(|stride| stride % item as i64 != 0) => return Ok(None),
        Some(strides) => strides.into_iter().map(|stride| stride / item as i64).collect(),
        None => dense_strides(&shape),
    };
    let (address, element) = (found.buf.addr() as u64, element(found.format, item));
    let whose = Whose::Of(Device::Host);
    let is_read_only = found.readonly != 0;
    Ok(Some(View {
        whose,
        element,
        address,
        shape,
        strides,
        is_read_only,
        _lent: Lent::Buffer(lent),
    }))
}

fn axes(first: *const isize, rank: usize) -> Option<Vec<i64>> {
    if first.is_null() {
        return None;
    }
    // SAFETY: the protocol gives `ndim` numbers there, or null.
    Some(
        unsafe { std::slice::from_raw_parts(first, rank) }
            .iter()
            .map(|axis| *axis as i64)
            .collect(),
    )
}

fn element(format: *const c_char, item: isize) -> Element {
    let format = if format.is_null() {
        "B".into()
    } else {
        // SAFETY: the protocol gives a string that ends with a zero byte, or null, and the buffer is still lent.
        unsafe { CStr::from_ptr(format) }.to_string_lossy()
    };
    let native = format.trim_start_matches(['@', '=', '<']);
    let known = match (native, item) {
        ("?", 1) => Some(DataType::Bool),
        ("b", 1) => Some(DataType::Int8),
        ("B" | "c", 1) => Some(DataType::UInt8),
        ("h" | "i" | "l" | "q", 2) => Some(DataType::Int16),
        ("h" | "i" | "l" | "q", 4) => Some(DataType::Int32),
        ("h" | "i" | "l" | "q" | "n", 8) => Some(DataType::Int64),
        ("H" | "I" | "L" | "Q", 2) => Some(DataType::UInt16),
        ("H" | "I" | "L" | "Q", 4) => Some(DataType::UInt32),
        ("H" | "I" | "L" | "Q" | "N", 8) => Some(DataType::UInt64),
        ("e", 2) => Some(DataType::Float16),
        ("f", 4) => Some(DataType::Float32),
        ("d", 8) => Some(DataType::Float64),
        ("Zf", 8) => Some(DataType::Complex64),
        _ => None,
    };
    known.map_or_else(|| Element::Unknown(format!("buffer format {format}")), Element::Known)
}

// As CPython lays it out.
const _: () = assert!(size_of::<Buffer>() == 80 || size_of::<usize>() != 8);
