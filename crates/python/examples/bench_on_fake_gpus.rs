//! `kvlane._bench` with a fake GPU driver besides, which KVLANE_GPU_DRIVER=fake chooses: tests run on it.

use pyo3::prelude::*;

#[pymodule]
fn _bench(module: &Bound<'_, PyModule>) -> PyResult<()> {
    kvlane_python::fill_bench(module, kvlane_fake_gpu::driver_named)
}
