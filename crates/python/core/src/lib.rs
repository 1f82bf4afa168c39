//! `kvlane._core` as users get it.

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    kvlane_python::fill_core(module, kvlane_gpu::driver_named)
}
