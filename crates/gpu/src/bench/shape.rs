//! The shape of a measured copy, its method and its rounds.

use crate::copier::CopierOptions;
use crate::device::Gpu;
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};

/// Measured rounds, after one that warms up.
pub(super) const ROUNDS: usize = 7;

/// The two ends of a measured copy.
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

/// The sizes and order of the pieces.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Bytes in sum; a remainder that fills no piece is left out.
    pub total_bytes: u64,
    /// Contiguous bytes.
    pub piece_bytes: u64,
    /// Consecutive pieces in the source, as a block's layers are in the pool; 1 for none.
    pub joined: u64,
    /// Whether neighbouring pieces of one side are far apart on the other.
    pub shuffled: bool,
    /// The two ends of the copy.
    pub path: Path,
}

/// The way of a measured copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMethod {
    /// One call a piece.
    CopyEngine,
    /// Calls of many pieces each, by copy engines.
    Batch,
    /// The copy kernel.
    Kernel {
        /// Thread blocks of a launch.
        blocks: u32,
    },
    /// All bytes as one piece, by a copy engine: the link's own rate.
    Contiguous,
    /// The default choice of [`crate::Copier`].
    Auto,
}

/// The median of the rounds in seconds.
pub(super) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Options of a copier that uses this method alone.
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
