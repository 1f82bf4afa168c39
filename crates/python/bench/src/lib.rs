//! `kvlane._bench` as users get it.

use pyo3::prelude::*;

#[pymodule]
fn _bench(module: &Bound<'_, PyModule>) -> PyResult<()> {
    kvlane_python::fill_bench(module, kvlane_gpu::driver_named)
}
