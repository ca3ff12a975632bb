//! The DLPack producer: tensors of this crate, as other libraries take them.
//!
//! What a consumer holds is one allocation that begins with the structure of DLPack's C interface and ends with the owner of
//! the bytes. The consumer, or a capsule that nobody consumed, gives it back by [`delete`], from any thread and without the
//! interpreter's lock. A forked child gives nothing back: the owner's locks and threads are its parent's.

#![expect(unsafe_code, reason = "DLPack is a C interface")]

use std::ffi::{CStr, c_void};
use std::mem::{ManuallyDrop, offset_of};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use statecopy_client::DataType;
use statecopy_client::sharing::Buffer;

use crate::fork::Birth;
use crate::memory::{Allocation, Place};

/// What the bytes of a tensor lie in.
#[derive(Debug, Clone)]
pub(crate) enum Owner {
    /// Memory of `statecopy.empty`.
    Memory(#[expect(dead_code, reason = "held for its drop")] Arc<Allocation>),
    /// A buffer of a client's pool, which goes back with its last owner.
    Pooled(#[expect(dead_code, reason = "held for its drop")] Arc<Buffer>),
}

/// An owner that is given back in the process where it was kept, and forgotten in a forked child.
#[derive(Debug)]
pub(crate) struct Kept {
    owner: ManuallyDrop<Owner>,
    birth: Birth,
}

impl Kept {
    pub(crate) fn new(owner: Owner) -> Self {
        Self { owner: ManuallyDrop::new(owner), birth: Birth::here() }
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            return;
        }
        // SAFETY: nothing reaches the owner after the drop of what it lies in.
        unsafe { ManuallyDrop::drop(&mut self.owner) };
    }
}

/// `DLDevice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) ordinal: i32,
}

/// `kDLCPU`.
pub(crate) const DL_CPU: i32 = 1;
/// `kDLCUDA`.
pub(crate) const DL_CUDA: i32 = 2;

/// `DLDataType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

impl DlDataType {
    pub(crate) fn of(dtype: DataType) -> Self {
        let code = match dtype {
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => 0,
            DataType::UInt8 | DataType::UInt16 | DataType::UInt32 | DataType::UInt64 => 1,
            DataType::Float16 | DataType::Float32 | DataType::Float64 => 2,
            DataType::BFloat16 => 4,
            DataType::Complex64 => 5,
            DataType::Bool => 6,
            DataType::Float8E4M3 => 10,
            DataType::Float8E5M2 => 12,
        };
        let bits = match dtype.item_bytes() {
            1 => 8,
            2 => 16,
            4 => 32,
            _ => 64,
        };
        Self { code, bits, lanes: 1 }
    }

    /// The data type, if it is one that caches have.
    pub(crate) fn data_type(self) -> Option<DataType> {
        DataType::ALL.into_iter().find(|dtype| Self::of(*dtype) == self)
    }
}

/// `DLTensor`. Shape and strides count elements.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensor`, as it was before version 1.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DlManagedTensor {
    pub(crate) tensor: DlTensor,
    pub(crate) manager: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLPackVersion`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// `DLManagedTensorVersioned`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DlManagedTensorVersioned {
    pub(crate) version: DlVersion,
    pub(crate) manager: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

// As the header of DLPack lays them out where pointers have 64 bits.
const _: () = {
    assert!(size_of::<DlDevice>() == 8 && size_of::<DlDataType>() == 4);
    assert!(offset_of!(DlTensor, dtype) == 20 && offset_of!(DlTensor, byte_offset) == 40);
    assert!(size_of::<DlTensor>() == 48);
    assert!(offset_of!(DlManagedTensor, deleter) == 56 && size_of::<DlManagedTensor>() == 64);
    assert!(offset_of!(DlManagedTensorVersioned, flags) == 24);
    assert!(offset_of!(DlManagedTensorVersioned, tensor) == 32);
    assert!(size_of::<DlManagedTensorVersioned>() == 80);
};

/// The version that is written: the first with a code for each data type.
const VERSION: DlVersion = DlVersion { major: 1, minor: 1 };

/// The two structures that a capsule may hold.
pub(crate) trait Managed: Sized {
    /// The name of a capsule that holds one and was not consumed.
    const NAME: &'static CStr;

    fn new(tensor: DlTensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
}

impl Managed for DlManagedTensor {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: DlTensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self { tensor, manager: ptr::null_mut(), deleter: Some(deleter) }
    }
}

impl Managed for DlManagedTensorVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: DlTensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        let (version, manager) = (VERSION, ptr::null_mut());
        Self { version, manager, deleter: Some(deleter), flags: 0, tensor }
    }
}

/// What a consumer gets a pointer to. The structure comes first, and the pointer to it is one to the whole.
#[repr(C)]
struct Exported<M> {
    managed: M,
    /// The shape, and the strides after it.
    _axes: Box<[i64]>,
    _kept: Kept,
}

/// A capsule for a consumer: versioned for one that knows DLPack 1, as it was before for others. Shape and strides count
/// elements; the owner lives until the consumer gives it back.
///
/// # Errors
/// BufferError when a size does not fit the structure, or whatever the interpreter says.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    owner: Owner,
    place: Place,
    dtype: DataType,
    shape: &[u64],
    strides: &[u64],
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let axes: Result<Box<[i64]>, _> =
        shape.iter().chain(strides).map(|axis| i64::try_from(*axis)).collect();
    let (Ok(mut axes), Ok(ndim)) = (axes, i32::try_from(shape.len())) else {
        return Err(PyBufferError::new_err("DLPack has no room for a shape of that size"));
    };
    let start = axes.as_mut_ptr();
    let tensor = DlTensor {
        data: ptr::with_exposed_provenance_mut(usize::try_from(place.address)?),
        device: place.device.to_dlpack(),
        ndim,
        dtype: DlDataType::of(dtype),
        shape: start,
        strides: start.wrapping_add(shape.len()),
        byte_offset: 0,
    };
    let kept = Kept::new(owner);
    if versioned {
        new_capsule::<DlManagedTensorVersioned>(py, tensor, axes, kept)
    } else {
        new_capsule::<DlManagedTensor>(py, tensor, axes, kept)
    }
}

fn new_capsule<M: Managed>(
    py: Python<'_>,
    tensor: DlTensor,
    axes: Box<[i64]>,
    kept: Kept,
) -> PyResult<Bound<'_, PyAny>> {
    let managed = M::new(tensor, delete::<M>);
    let exported = Box::into_raw(Box::new(Exported { managed, _axes: axes, _kept: kept }));
    // SAFETY: the pointer is not null, the name is a constant, and the destructor takes such capsules.
    let capsule = unsafe {
        ffi::PyCapsule_New(exported.cast(), M::NAME.as_ptr(), Some(give_back_unconsumed::<M>))
    };
    if capsule.is_null() {
        // SAFETY: the pointer is from above, and no capsule has it.
        drop(unsafe { Box::from_raw(exported) });
    }
    // SAFETY: the interpreter's lock is held, and the reference is ours; null comes with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Gives an export back. DLPack's deleter: called once, by whoever consumed the capsule, from any thread.
///
/// # Safety
/// The pointer is from [`new_capsule`] and is used no more.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: the structure is the first field of a boxed `Exported<M>`, whose pointer was made by `Box::into_raw`.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
}

/// The destructor of a capsule. A consumer that took what is inside has renamed it.
///
/// # Safety
/// The object is a capsule of [`new_capsule`] that is about to go.
unsafe extern "C" fn give_back_unconsumed<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: the object is a capsule.
    let is_unconsumed = unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) };
    if is_unconsumed == 0 {
        return;
    }
    // SAFETY: the object is a capsule of that name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: the pointer is from `new_capsule`, and nobody consumed it.
    unsafe { delete(managed.cast::<M>()) };
}
