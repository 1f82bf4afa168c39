//! `kvlane._core`: the Rust side of an engine's process. `python/kvlane/_core.pyi` documents it for users.

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

use kvlane_proto::WIRE_MAX;
use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::bench::{bench_copy, bench_echo, bench_ping_pong, bench_read_process};
    #[pymodule_export]
    use super::fabric::{PyEngine, PyGroup, PyPeer, PyPieces, PyTransfer};
    #[pymodule_export]
    use super::gpu::{
        bench_gpu_calibrate, bench_gpu_copy, bench_gpu_load, bench_gpu_rails, bench_gpu_together, bench_gpus,
    };
    #[pymodule_export]
    use super::gpu_memory::PyGpuMemory;
    #[pymodule_export]
    use super::log::{log_descriptor, take_log};
    #[pymodule_export]
    use super::scheduler::{PyHit, PyScheduler};
    #[pymodule_export]
    use super::ssd::{PySsdBench, bench_crc32c, bench_ssd_restart};
    #[pymodule_export]
    use super::tool::PyTool;
    #[pymodule_export]
    use super::worker::{PyFinished, PyWorker};
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("WIRE_VERSION", WIRE_MAX)
    }

    /// The address used when none is given.
    #[pyfunction]
    fn default_address() -> PyResult<String> {
        convert::address(None).map(|address| address.to_string())
    }
}
