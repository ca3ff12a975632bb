//! What a tensor library adds to the plain client: how results are wrapped, and what only it can do with its tensors.

use pyo3::intern;
use pyo3::prelude::*;

use crate::errors;

/// The hooks of `statecopy.torch`; a plain client has none.
#[derive(Debug)]
pub(crate) struct Hooks(Option<Py<PyAny>>);

impl Hooks {
    pub(crate) fn new(hooks: Option<Py<PyAny>>) -> Self {
        Self(hooks)
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.0.is_none()
    }

    fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.as_ref().map(|hooks| hooks.bind(py).clone())
    }

    /// A tensor over the memory of a DLPack capsule; the capsule itself for a plain client.
    pub(crate) fn wrap<'py>(
        &self,
        py: Python<'py>,
        capsule: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.get(py) {
            Some(hooks) => hooks.call_method1(intern!(py, "wrap"), (capsule,)),
            None => Ok(capsule),
        }
    }

    /// The tensor's bytes as elements of another type of that size; the tensor itself for a plain client.
    pub(crate) fn view<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dtype: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        match self.get(py) {
            Some(hooks) => hooks.call_method1(intern!(py, "view"), (tensor, dtype)),
            None => Ok(tensor.clone()),
        }
    }

    /// The raw handle of the stream that the caller's work is queued on: the legacy default stream for a plain client.
    pub(crate) fn stream(&self, py: Python<'_>) -> PyResult<u64> {
        match self.get(py) {
            Some(hooks) => hooks.call_method0(intern!(py, "stream"))?.extract(),
            None => Ok(0),
        }
    }

    /// What makes tensors of a type on the session's device, in memory of the current stream's: a callable that takes a shape. `None`
    /// for a plain client.
    pub(crate) fn maker(&self, py: Python<'_>, dtype: &str) -> PyResult<Option<Py<PyAny>>> {
        let Some(hooks) = self.get(py) else { return Ok(None) };
        hooks.call_method1(intern!(py, "maker"), (dtype,)).map(|maker| Some(maker.unbind()))
    }

    /// A list of integers or bools as a tensor of the device, written in the order of the current stream without waiting for it.
    pub(crate) fn upload<'py>(
        &self,
        role: &str,
        values: Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = values.py();
        let Some(hooks) = self.get(py) else { return Ok(None) };
        hooks.call_method1(intern!(py, "upload"), (role, values)).map(Some)
    }

    /// The operand in a form that can be used; `None` for a plain client.
    pub(crate) fn normalise<'py>(
        &self,
        role: &str,
        tensor: &Bound<'py, PyAny>,
        dtype: &str,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = tensor.py();
        let Some(hooks) = self.get(py) else { return Ok(None) };
        hooks.call_method1(intern!(py, "normalise"), (role, tensor, dtype)).map(Some)
    }

    /// Copies a tensor of the device into another, on the current stream. A plain client has nothing that could.
    pub(crate) fn stage(&self, into: &Bound<'_, PyAny>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        match self.get(py) {
            Some(hooks) => hooks.call_method1(intern!(py, "stage"), (into, tensor)).map(drop),
            None => Err(errors::not_shared(py)),
        }
    }
}
