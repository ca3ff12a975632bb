//! Tensors of whatever library, as this crate sees them: where they lie, of what type, shape and strides.
//!
//! Three ways in, tried in this order: our own tensors and torch's by their attributes (the fastest, and the only way to a
//! type that DLPack has no name for), DLPack, the buffer protocol. No byte of a tensor is read here.

mod buffer;
mod dlpack;
mod torch;
mod values;

use std::fmt;

use pyo3::intern;
use pyo3::prelude::*;
use statecopy_proto::DataType;

use crate::errors;
use crate::memory::{Device, Tensor};

pub(crate) use torch::is_tensor as is_torch;

/// Whose memory a tensor lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    Of(Device),
    /// A kind of device that no session has, by DLPack's number.
    Elsewhere(i32),
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Of(device) => device.fmt(f),
            Self::Elsewhere(kind) => write!(f, "a device of DLPack's kind {kind}"),
        }
    }
}

/// The type of an element, or the name of one that no cache, index or flag can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Element {
    Known(DataType),
    Unknown(String),
}

impl Element {
    pub(crate) fn label(&self) -> &str {
        match self {
            Self::Known(dtype) => dtype.label(),
            Self::Unknown(name) => name,
        }
    }

    pub(crate) fn known(&self) -> Option<DataType> {
        match self {
            Self::Known(dtype) => Some(*dtype),
            Self::Unknown(_) => None,
        }
    }
}

/// A tensor that was handed in. The object itself is held by the caller's arguments; what the protocols lend is held here.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) whose: Whose,
    pub(crate) element: Element,
    /// Where element 0 lies: for the device, where it is of one.
    pub(crate) address: u64,
    /// In elements.
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    /// Whether its owner lets nobody write it.
    pub(crate) is_read_only: bool,
    _lent: Lent,
}

/// What keeps the memory of a view.
#[derive(Debug)]
enum Lent {
    /// The object's own life.
    Nothing,
    DlPack(#[expect(dead_code, reason = "held for its drop")] dlpack::Borrowed),
    Buffer(#[expect(dead_code, reason = "held for its drop")] buffer::Borrowed),
}

impl View {
    /// What an operand of a copy is. Strides of axes of one element mean nothing here.
    ///
    /// # Errors
    /// As [`View::of`].
    pub(crate) fn of_operand(object: &Bound<'_, PyAny>, argument: &str) -> PyResult<Self> {
        if is_torch(object)? {
            return torch::view_of_operand(object, argument);
        }
        Self::of(object, argument)
    }

    /// What an argument is.
    ///
    /// # Errors
    /// ArgumentError when it is no tensor, or one without memory.
    pub(crate) fn of(object: &Bound<'_, PyAny>, argument: &str) -> PyResult<Self> {
        let py = object.py();
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Ok(Self::of_ours(tensor.get()));
        }
        if is_torch(object)? {
            return torch::view(object, argument);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            match dlpack::view(object, argument) {
                Ok(view) => return Ok(view),
                // A read-only array, as NumPy has them, is lent by the buffer protocol alone.
                Err(error) => match buffer::view(object) {
                    Ok(Some(view)) => return Ok(view),
                    Ok(None) | Err(_) => return Err(error),
                },
            }
        }
        if let Some(view) = buffer::view(object)? {
            return Ok(view);
        }
        let found = object.get_type().name()?;
        let message = format!(
            "a {found} is no tensor; pass one that has DLPack (__dlpack__) or the buffer protocol: NumPy, torch, statecopy.empty"
        );
        Err(errors::argument(py, argument, None, &message))
    }

    fn of_ours(tensor: &Tensor) -> Self {
        let signed = |numbers: &[u64]| numbers.iter().map(|number| number.cast_signed()).collect();
        Self {
            whose: Whose::Of(tensor.place().device),
            element: Element::Known(tensor.data_type()),
            address: tensor.place().address,
            shape: signed(tensor.sizes()),
            strides: signed(tensor.element_strides()),
            is_read_only: false,
            _lent: Lent::Nothing,
        }
    }

    pub(crate) fn numel(&self) -> u64 {
        self.shape.iter().fold(1_u64, |all, size| all.saturating_mul(size.cast_unsigned()))
    }

    /// Whether the elements lie side by side, the last axis fastest.
    pub(crate) fn is_contiguous(&self) -> bool {
        // Without elements no stride means anything.
        if self.shape.contains(&0) {
            return true;
        }
        let mut dense = 1_i64;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size != 1 && *stride != dense {
                return false;
            }
            dense = dense.saturating_mul(*size);
        }
        true
    }

    /// Bytes from the first to past the last element. Saturates, which nothing holds.
    pub(crate) fn span_bytes(&self, item_bytes: u64) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        let far = self.shape.iter().zip(&self.strides).fold(0_u64, |far, (size, stride)| {
            let steps = (size - 1).cast_unsigned();
            far.saturating_add(steps.saturating_mul(stride.unsigned_abs()))
        });
        far.saturating_add(1).saturating_mul(item_bytes)
    }
}

/// Strides of a dense tensor, in elements.
fn dense_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    strides
}
