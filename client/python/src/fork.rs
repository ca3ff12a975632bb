//! What a forked child may touch: nothing that its parent made.
//!
//! A fork copies the client's memory, and neither its threads nor the state of its locks. So whatever was made before a fork
//! is never entered after it: each object remembers in which process it was born, and each call looks there first.

use pyo3::prelude::*;

use crate::errors;
use crate::sync::{AtomicU32, Ordering};

/// How many forks lie between the interpreter's start and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts a fork: the package has each child call it first of all.
#[pyfunction]
#[pyo3(name = "_forked")]
pub(crate) fn forked() {
    // No other thread exists in the child yet.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// In which process something was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Birth(u32);

impl Birth {
    /// Here.
    pub(crate) fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// How many forks lie between the first process of the package and that one.
    pub(crate) fn forks(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// Whether this process is a child of the one it was made in.
    pub(crate) fn is_foreign(self) -> bool {
        self != Self::here()
    }

    /// # Errors
    /// ForkedError in a child of the process it was made in.
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<()> {
        if self.is_foreign() { Err(errors::forked(py)) } else { Ok(()) }
    }
}
