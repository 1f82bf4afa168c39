//! Counts the regions that an engine's steps have computed.
//!
//! The counter is one word that goes on counting from step to step. On a GPU the engine's stream writes it in stream order, so
//! readers neither wait for the stream nor ask the driver.

use std::sync::atomic::{AtomicU32, Ordering};

use kvlane_gpu::{EngineStream, Gpu, GpuError, StreamWord};

/// A word that only counts up, and wraps to 0.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The thread that computes writes it.
    Host(AtomicU32),
    /// The engine's stream writes it.
    Gpu(StreamWord),
}

impl Progress {
    pub(crate) fn new(gpu: Option<&Gpu>) -> Result<Progress, GpuError> {
        match gpu {
            Some(gpu) => StreamWord::new(gpu).map(Progress::Gpu),
            None => Ok(Progress::Host(AtomicU32::new(0))),
        }
    }

    /// Counts up to `count`: on a GPU once `stream` has done the work enqueued so far, on the host at once. A thread that reads
    /// the count sees the bytes that were computed before it.
    pub(crate) fn reach(&self, count: u32, stream: &EngineStream) -> Result<(), GpuError> {
        match self {
            Progress::Host(word) => word.store(count, Ordering::Release),
            Progress::Gpu(word) => word.write(stream, count)?,
        }
        Ok(())
    }

    /// Regions counted since `count`; 0 if the word has not reached `count`.
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
