//! How far an engine's steps are, counted in regions that are computed.
//!
//! A word counts on from step to step. On a GPU the engine's stream writes it when it comes to it, so that nobody has to wait
//! for the stream, or to ask the driver, to know what has been computed.

use std::sync::atomic::{AtomicU32, Ordering};

use kvlane_gpu::{EngineStream, Gpu, GpuError, StreamWord};

/// A word that only counts up, past the largest number to 0.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Computed by the thread that says so.
    Host(AtomicU32),
    /// Computed in a stream.
    Gpu(StreamWord),
}

impl Progress {
    /// At 0.
    pub(crate) fn new(gpu: Option<&Gpu>) -> Result<Progress, GpuError> {
        match gpu {
            Some(gpu) => StreamWord::new(gpu).map(Progress::Gpu),
            None => Ok(Progress::Host(AtomicU32::new(0))),
        }
    }

    /// Counts up to `count`: on a GPU once `stream` has done what is enqueued there, on the host at once. Whoever sees the
    /// count sees the bytes that were computed before.
    pub(crate) fn reach(&self, count: u32, stream: &EngineStream) -> Result<(), GpuError> {
        match self {
            Progress::Host(word) => word.store(count, Ordering::Release),
            Progress::Gpu(word) => word.write(stream, count)?,
        }
        Ok(())
    }

    /// How much has been counted since it was at `count`; 0 if it has not come so far.
    pub(crate) fn since(&self, count: u32) -> u32 {
        let now = match self {
            Progress::Host(word) => word.load(Ordering::Acquire),
            Progress::Gpu(word) => word.value(),
        };
        u32::try_from(now.wrapping_sub(count).cast_signed()).unwrap_or(0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_later_step_counts_nothing_before_its_turn_and_all_of_the_earlier_ones() {
        let progress = Progress::new(None).unwrap();
        for from in [0, u32::MAX - 2] {
            let next = from.wrapping_add(4);
            progress.reach(from, &EngineStream::DEFAULT).unwrap();
            assert_eq!((progress.since(from), progress.since(next)), (0, 0));
            progress.reach(from.wrapping_add(3), &EngineStream::DEFAULT).unwrap();
            assert_eq!((progress.since(from), progress.since(next)), (3, 0));
            progress.reach(next.wrapping_add(1), &EngineStream::DEFAULT).unwrap();
            assert_eq!((progress.since(from), progress.since(next)), (5, 1));
        }
    }
}
