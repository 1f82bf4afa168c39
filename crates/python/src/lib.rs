//! What Python's module `kvlane._core` is made of: the Rust side of an engine's process. `python/kvlane/_core.pyi` documents
//! it for users.
//!
//! The module itself, a library that Python loads, is a crate of its own, crates/python/core; tests have another one on fake
//! GPUs, among the examples.

mod bench;
mod convert;
mod fabric;
mod gpu;
mod gpu_memory;
mod log;
mod own;
mod scheduler;
mod ssd;
mod tool;
mod worker;

use kvlane_gpu::Drivers;
use kvlane_proto::WIRE_MAX;
use pyo3::prelude::*;

/// Puts everything into `kvlane._core`. GPUs are reached through one of these drivers.
pub fn fill_core(module: &Bound<'_, PyModule>, drivers: Drivers) -> PyResult<()> {
    gpu::use_drivers(drivers);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("WIRE_VERSION", WIRE_MAX)?;
    module.add_class::<scheduler::PyScheduler>()?;
    module.add_class::<scheduler::PyHit>()?;
    module.add_class::<worker::PyWorker>()?;
    module.add_class::<worker::PyFinished>()?;
    module.add_class::<tool::PyTool>()?;
    module.add_class::<fabric::PyEngine>()?;
    module.add_class::<fabric::PyGroup>()?;
    module.add_class::<fabric::PyPeer>()?;
    module.add_class::<fabric::PyPieces>()?;
    module.add_class::<fabric::PyTransfer>()?;
    module.add_class::<gpu_memory::PyGpuMemory>()?;
    module.add_function(wrap_pyfunction!(default_address, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_descriptor, module)?)?;
    module.add_function(wrap_pyfunction!(log::take_log, module)?)?;
    module.add_class::<ssd::PySsdBench>()?;
    module.add_function(wrap_pyfunction!(ssd::bench_ssd_restart, module)?)?;
    module.add_function(wrap_pyfunction!(ssd::bench_crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_copy, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_echo, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_ping_pong, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_read_process, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpus, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpu_copy, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpu_calibrate, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpu_rails, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpu_load, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::bench_gpu_together, module)?)
}

/// The address used when none is given.
#[pyfunction]
fn default_address() -> PyResult<String> {
    convert::address(None).map(|address| address.to_string())
}
