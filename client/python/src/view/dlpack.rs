//! The consumer's side of DLPack: a capsule is taken over, and given back when the view goes.

#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::{Element, Lent, View, Whose, dense_strides};
use crate::errors;
use crate::export::{DL_CPU, DL_CUDA, DlDataType, DlManagedTensor};
use crate::memory::Device;

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
/// `kDLCUDAHost`.
const DL_CUDA_HOST: i32 = 3;

/// A managed tensor that was taken over.
#[derive(Debug)]
pub(super) struct Borrowed(NonNull<DlManagedTensor>);

// SAFETY: DLPack lets the consumer call the deleter from any thread; nothing else of it is used after `view`.
unsafe impl Send for Borrowed {}
// SAFETY: as above; a shared reference gives access to nothing.
unsafe impl Sync for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let tensor = self.0.as_ptr();
        // SAFETY: `view` took the managed tensor over, so it lives until its deleter is called, here and once.
        let deleter = unsafe { (*tensor).deleter };
        if let Some(deleter) = deleter {
            // SAFETY: the producer's own deleter, given its own tensor, once.
            unsafe { deleter(tensor) };
        }
    }
}

/// # Errors
/// What the producer raises; ArgumentError for a capsule that is none.
pub(super) fn view(object: &Bound<'_, PyAny>, argument: &str) -> PyResult<View> {
    let capsule = object.call_method0(intern!(object.py(), "__dlpack__"))?;
    view_of(&capsule, argument)
}

/// The same of a capsule, which is taken over.
///
/// # Errors
/// ArgumentError for a capsule that is none.
pub(super) fn view_of(capsule: &Bound<'_, PyAny>, argument: &str) -> PyResult<View> {
    let py = capsule.py();
    let bad = |what: &str| errors::argument(py, argument, None, what);
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| bad("__dlpack__ gave no capsule"))?;
    let pointer = capsule
        .pointer_checked(Some(NAME))
        .map_err(|_| bad("__dlpack__ gave a capsule of another name than dltensor"))?;
    let managed = pointer.cast::<DlManagedTensor>();
    // SAFETY: the capsule is live and has our reference; the name is a static string. A consumer renames the capsule, and the
    // deleter is its business from then on.
    let renamed = unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) };
    if renamed != 0 {
        return Err(PyErr::fetch(py));
    }
    let borrowed = Borrowed(managed);
    // SAFETY: a live capsule named dltensor holds a live DlManagedTensor, which is ours until `borrowed` is dropped.
    let tensor = unsafe { &(*managed.as_ptr()).tensor };
    let rank = usize::try_from(tensor.ndim).map_err(|_| bad("a DLPack tensor of negative rank"))?;
    let shape = axes(tensor.shape, rank).ok_or_else(|| bad("a DLPack tensor without a shape"))?;
    let strides = axes(tensor.strides, rank).unwrap_or_else(|| dense_strides(&shape));
    let address = tensor.data.addr() as u64 + tensor.byte_offset;
    if tensor.data.is_null() && !shape.contains(&0) {
        return Err(bad("the tensor has no memory any more"));
    }
    let whose = match (tensor.device.kind, u32::try_from(tensor.device.ordinal)) {
        // Pinned memory is the host's.
        (DL_CPU | DL_CUDA_HOST, _) => Whose::Of(Device::Host),
        (DL_CUDA, Ok(ordinal)) => Whose::Of(Device::Cuda(ordinal)),
        (kind, _) => Whose::Elsewhere(kind),
    };
    let element = element(tensor.dtype);
    // An unversioned capsule cannot say that it is read-only: producers of such memory refuse to make one.
    let (is_read_only, _lent) = (false, Lent::DlPack(borrowed));
    Ok(View { whose, element, address, shape, strides, is_read_only, _lent })
}

/// The numbers of one axis after another.
fn axes(first: *const i64, rank: usize) -> Option<Vec<i64>> {
    if rank == 0 {
        return Some(Vec::new());
    }
    // SAFETY: DLPack's producer gives `ndim` numbers there, or null.
    (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first, rank) }.to_vec())
}

fn element(dtype: DlDataType) -> Element {
    dtype.data_type().map_or_else(
        || {
            let DlDataType { code, bits, lanes } = dtype;
            Element::Unknown(format!("DLPack type {code} of {bits} bits x {lanes}"))
        },
        Element::Known,
    )
}
