//! What is copied, by which method, and how often.

use crate::copier::CopierOptions;
use crate::device::Gpu;
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};

/// Measured rounds, after one that warms up.
pub(super) const ROUNDS: usize = 7;

/// Where the bytes move.
#[derive(Debug, Clone)]
pub enum Path {
    /// From pinned host memory to the GPU.
    HostToDevice,
    /// From the GPU to pinned host memory.
    DeviceToHost,
    /// From the GPU to this other one.
    Peer(Gpu),
}

impl Path {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Path::HostToDevice => Direction::HostToDevice,
            Path::DeviceToHost => Direction::DeviceToHost,
            Path::Peer(_) => Direction::Peer,
        }
    }
}

/// What is copied.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Bytes in sum; what does not fill a piece is left out.
    pub total_bytes: u64,
    /// Bytes that are contiguous.
    pub piece_bytes: u64,
    /// Pieces that lie one after the other in the source, as a block's layers do in the pool; 1 for none.
    pub joined: u64,
    /// Whether neighbouring pieces of the one side are far apart on the other.
    pub shuffled: bool,
    /// Where the bytes come from and where they go.
    pub path: Path,
}

/// How it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMethod {
    /// One call a piece.
    CopyEngine,
    /// Calls of many pieces each, by copy engines.
    Batch,
    /// The copy kernel.
    Kernel {
        /// How many thread blocks it is launched with.
        blocks: u32,
    },
    /// All bytes as one piece, by a copy engine: what the link can do.
    Contiguous,
    /// As [`crate::Copier`] chooses by default.
    Auto,
}

/// The median of some times.
pub(super) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// The copier that does nothing but this method.
pub(crate) fn options(
    gpu: &Gpu,
    method: CopyMethod,
    direction: Direction,
) -> Result<CopierOptions, GpuError> {
    let never = Thresholds { engine_bytes: u64::MAX, batch_bytes: u64::MAX, ..Thresholds::default() };
    let only = |use_batch, use_kernel| CopierOptions { use_batch, use_kernel, ..CopierOptions::default() };
    let lacks = |operation| GpuError::Unsupported { operation, reason: "this device cannot".into() };
    match method {
        CopyMethod::CopyEngine | CopyMethod::Contiguous => Ok(only(false, false)),
        CopyMethod::Batch if !gpu.methods().batch => Err(lacks("cuMemcpyBatchAsync")),
        CopyMethod::Batch => Ok(CopierOptions { thresholds: never, ..only(true, false) }),
        CopyMethod::Kernel { .. } if !gpu.methods().kernel => Err(lacks("the copy kernel")),
        CopyMethod::Kernel { blocks } => {
            let some = CopierOptions { thresholds: never, ..only(false, true) };
            Ok(CopierOptions { host_blocks: blocks, peer_blocks: blocks, ..some })
        }
        CopyMethod::Auto => {
            Ok(CopierOptions { thresholds: Thresholds::idle(direction), ..CopierOptions::default() })
        }
    }
}
