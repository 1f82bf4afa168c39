//! [`Own`]: a value of one process, which its forked children leave alone.

use std::mem::ManuallyDrop;

use kvlane_memory::{Forked, OwnProcess};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

/// A value with threads, connections or locks. In a forked process these are the parent's, so the child can neither use nor
/// drop it.
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

    /// None in a forked process, which has nothing to close.
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
