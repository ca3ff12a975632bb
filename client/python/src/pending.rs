//! Copies that were submitted and are waited for later.

use std::mem;
use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyModule;
use statecopy_client::blocking::InFlight;

use crate::copy::Prepared;
use crate::errors;
use crate::lock::lock;

/// A copy in flight: wait for it, or await it. Dropped before, it is given up, and may run yet.
#[pyclass(frozen, module = "statecopy")]
#[derive(Debug)]
pub(crate) struct Pending(Mutex<Option<Flying>>);

/// The copy and its operands, until one of them waits for it.
#[derive(Debug)]
struct Flying(Option<(Prepared, InFlight)>);

impl Pending {
    pub(crate) fn new((prepared, flight): (Prepared, InFlight)) -> Self {
        Self(Mutex::new(Some(Flying(Some((prepared, flight))))))
    }
}

#[pymethods]
impl Pending {
    /// Waits for the answer.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let flying = lock(&self.0).take();
        let Some((prepared, flight)) = flying.and_then(|mut flying| flying.0.take()) else {
            return Err(errors::waited_for(py));
        };
        if prepared.is_foreign() {
            mem::forget((prepared, flight));
            return Err(errors::forked(py));
        }
        let outcome = py.detach(|| flight.wait());
        prepared.finish(py, outcome)
    }

    /// Waits on a thread of the running event loop's own.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let running = PyModule::import(py, intern!(py, "asyncio"))?
            .call_method0(intern!(py, "get_running_loop"))?;
        let wait = slf.getattr(intern!(py, "wait"))?;
        let waiting = running.call_method1(intern!(py, "run_in_executor"), (py.None(), wait))?;
        waiting.call_method0(intern!(py, "__await__"))
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        let Some((prepared, flight)) = self.0.take() else { return };
        if prepared.is_foreign() {
            // The child owns nothing of it.
            mem::forget((prepared, flight));
        } else {
            prepared.abandon();
        }
    }
}
