//! The content of Python's modules `kvlane._core` and `kvlane._bench`: the Rust side of an engine's process, and bare loops for
//! benchmarks. `python/kvlane/_core.pyi` and `_bench.pyi` document them for users.
//!
//! The modules themselves, libraries that Python loads, are crates of their own, crates/python/core and crates/python/bench;
//! tests have others on fake GPUs, among the examples.

mod bench;
mod convert;
mod fabric;
mod gpu;
mod gpu_memory;
mod handoff;
mod log;
mod moe;
mod moe_gpu;
mod own;
mod scheduler;
mod shard_layout;
mod tool;
mod worker;

use kvlane_gpu::Drivers;
use kvlane_memory::RuntimeFolder;
use kvlane_proto::WIRE_MAX;
use pyo3::{exceptions::PyOSError, prelude::*};

/// Fills `kvlane._core`. GPUs are reached through one of these drivers.
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
    module.add("MoeFailure", module.py().get_type::<moe::MoeFailure>())?;
    module.add_function(wrap_pyfunction!(moe::moe_cast, module)?)?;
    module.add_function(wrap_pyfunction!(moe::moe_decline, module)?)?;
    module.add_class::<moe::PyRank>()?;
    module.add_class::<moe::PyDispatch>()?;
    module.add_class::<moe_gpu::PyGpuRank>()?;
    module.add_class::<moe_gpu::PyGpuDispatch>()?;
    module.add_class::<handoff::PyHandoffRank>()?;
    module.add_class::<handoff::PyLayerHook>()?;
    module.add_class::<handoff::PyHandoffScheduler>()?;
    module.add_function(wrap_pyfunction!(default_address, module)?)?;
    module.add_function(wrap_pyfunction!(runtime_folder, module)?)?;
    module.add_function(wrap_pyfunction!(log::log_descriptor, module)?)?;
    module.add_function(wrap_pyfunction!(log::take_log, module)?)
}

/// Fills `kvlane._bench`. GPUs are reached through one of these drivers.
pub fn fill_bench(module: &Bound<'_, PyModule>, drivers: Drivers) -> PyResult<()> {
    gpu::use_drivers(drivers);
    bench::fill(module)
}

/// The default address of the daemon.
#[pyfunction]
fn default_address() -> PyResult<String> {
    convert::address(None).map(|address| address.to_string())
}

/// The folder in which a user's processes of this host find each other. Made if it is missing. OSError if it is not this user's
/// alone.
#[pyfunction]
fn runtime_folder() -> PyResult<std::path::PathBuf> {
    let folder = RuntimeFolder::of_this_user();
    folder.make().map_err(|refused| PyOSError::new_err(refused.to_string()))?;
    Ok(folder.path().to_path_buf())
}
