//! How fast copies of one shape are on this machine.

mod pieces;
mod together;

use std::sync::Arc;
use std::time::Instant;

use pieces::Laid;
pub use together::measure_together;

use crate::copier::{Copier, CopierOptions};
use crate::device::Gpu;
use crate::driver::{Copy, Priority};
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};
use crate::rails::{RailOptions, Rails, Staging};
use crate::stream::Stream;

/// Measured rounds, after one that warms up.
const ROUNDS: usize = 7;

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
    fn direction(&self) -> Direction {
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
    /// As [`Copier`] chooses by default.
    Auto,
}

/// Measures copies of a shape from `gpu`'s point of view, in GB/s (10^9 bytes): the median of seven rounds, from the
/// first call until the stream is done. The bytes are checked afterwards; a destination that holds others is an error.
pub fn measure_copy(gpu: &Gpu, shape: &Shape, method: CopyMethod) -> Result<f64, GpuError> {
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let options = options(gpu, method, shape.path.direction())?;
    let mut copier = Copier::new(Arc::clone(&stream), options)?;
    measure(gpu, shape, method, &stream, |copies, direction| {
        // SAFETY: the ranges are those of `measure`, which waits for the stream.
        unsafe { copier.enqueue(copies, direction) }.map(drop)
    })
}

/// As [`measure_copy`], over the GPU's own link and those of all other GPUs that the options choose; what comes over its
/// own link goes through a ring on the GPU where that is `staged`.
pub fn measure_rails(gpu: &Gpu, options: RailOptions, shape: &Shape, staged: bool) -> Result<f64, GpuError> {
    if !matches!(shape.path, Path::HostToDevice) {
        return Err(GpuError::Invalid("rails are for copies from the host to a GPU".into()));
    }
    let rails = Rails::new(gpu.driver(), &[], RailOptions { least_bytes: 0, ..options })?;
    let wanted = rails.chosen().iter().filter(|ordinal| **ordinal != gpu.info().ordinal).count();
    let loader = rails.loader(gpu, "a benchmark");
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let direct = self::options(gpu, CopyMethod::Auto, Direction::HostToDevice)?;
    let mut copier = Copier::new(Arc::clone(&stream), direct)?;
    let pulls = Thresholds::idle(Direction::Peer);
    measure(gpu, shape, CopyMethod::Auto, &stream, |copies, _| {
        let staging = if staged { Staging::On } else { Staging::Off };
        let mut loading = loader.begin(&stream, shape.total_bytes, &pulls, staging);
        if loading.rails() != wanted || loading.is_staged() != staged {
            let reason = format!("{} of {wanted} GPUs can be used", loading.rails());
            return Err(GpuError::Unsupported { operation: "a load over rails", reason });
        }
        // SAFETY: the ranges are those of `measure`; stream and rails are waited for.
        let enqueued = unsafe { loading.enqueue(&mut copier, copies) };
        loading.synchronize()?;
        stream.synchronize()?;
        enqueued.map(drop)
    })
}

/// Copies the pieces of a shape by `enqueue`, whose work is over when the stream is.
fn measure(
    gpu: &Gpu,
    shape: &Shape,
    method: CopyMethod,
    stream: &Stream,
    mut enqueue: impl FnMut(&[Copy], Direction) -> Result<(), GpuError>,
) -> Result<f64, GpuError> {
    let laid = Laid::new(gpu, shape, method, stream)?;
    let mut seconds = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        let start = Instant::now();
        // The pieces lie in the source and the destination and do not overlap.
        let enqueued = enqueue(&laid.copies, laid.direction());
        // Also after an error, since a part of it may be under way.
        stream.synchronize()?;
        enqueued?;
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    laid.check(stream)?;
    Ok(laid.bytes() as f64 / median(seconds) / 1e9)
}

fn median(mut seconds: Vec<f64>) -> f64 {
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
