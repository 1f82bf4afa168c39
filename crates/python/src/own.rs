//! What belongs to the process that made it, and is left alone in processes that are forked from it.

use std::mem::ManuallyDrop;

use kvlane_memory::{Forked, OwnProcess};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// A value with threads, connections or locks. In a forked process these are the parent's: there it can be neither used nor
/// dropped.
pub(crate) struct Own<T> {
    value: ManuallyDrop<T>,
    process: OwnProcess,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Own<T> {
        Own { value: ManuallyDrop::new(value), process: OwnProcess::this() }
    }

    /// RuntimeError in a forked process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        self.process.check().map_err(forked)?;
        Ok(&self.value)
    }

    /// None in a forked process: there is nothing to close there.
    pub(crate) fn if_here(&self) -> Option<&T> {
        self.process.is_this().then_some(&self.value)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process.is_this() {
            // SAFETY: nothing uses the value after this, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

pub(crate) fn forked(forked: Forked) -> PyErr {
    PyRuntimeError::new_err(forked.to_string())
}
