//! The extension module `statecopy._core`: the Rust client, as Python calls it.
//!
//! **What it is.** Conversion between Python's objects and the client's: tensors become places in shared memory, refusals
//! become exceptions. The package `statecopy` around it holds the names that users import.
//!
//! **What it is not.** It knows neither NumPy nor torch: tensors come in by DLPack, by the buffer protocol, or by the few
//! attributes of a torch tensor, and leave as DLPack capsules.
//!
//! **Invariant.** The interpreter's lock is released wherever the daemon or the driver is waited for, and nothing of the
//! client is touched in a forked child.

#![expect(dead_code, reason = "the client that calls it comes next")]

mod errors;
mod export;
mod fork;
mod memory;
mod pool;
mod regions;
mod sync;

use pyo3::prelude::*;

/// The extension module.
#[pymodule(name = "_core")]
mod core_module {
    #[pymodule_export]
    use super::fork::forked;
    #[pymodule_export]
    use super::memory::{Tensor, empty};
    use super::{Bound, PyModule, PyResult};
    use pyo3::types::PyModuleMethods;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
