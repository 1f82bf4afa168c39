//! Results and handles of the driver's functions.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use crate::error::GpuError;

/// The result of a function of the driver. `operation` is its name.
pub(super) fn check(operation: &'static str, result: CUresult) -> Result<(), GpuError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: the pointer is valid; on success it points to a string of the driver's that is never freed.
    let found = unsafe { sys::cuGetErrorName(result, &mut name) };
    let name = if found == CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown".into()
    };
    Err(GpuError::Cuda { operation, code: result as u32, name })
}

/// A driver's object from its number.
pub(super) fn handle<T>(raw: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(raw as usize)
}
