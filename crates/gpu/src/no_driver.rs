//! [`NoDriver`]: the reason why a process has no GPU driver.

use thiserror::Error;

use crate::error::GpuError;

/// The environment variable that chooses the driver: `cuda` or `off`. Without it a process uses CUDA if there is a GPU.
pub const DRIVER_VARIABLE: &str = "KVLANE_GPU_DRIVER";

/// Why this process has no GPU driver. That is an ordinary state, not a failure.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoDriver {
    /// The variable is `off`.
    #[error("{DRIVER_VARIABLE} is off")]
    Off,
    /// The variable names no driver.
    #[error("{DRIVER_VARIABLE} is {0:?}, but must be cuda or off")]
    Unknown(String),
    /// The system has no libcuda.
    #[error("libcuda is not installed")]
    NoLibrary,
    /// The system's libcuda lacks a function. Those of CUDA 12 and later have all of them.
    #[error("libcuda has no {0}: the NVIDIA driver is too old")]
    TooOld(&'static str),
    /// The driver sees no device.
    #[error("the CUDA driver sees no GPU")]
    NoDevice,
    /// The driver does not work.
    #[error(transparent)]
    Failed(#[from] GpuError),
}
