//! Device memory of other processes: exports, imports, and the local addresses of theirs.

use crate::device::{Gpu, uuid_text, warn_of};
use crate::driver::IpcHandle;
use crate::error::GpuError;

/// A device allocation as another process can open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// The handle for the driver of the other process.
    pub handle: IpcHandle,
    /// First address of the allocation in the exporting process.
    pub base: u64,
    /// Size of the allocation.
    pub bytes: u64,
    /// The device that holds it.
    pub device_uuid: [u8; 16],
}

impl Gpu {
    /// The whole allocation that holds an address. It stays importable until it is freed or this process ends.
    pub fn export(&self, address: u64) -> Result<Export, GpuError> {
        let (driver, device) = self.raw();
        let (base, bytes) = driver.address_range(device, address)?;
        let handle = driver.ipc_export(device, base)?;
        Ok(Export { handle, base, bytes, device_uuid: self.info().uuid })
    }

    /// Maps an allocation that another process exported from any GPU of this host, so that this GPU reaches it. This process
    /// need not see the other GPU. A driver may map memory that this GPU does not reach, so the caller tries a copy.
    ///
    /// # Errors
    /// The driver's, such as for a handle whose process has ended. [`GpuError::Invalid`] if the handle maps less than the export
    /// says.
    pub fn import_from_any(&self, export: &Export) -> Result<Imported, GpuError> {
        let (driver, device) = self.raw();
        let base = driver.ipc_open(device, &export.handle)?;
        let imported = Imported { gpu: self.clone(), export: *export, base };
        // Checked, because this process computes addresses from the peer's report. A driver may not answer for memory of a GPU
        // that this process does not see.
        match driver.address_range(device, base) {
            Ok((mapped_base, mapped)) if mapped_base + mapped < base + export.bytes => {
                let said = export.bytes;
                Err(GpuError::Invalid(format!("an export of {said} bytes maps {mapped} bytes")))
            }
            _ => Ok(imported),
        }
    }

    /// Maps an allocation that another process exported from this device.
    pub fn import(&self, export: &Export) -> Result<Imported, GpuError> {
        if export.device_uuid != self.info().uuid {
            return Err(GpuError::WrongDevice {
                exported: uuid_text(export.device_uuid),
                importing: uuid_text(self.info().uuid),
            });
        }
        self.import_from_any(export)
    }
}

/// Another process's allocation, mapped here. A drop unmaps it, so its holder waits for all work on it first.
#[derive(Debug)]
pub struct Imported {
    gpu: Gpu,
    export: Export,
    base: u64,
}

impl Imported {
    /// First address in this process.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The export from which this was mapped.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// The device for which it is mapped. [`Export::device_uuid`] names the one that holds it.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the base came from ipc_open and is closed once; the holder has waited for its work.
        warn_of(Some(device), "close imported memory", unsafe { driver.ipc_close(device, self.base) });
    }
}

/// A range of another process's addresses with its local address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedImport {
    /// Address of its first byte in the engine's process.
    pub engine_base: u64,
    /// Address of its first byte in this process.
    pub local_base: u64,
    /// Bytes, the same on both sides.
    pub bytes: u64,
}

impl From<&Imported> for MappedImport {
    fn from(imported: &Imported) -> MappedImport {
        let Export { base: engine_base, bytes, .. } = imported.export;
        MappedImport { engine_base, local_base: imported.base, bytes }
    }
}

/// Translates the addresses of one process.
#[derive(Debug, Clone, Default)]
pub struct AddressMap {
    /// In ascending order, without overlaps.
    ranges: Vec<MappedImport>,
}

impl AddressMap {
    /// A map of these ranges, which must not overlap in the other process.
    pub fn new(ranges: impl IntoIterator<Item = MappedImport>) -> Result<AddressMap, GpuError> {
        let mut ranges: Vec<MappedImport> = ranges.into_iter().collect();
        for MappedImport { engine_base, local_base, bytes } in &ranges {
            if engine_base.checked_add(*bytes).is_none() || local_base.checked_add(*bytes).is_none() {
                return Err(GpuError::NotImported { address: *engine_base, bytes: *bytes });
            }
        }
        ranges.sort_by_key(|range| range.engine_base);
        for pair in ranges.windows(2) {
            if pair[0].engine_base + pair[0].bytes > pair[1].engine_base {
                return Err(GpuError::ImportsOverlap(pair[1].engine_base));
            }
        }
        Ok(AddressMap { ranges })
    }

    /// The local address of a range, which lies in one import.
    pub fn local(&self, address: u64, bytes: u64) -> Result<u64, GpuError> {
        let after = self.ranges.partition_point(|range| range.engine_base <= address);
        let range = after.checked_sub(1).map(|index| self.ranges[index]);
        let local = range.and_then(|range| {
            let offset = address - range.engine_base;
            let room = range.bytes.checked_sub(offset)?;
            (bytes <= room).then_some(range.local_base + offset)
        });
        local.ok_or(GpuError::NotImported { address, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(engine_base: u64, local_base: u64, bytes: u64) -> MappedImport {
        MappedImport { engine_base, local_base, bytes }
    }

    #[test]
    fn a_range_in_one_import_is_translated_and_others_are_named() {
        let map = AddressMap::new([mapped(0x9000, 0x100, 0x1000), mapped(0x1000, 0x50000, 0x1000)]).unwrap();
        assert_eq!(map.local(0x1000, 0x1000), Ok(0x50000));
        assert_eq!(map.local(0x9010, 16), Ok(0x110));
        for (address, bytes) in [(0xfff, 1), (0x1000, 0x1001), (0x2000, 1), (0x9800, u64::MAX), (u64::MAX, 2)]
        {
            assert_eq!(map.local(address, bytes), Err(GpuError::NotImported { address, bytes }));
        }
        assert!(AddressMap::default().local(0, 1).unwrap_err().to_string().contains("0x0"));
    }

    #[test]
    fn ranges_that_overlap_or_wrap_around_are_refused() {
        let overlap = AddressMap::new([mapped(0x1000, 0, 0x1001), mapped(0x2000, 0, 16)]);
        assert_eq!(overlap.unwrap_err(), GpuError::ImportsOverlap(0x2000));
        assert!(AddressMap::new([mapped(u64::MAX, 0, 2)]).is_err());
        assert!(AddressMap::new([mapped(0, u64::MAX, 2)]).is_err());
    }
}
