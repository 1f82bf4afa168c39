//! Measures copies from the host to several GPUs at the same time, as the ranks of an engine load.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use super::pieces::Laid;
use super::shape::{CopyMethod, Path, ROUNDS, Shape, median, options};
use crate::copier::Copier;
use crate::device::Gpu;
use crate::driver::Priority;
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};
use crate::rail_options::{RailChoice, RailOptions, Staging};
use crate::rails::{Loader, Rails};
use crate::stream::Stream;

/// As [`super::measure_copy`], from the host to each of these GPUs at the same time, each from memory of its own and by a
/// thread of its own: GB/s in sum, from the first call of the first one until the last stream is done. If `staged`, the
/// bytes go through the staging ring on their GPU in long runs, as in [`super::measure_rails`] without rails.
pub fn measure_together(
    gpus: &[Gpu],
    shape: &Shape,
    method: CopyMethod,
    staged: bool,
) -> Result<f64, GpuError> {
    let Some(first) = gpus.first().filter(|_| matches!(shape.path, Path::HostToDevice)) else {
        return Err(GpuError::Invalid("several GPUs are measured with copies from the host".into()));
    };
    let none = RailOptions { choice: RailChoice::List(Vec::new()), least_bytes: 0, ..RailOptions::default() };
    let rails = Rails::new(first.driver(), &[], none)?;
    let rank = |gpu| {
        let loader = staged.then(|| rails.loader(gpu, "a benchmark"));
        GpuPart::new(gpu, shape, method, loader)
    };
    let mut ranks = gpus.iter().map(rank).collect::<Result<Vec<_>, _>>()?;
    let barrier = Barrier::new(ranks.len());
    let times: Vec<Result<Vec<(Instant, Instant)>, GpuError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| rank.rounds(&barrier))).collect();
        let panicked = || Err(GpuError::Invalid("a measuring thread panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
    for rank in &ranks {
        rank.laid.check(&rank.stream)?;
    }
    let bytes: u64 = ranks.iter().map(|rank| rank.laid.bytes()).sum();
    let seconds = (1..=ROUNDS)
        .filter_map(|round| {
            let start = times.iter().map(|rounds| rounds[round].0).min()?;
            let end = times.iter().map(|rounds| rounds[round].1).max()?;
            Some((end - start).as_secs_f64())
        })
        .collect();
    Ok(bytes as f64 / median(seconds) / 1e9)
}

/// One GPU's copies, with their copier, loader and stream.
struct GpuPart {
    laid: Laid,
    copier: Copier,
    loader: Option<Loader>,
    stream: Arc<Stream>,
}

impl GpuPart {
    fn new(
        gpu: &Gpu,
        shape: &Shape,
        method: CopyMethod,
        loader: Option<Loader>,
    ) -> Result<GpuPart, GpuError> {
        let stream = Arc::new(Stream::new(gpu, Priority::High)?);
        let copier = Copier::new(Arc::clone(&stream), options(gpu, method, Direction::HostToDevice)?)?;
        Ok(GpuPart { laid: Laid::new(gpu, shape, method, &stream)?, copier, loader, stream })
    }

    /// Start and end of each round, which all GPUs begin together. After a failure this still takes part in the barrier,
    /// because the others would wait for it.
    fn rounds(&mut self, barrier: &Barrier) -> Result<Vec<(Instant, Instant)>, GpuError> {
        let mut times = Vec::with_capacity(ROUNDS + 1);
        let mut failed = None;
        for _ in 0..=ROUNDS {
            barrier.wait();
            if failed.is_some() {
                continue;
            }
            let start = Instant::now();
            failed = self.load().err();
            times.push((start, Instant::now()));
        }
        failed.map_or(Ok(times), Err)
    }

    /// Makes all copies and waits for them, also after an error, because some may be in progress.
    fn load(&mut self) -> Result<(), GpuError> {
        let enqueued = match &self.loader {
            None => {
                // SAFETY: the pieces lie in the source and the destination, do not overlap, and are waited for.
                unsafe { self.copier.enqueue(&self.laid.copies, self.laid.direction()) }.map(drop)
            }
            Some(loader) => {
                let pulls = Thresholds::idle(Direction::Peer);
                let mut loading = loader.begin(&self.stream, self.laid.bytes(), &pulls, Staging::On);
                if !loading.is_staged() {
                    let reason = "there is no ring on the GPU".into();
                    return Err(GpuError::Unsupported { operation: "a staged load", reason });
                }
                // SAFETY: as above.
                let enqueued = unsafe { loading.enqueue(&mut self.copier, &self.laid.copies) };
                loading.synchronize().and(enqueued.map(drop))
            }
        };
        self.stream.synchronize().and(enqueued)
    }
}
