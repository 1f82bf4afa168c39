//! Physical memory of a device apart from its addresses, as the driver's API for virtual memory has it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use cudarc::driver::sys;

use super::call::{check, handle};
use crate::error::GpuError;

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const NOT_SHAREABLE: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;

/// A reference to a chunk of memory, released when dropped. Mappings of the chunk stay. A context is current at each use.
pub(super) struct AllocationHandle(sys::CUmemGenericAllocationHandle);

impl AllocationHandle {
    /// Allocates physical memory on the device.
    pub(super) fn create(device: u32, bytes: u64, shareable: bool) -> Result<Self, GpuError> {
        let wanted = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: if shareable { DESCRIPTOR } else { NOT_SHAREABLE },
            location: location(device),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut raw = 0;
        // SAFETY: the pointers are valid.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&mut raw, bytes as usize, &wanted, 0) })?;
        Ok(Self(raw))
    }

    /// The chunk that is mapped at an address.
    pub(super) fn at(address: u64) -> Result<Self, GpuError> {
        let mut raw = 0;
        // SAFETY: the pointer is valid, and the driver checks the address.
        let retained = unsafe { sys::cuMemRetainAllocationHandle(&mut raw, handle(address)) };
        check("cuMemRetainAllocationHandle", retained)?;
        Ok(Self(raw))
    }

    /// The chunk of a descriptor.
    pub(super) fn import(descriptor: BorrowedFd<'_>) -> Result<Self, GpuError> {
        let mut raw = 0;
        // A descriptor is given in place of a pointer.
        let given: *mut c_void = ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
        // SAFETY: the pointer is valid, and the driver checks the descriptor.
        let imported = unsafe { sys::cuMemImportFromShareableHandle(&mut raw, given, DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", imported)?;
        Ok(Self(raw))
    }

    /// A descriptor for other processes.
    pub(super) fn export(&self) -> Result<OwnedFd, GpuError> {
        let mut descriptor: c_int = -1;
        let place: *mut c_void = (&raw mut descriptor).cast();
        // SAFETY: a descriptor is written where there is room for one.
        let exported = unsafe { sys::cuMemExportToShareableHandle(place, self.0, DESCRIPTOR, 0) };
        check("cuMemExportToShareableHandle", exported)?;
        if descriptor < 0 {
            return Err(GpuError::NoDescriptor { operation: "cuMemExportToShareableHandle" });
        }
        // SAFETY: the driver made it for the caller, who closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Maps the chunk, so that the device reads and writes it.
    ///
    /// # Safety
    /// The addresses are reserved, and free.
    pub(super) unsafe fn map(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise; the driver checks the size.
        check("cuMemMap", unsafe { sys::cuMemMap(address, bytes as usize, 0, self.0, 0) })?;
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped just now; there is one description.
        let allowed = unsafe { sys::cuMemSetAccess(address, bytes as usize, &access, 1) };
        let allowed = check("cuMemSetAccess", allowed);
        if allowed.is_err() {
            // SAFETY: as above; no other code has the mapping yet.
            let unmapped = unsafe { sys::cuMemUnmap(address, bytes as usize) };
            crate::device::warn_of(Some(device), "unmap a chunk", check("cuMemUnmap", unmapped));
        }
        allowed
    }
}

impl Drop for AllocationHandle {
    fn drop(&mut self) {
        // SAFETY: the reference is released once, here.
        crate::device::warn_of(
            None,
            "release a chunk",
            check("cuMemRelease", unsafe { sys::cuMemRelease(self.0) }),
        );
    }
}

fn location(device: u32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device as c_int }
}
