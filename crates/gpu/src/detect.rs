//! Chooses the GPU driver of this process, if it has one.

use std::sync::Arc;

use crate::cuda::CudaDriver;
use crate::driver::Driver;
use crate::no_driver::{DRIVER_VARIABLE, NoDriver};

/// Makes the driver with a name; None stands for the default. Programs for users take [`driver_named`], those of tests a
/// function that knows a fake besides.
pub type Drivers = fn(Option<&str>) -> Result<Arc<dyn Driver>, NoDriver>;

/// The driver that the environment names, made by `drivers`.
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
