//! Measurements and yardsticks of `kvlane.bench`, which engines never call.

mod gpu;
mod index;
mod loops;
mod ssd;

use pyo3::prelude::*;

pub(crate) fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(loops::copy, module)?)?;
    module.add_function(wrap_pyfunction!(loops::echo, module)?)?;
    module.add_function(wrap_pyfunction!(loops::ping_pong, module)?)?;
    module.add_function(wrap_pyfunction!(loops::read_process, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpus, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_copy, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_calibrate, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_rails, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_load, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_together, module)?)?;
    module.add_class::<index::PyIndexEcho>()?;
    module.add_class::<index::PyIndexLookups>()?;
    module.add_class::<index::PyIndexOwners>()?;
    module.add_function(wrap_pyfunction!(index::index_core, module)?)?;
    module.add_class::<ssd::PySsdBench>()?;
    module.add_function(wrap_pyfunction!(ssd::ssd_restart, module)?)?;
    module.add_function(wrap_pyfunction!(ssd::crc32c, module)?)
}
