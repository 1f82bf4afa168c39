//! Which driver this process uses, if any.

use std::sync::Arc;

use thiserror::Error;

use crate::cuda::CudaDriver;
use crate::driver::Driver;
use crate::error::GpuError;

/// The environment variable that chooses: `cuda` or `off`. Without it, CUDA is used where there is a GPU.
pub const DRIVER_VARIABLE: &str = "KVLANE_GPU_DRIVER";

/// Why this process has no GPU driver. That is an ordinary state, not a failure.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoDriver {
    /// It was asked for none.
    #[error("{DRIVER_VARIABLE} is off")]
    Off,
    /// It was asked for one that does not exist.
    #[error("{DRIVER_VARIABLE} is {0:?}, but must be cuda or off")]
    Unknown(String),
    /// The system has no libcuda.
    #[error("libcuda is not installed")]
    NoLibrary,
    /// The system's libcuda has not all functions that are needed; those of CUDA 12 and later have.
    #[error("libcuda has no {0}: the NVIDIA driver is too old")]
    TooOld(&'static str),
    /// The driver sees no device.
    #[error("the CUDA driver sees no GPU")]
    NoDevice,
    /// The driver does not work.
    #[error(transparent)]
    Failed(#[from] GpuError),
}

/// Makes the driver with a name; None stands for the default. Programs for users take [`driver_named`], those of tests a
/// function that knows a fake besides.
pub type Drivers = fn(Option<&str>) -> Result<Arc<dyn Driver>, NoDriver>;

/// The driver that the environment asks for, of these.
pub fn detect(drivers: Drivers) -> Result<Arc<dyn Driver>, NoDriver> {
    let wanted = std::env::var_os(DRIVER_VARIABLE).map(|wanted| wanted.to_string_lossy().into_owned());
    drivers(wanted.as_deref())
}

/// The driver with this name; None and the empty string stand for the default.
pub fn driver_named(name: Option<&str>) -> Result<Arc<dyn Driver>, NoDriver> {
    match name {
        None | Some("" | "cuda") => {
            let driver = CudaDriver::load()?;
            if driver.devices()?.is_empty() { Err(NoDriver::NoDevice) } else { Ok(Arc::new(driver)) }
        }
        Some("off") => Err(NoDriver::Off),
        Some(other) => Err(NoDriver::Unknown(other.into())),
    }
}
