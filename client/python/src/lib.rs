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

#![deny(unsafe_code)]

mod bytes;
mod client;
mod copy;
mod counters;
mod errors;
mod export;
mod fork;
mod graphs;
mod hooks;
mod lock;
mod memory;
mod operands;
mod order;
mod pending;
mod plan;
mod regions;
mod session;
mod streams;
mod sync;
mod turn;
mod view;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("statecopy runs on 64-bit machines");

use pyo3::prelude::pymodule;

/// The extension module.
#[pymodule(name = "_core")]
mod core_module {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::client::{Client, connect};
    #[pymodule_export]
    use crate::fork::forked;
    #[pymodule_export]
    use crate::memory::{Tensor, empty};
    #[pymodule_export]
    use crate::pending::Pending;
    #[pymodule_export]
    use crate::plan::{BindingSet, Plan, Route};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
