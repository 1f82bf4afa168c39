//! An open GPU and memory on it.

use std::sync::Arc;

use crate::driver::{CopyMethods, DeviceInfo, Driver};
use crate::error::GpuError;

/// A GPU that this process has opened. Clones are the same one, and everything made on it keeps it open.
#[derive(Debug, Clone)]
pub struct Gpu(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    driver: Arc<dyn Driver>,
    info: DeviceInfo,
    methods: CopyMethods,
}

impl Gpu {
    /// Opens the device with this ordinal.
    pub fn open(driver: Arc<dyn Driver>, ordinal: u32) -> Result<Gpu, GpuError> {
        Gpu::open_where(driver, |info| info.ordinal == ordinal, || ordinal.to_string())
    }

    /// Opens the device with this UUID, by whatever ordinal this process knows it.
    pub fn open_uuid(driver: Arc<dyn Driver>, uuid: [u8; 16]) -> Result<Gpu, GpuError> {
        Gpu::open_where(driver, |info| info.uuid == uuid, || uuid_text(uuid))
    }

    fn open_where(
        driver: Arc<dyn Driver>,
        wanted: impl Fn(&DeviceInfo) -> bool,
        name: impl FnOnce() -> String,
    ) -> Result<Gpu, GpuError> {
        let info =
            driver.devices()?.into_iter().find(wanted).ok_or_else(|| GpuError::NoSuchDevice(name()))?;
        driver.open(info.ordinal)?;
        let methods = driver.methods(info.ordinal);
        Ok(Gpu(Arc::new(Opened { driver, info, methods })))
    }

    /// The driver's description of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Ways to copy that this device has beside single copies.
    pub fn methods(&self) -> &CopyMethods {
        &self.0.methods
    }

    /// The driver and the ordinal, for calls that have no wrapper.
    pub fn raw(&self) -> (&dyn Driver, u32) {
        (&*self.0.driver, self.0.info.ordinal)
    }

    /// The driver, with which other devices can be opened.
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.0.driver)
    }

    /// Allocates memory on this device.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceMemory, GpuError> {
        let (driver, device) = self.raw();
        let address = driver.alloc(device, bytes)?;
        Ok(DeviceMemory { gpu: self.clone(), address, bytes })
    }

    /// Whether a link of their own, such as NVLink, joins this device and another of the same driver.
    pub fn is_linked(&self, peer: &Gpu) -> Result<bool, GpuError> {
        let (driver, device) = self.raw();
        driver.is_linked(device, peer.info().ordinal)
    }

    /// From now on, calls of this thread do not break the capture of a CUDA graph in another thread. For threads that allocate,
    /// export and import, while an engine may capture.
    pub fn let_others_capture(&self) {
        self.0.driver.let_others_capture();
    }

    /// Whether this device can reach the memory of another one of the same driver, over a link of their own or PCIe.
    pub fn can_reach(&self, peer: &Gpu) -> Result<bool, GpuError> {
        let (driver, device) = self.raw();
        driver.can_reach(device, peer.info().ordinal)
    }

    /// Lets kernels that run here reach the memory of another device of the same driver.
    pub fn enable_peer(&self, peer: &Gpu) -> Result<(), GpuError> {
        let (driver, device) = self.raw();
        driver.enable_peer(device, peer.info().ordinal)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        warn_of(Some(self.info.ordinal), "close a GPU", self.driver.close(self.info.ordinal));
    }
}

/// Device memory, freed when dropped. Code that enqueues work on it waits for that work before the drop.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// The first device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the address came from this driver's alloc and is freed once; users of it have waited for their work.
        warn_of(Some(device), "free device memory", unsafe { driver.free(device, self.address) });
    }
}

/// Logs an error of a drop, which has no caller to return it to, unless the process ends. `gpu` is an ordinal; None if the drop
/// does not know it.
pub(crate) fn warn_of(gpu: Option<u32>, action: &'static str, outcome: Result<(), GpuError>) {
    if let Err(error) = outcome
        && !error.is_at_exit()
    {
        // Log: the GPU driver refused to free something, mostly because the GPU is lost. Do: look for Xid in dmesg.
        tracing::warn!(gpu, %error, "cannot {action}");
    }
}

/// A UUID as `nvidia-smi` writes it.
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_nvidia_smi_writes_it() {
        let uuid = std::array::from_fn(|index| index as u8 * 17);
        assert_eq!(uuid_text(uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
