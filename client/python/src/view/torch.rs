//! Torch's tensors, by their attributes. torch is never imported: where nobody did, there are no such tensors.

use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyType};
use statecopy_proto::DataType;

use super::{Element, Lent, View, Whose, dlpack};
use crate::errors;
use crate::memory::Device;

/// What of torch is needed, found once.
struct Torch {
    tensor: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, DataType)>,
    /// Makes a DLPack capsule, without the checks of `__dlpack__`, which take ten times as long; none where torch has it no
    /// more.
    to_dlpack: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Whether it is a tensor of torch.
pub(crate) fn is_tensor(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    match torch(py)? {
        Some(torch) => object.is_instance(torch.tensor.bind(py)),
        None => Ok(false),
    }
}

fn torch(py: Python<'_>) -> PyResult<Option<&Torch>> {
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let modules = PyModule::import(py, intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let Ok(module) = modules.get_item(intern!(py, "torch")) else { return Ok(None) };
    // One that is being imported has no tensors yet.
    let Ok(tensor) = module.getattr(intern!(py, "Tensor")) else { return Ok(None) };
    let dtypes = DataType::ALL.into_iter().filter_map(|dtype| {
        module.getattr(dtype.label()).ok().map(|found| (found.unbind(), dtype))
    });
    let to_dlpack = module.getattr(intern!(py, "_C")).and_then(|c| c.getattr("_to_dlpack"));
    let found = Torch {
        tensor: tensor.cast_into::<PyType>()?.unbind(),
        dtypes: dtypes.collect(),
        to_dlpack: to_dlpack.ok().map(Bound::unbind),
    };
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// A view of an operand: all of it by one call where torch has that, so that the strides of an axis of one element may be
/// others than the tensor's own.
///
/// # Errors
/// As [`view`].
pub(super) fn view_of_operand(tensor: &Bound<'_, PyAny>, argument: &str) -> PyResult<View> {
    let py = tensor.py();
    let to_dlpack = TORCH.get(py).and_then(|torch| torch.to_dlpack.as_ref());
    let quick = to_dlpack.and_then(|to_dlpack| {
        let capsule = to_dlpack.bind(py).call1((tensor,)).ok()?;
        dlpack::view_of(&capsule, argument).ok()
    });
    // What DLPack has no word for is seen by its attributes, and what is wrong with a tensor is said there.
    quick.map_or_else(|| view(tensor, argument), Ok)
}

/// # Errors
/// ArgumentError for a tensor without memory of its own: a fake or meta one, or one that was freed.
pub(super) fn view(tensor: &Bound<'_, PyAny>, argument: &str) -> PyResult<View> {
    let py = tensor.py();
    let whose = whose(tensor)?;
    let shape: Vec<i64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let strides = tensor.call_method0(intern!(py, "stride")).and_then(|found| found.extract());
    let strides: Vec<i64> = strides.map_err(|_| no_memory(tensor, argument, "has no strides"))?;
    let address: u64 = tensor
        .call_method0(intern!(py, "data_ptr"))
        .and_then(|found| found.extract())
        .map_err(|_| no_memory(tensor, argument, "has no memory that could be read"))?;
    let is_here = matches!(whose, Whose::Of(_));
    if is_here && address == 0 && !shape.contains(&0) {
        return Err(no_memory(tensor, argument, "has no memory any more: its storage was freed"));
    }
    let element = element(tensor)?;
    Ok(View { whose, element, address, shape, strides, is_read_only: false, _lent: Lent::Nothing })
}

fn whose(tensor: &Bound<'_, PyAny>) -> PyResult<Whose> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        return Ok(Whose::Of(Device::Host));
    }
    if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        return Ok(Whose::Of(Device::Cuda(
            tensor.call_method0(intern!(py, "get_device"))?.extract()?,
        )));
    }
    match tensor.call_method0(intern!(py, "__dlpack_device__")) {
        Ok(device) => Ok(Whose::Elsewhere(device.extract::<(i32, i32)>()?.0)),
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => Err(error),
        Err(_) => Ok(Whose::Elsewhere(0)),
    }
}

fn element(tensor: &Bound<'_, PyAny>) -> PyResult<Element> {
    let py = tensor.py();
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let known = TORCH
        .get(py)
        .and_then(|torch| torch.dtypes.iter().find(|(known, _)| known.is(&dtype)))
        .map(|(_, dtype)| *dtype);
    Ok(match known {
        Some(dtype) => Element::Known(dtype),
        None => Element::Unknown(dtype.str()?.to_string()),
    })
}

fn no_memory(tensor: &Bound<'_, PyAny>, argument: &str, what: &str) -> PyErr {
    let of = tensor.get_type().name().map_or_else(|_| "tensor".to_owned(), |name| name.to_string());
    errors::argument(tensor.py(), argument, None, &format!("the {of} {what}"))
}
