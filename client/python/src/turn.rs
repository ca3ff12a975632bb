//! One change of what is registered at a time: threads of one client take turns.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use pyo3::prelude::*;
use pyo3::sync::MutexExt as _;

use crate::errors;
use crate::lock::lock;

/// Whose turn it is. Memory that one registration pins is let go by the next: two at once would take it from each other.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    change: Mutex<()>,
    /// Held for a moment only.
    holder: Mutex<Option<ThreadId>>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    _change: MutexGuard<'a, ()>,
}

impl Turns {
    /// Waits for those of other threads, without the interpreter.
    ///
    /// # Errors
    /// ArgumentError when this thread has one: its progress, or the end of a tensor, calls the client again.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Turn<'_>> {
        if *lock(&self.holder) == Some(thread::current().id()) {
            let message = "register, rebind or release is called while it runs in the same thread";
            return Err(errors::argument(py, "client", None, message));
        }
        let change = self.change.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        *lock(&self.holder) = Some(thread::current().id());
        Ok(Turn { turns: self, _change: change })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(&self.turns.holder) = None;
    }
}
