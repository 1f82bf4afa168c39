//! Measures copies to or from one GPU, over its own link or over rails too.

use std::sync::Arc;
use std::time::Instant;

use super::pieces::Laid;
use super::shape::{self, CopyMethod, Path, ROUNDS, Shape, median};
use crate::copier::Copier;
use crate::device::Gpu;
use crate::driver::{Copy, Priority};
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};
use crate::rail_options::{RailOptions, Staging};
use crate::rails::Rails;
use crate::stream::Stream;

/// Measures copies of a shape from `gpu`'s point of view, in GB/s (10^9 bytes): the median of seven rounds, from the
/// first call until the stream is done. The bytes are checked afterwards; a destination that holds others is an error.
pub fn measure_copy(gpu: &Gpu, shape: &Shape, method: CopyMethod) -> Result<f64, GpuError> {
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let options = shape::options(gpu, method, shape.path.direction())?;
    let mut copier = Copier::new(Arc::clone(&stream), options)?;
    measure(gpu, shape, method, &stream, |copies, direction| {
        // SAFETY: the ranges are those of `measure`, which waits for the stream.
        unsafe { copier.enqueue(copies, direction) }.map(drop)
    })
}

/// As [`measure_copy`], over the GPU's own link and those of all other GPUs that the options choose. If `staged`, the bytes
/// over its own link go through the staging ring on the GPU.
pub fn measure_rails(gpu: &Gpu, options: RailOptions, shape: &Shape, staged: bool) -> Result<f64, GpuError> {
    if !matches!(shape.path, Path::HostToDevice) {
        return Err(GpuError::Invalid("rails are for copies from the host to a GPU".into()));
    }
    let rails = Rails::new(gpu.driver(), &[], RailOptions { least_bytes: 0, ..options })?;
    let wanted = rails.chosen().iter().filter(|ordinal| **ordinal != gpu.info().ordinal).count();
    let loader = rails.loader(gpu, "a benchmark");
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let direct = shape::options(gpu, CopyMethod::Auto, Direction::HostToDevice)?;
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

/// Copies the pieces of a shape by `enqueue`, whose work is done when the stream is idle.
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
        // Also after an error, because some copies may be in progress.
        stream.synchronize()?;
        enqueued?;
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    laid.check(stream)?;
    Ok(laid.bytes() as f64 / median(seconds) / 1e9)
}
