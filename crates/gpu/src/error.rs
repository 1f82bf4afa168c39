//! [`GpuError`]: the errors of operations on GPUs.

use thiserror::Error;

/// Why an operation on a GPU failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GpuError {
    /// The CUDA driver reported an error, of this operation or of earlier work on the same device.
    #[error("{operation}: CUDA error {code} ({name})")]
    Cuda {
        /// The call that reported it.
        operation: &'static str,
        /// CUresult of the call.
        code: u32,
        /// The driver's name of the error, such as `CUDA_ERROR_INVALID_VALUE`.
        name: String,
    },
    /// This driver or device has no such operation; use another way.
    #[error("{operation} is not available: {reason}")]
    Unsupported {
        /// The call that is missing.
        operation: &'static str,
        /// The reason, in words.
        reason: String,
    },
    /// No device has this ordinal or UUID.
    #[error("there is no GPU {0}")]
    NoSuchDevice(String),
    /// An export was opened on another device than the one that holds the memory.
    #[error("the memory is on GPU {exported}, not on GPU {importing}")]
    WrongDevice {
        /// UUID of the device that holds it.
        exported: String,
        /// UUID of the device that was asked to import it.
        importing: String,
    },
    /// A range of the engine's addresses that no import holds entirely.
    #[error("{bytes} bytes at {address:#x} lie in no imported allocation")]
    NotImported {
        /// First address, in the exporting process.
        address: u64,
        /// Length of the range.
        bytes: u64,
    },
    /// Two imports claim the same addresses of the exporting process.
    #[error("two imported allocations overlap at {0:#x}")]
    ImportsOverlap(u64),
    /// Memory that its allocator did not make for sharing.
    #[error(
        "the memory at {address:#x} cannot be shared with another process ({operation}: {name}): start the engine without \
         expandable_segments:True or backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF (or with TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1, where torch \
         knows it; torch before 2.5 cannot share such memory) and without vLLM's sleep mode"
    )]
    NotShareable {
        /// Where it lies in this process.
        address: u64,
        /// The call that refused.
        operation: &'static str,
        /// The driver's name of the error.
        name: String,
    },
    /// The process may open no more files, and a chunk of memory needs one for a moment.
    #[error(
        "{operation}: no descriptor is left for a chunk of memory: raise the limit of open files (ulimit -n)"
    )]
    NoDescriptor {
        /// The call that needed one.
        operation: &'static str,
    },
    /// A request that makes no sense whatever the hardware.
    #[error("{0}")]
    Invalid(String),
    /// A check of copied bytes found other bytes than were sent.
    #[error("piece {piece} arrived with wrong bytes")]
    WrongBytes {
        /// Its index in the list of copies.
        piece: u64,
    },
}

impl GpuError {
    /// Whether the device's context is lost: every later call in this process fails with the same error, and only
    /// a new process can use the device again.
    pub fn is_sticky(&self) -> bool {
        matches!(self, GpuError::Cuda { code, .. } if code::is_sticky(*code))
    }

    /// Whether the process is ending: the driver has let go of everything by itself.
    pub fn is_at_exit(&self) -> bool {
        self.code() == Some(code::DEINITIALIZED)
    }

    /// The driver's number of the error, where the driver reported it.
    pub fn code(&self) -> Option<u32> {
        match self {
            GpuError::Cuda { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Errors of `cuda.h` that we make ourselves or tell apart, and those that cost a process its device.
pub mod code {
    /// An argument of a call makes no sense.
    pub const INVALID_VALUE: u32 = 1;
    /// The device, or the host, has no memory left.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver is shutting down, because the process ends.
    pub const DEINITIALIZED: u32 = 4;
    /// The device is not open, or not any more.
    pub const INVALID_CONTEXT: u32 = 201;
    /// Memory cannot be mapped.
    pub const MAP_FAILED: u32 = 205;
    /// The operating system refused. If the call makes a descriptor, the process may open no more files.
    pub const OPERATING_SYSTEM: u32 = 304;
    /// There is no such stream, event or export.
    pub const INVALID_HANDLE: u32 = 400;
    /// The work is not done yet.
    pub const NOT_READY: u32 = 600;
    /// Work on the device touched memory that it does not reach.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// This device reaches the other one's memory already.
    pub const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
    /// The host's memory is pinned already.
    pub const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
    /// The host's memory is not pinned.
    pub const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
    /// This process lacks the right.
    pub const NOT_PERMITTED: u32 = 800;
    /// This driver or device lacks the operation.
    pub const NOT_SUPPORTED: u32 = 801;

    /// Errors after which the process cannot use the device any more: uncorrectable ECC and NVLink errors, contained errors, a
    /// destroyed context, and every error that ends a running kernel.
    const STICKY: [u32; 13] = [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];

    /// Whether every later call on the device fails with this error until the process ends.
    pub fn is_sticky(code: u32) -> bool {
        STICKY.contains(&code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_illegal_address_is_sticky_and_a_refused_argument_is_not() {
        let error = |code| GpuError::Cuda { operation: "cuMemcpyAsync", code, name: "SOME_NAME".into() };
        assert!(error(code::ILLEGAL_ADDRESS).is_sticky());
        assert!(!error(code::INVALID_VALUE).is_sticky());
        assert!(!GpuError::Invalid("no".into()).is_sticky());
        assert!(error(4).is_at_exit() && !error(code::INVALID_CONTEXT).is_at_exit());
        assert_eq!(error(2).to_string(), "cuMemcpyAsync: CUDA error 2 (SOME_NAME)");
    }
}
