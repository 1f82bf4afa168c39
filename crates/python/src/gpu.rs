//! The GPU driver that Python's calls use.

use std::ffi::OsString;
use std::sync::{Arc, OnceLock};

use kvlane_gpu::{
    DRIVER_VARIABLE, Driver, Drivers, EngineStream, Gpu, GpuError, NoDriver, StreamHandle, detect,
};
use parking_lot::Mutex;
use pyo3::{exceptions::PyOSError, prelude::*};

/// A GPU of the driver that this process shares.
pub(crate) fn open_gpu(ordinal: u32) -> PyResult<Gpu> {
    Gpu::open(driver()?, ordinal).map_err(failed)
}

/// Those of the module that Python loaded; it comes before every call.
static DRIVERS: OnceLock<Drivers> = OnceLock::new();

/// Has this module's calls reach GPUs through one of these drivers.
pub(crate) fn use_drivers(drivers: Drivers) {
    DRIVERS.get_or_init(|| drivers);
}

/// A driver, and what the environment said when it was made.
type Named = (Option<OsString>, Arc<dyn Driver>);

/// The driver that the environment asks for, made once: memory of a fake GPU is known to that fake only.
pub(crate) fn driver() -> PyResult<Arc<dyn Driver>> {
    static MADE: Mutex<Vec<Named>> = Mutex::new(Vec::new());
    let wanted = std::env::var_os(DRIVER_VARIABLE);
    let mut made = MADE.lock();
    if let Some((_, driver)) = made.iter().find(|(name, _)| *name == wanted) {
        return Ok(Arc::clone(driver));
    }
    let drivers = DRIVERS.get().copied().unwrap_or(kvlane_gpu::driver_named);
    let driver = detect(drivers).map_err(|reason: NoDriver| PyOSError::new_err(reason.to_string()))?;
    made.push((wanted, Arc::clone(&driver)));
    Ok(driver)
}

pub(crate) fn failed(error: GpuError) -> PyErr {
    PyOSError::new_err(error.to_string())
}

/// A stream that Python names.
pub(crate) fn engine_stream(stream: u64) -> EngineStream {
    // SAFETY: the caller names a stream of the engine, which outlives the engine's steps; `_core.pyi` says so.
    unsafe { EngineStream::from_raw(StreamHandle(stream)) }
}
