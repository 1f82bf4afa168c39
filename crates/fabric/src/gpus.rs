//! The GPUs of an engine, and the numbers by which its regions, carriers and peers name them.

use kvlane_gpu::Gpu;

/// A GPU's number is its index. A GPU keeps its number until the engine ends.
#[derive(Debug, Default)]
pub(crate) struct Gpus(Vec<Gpu>);

impl Gpus {
    /// Returns the number of a GPU. A GPU that has none is added.
    pub(crate) fn add(&mut self, gpu: &Gpu) -> u16 {
        let is_it = |known: &Gpu| {
            std::ptr::addr_eq(known.raw().0, gpu.raw().0) && known.info().ordinal == gpu.info().ordinal
        };
        let number = self.0.iter().position(is_it).unwrap_or(self.0.len());
        if number == self.0.len() {
            self.0.push(gpu.clone());
        }
        // No host has more GPUs than a u16 counts.
        number as u16
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::Arc;

    use kvlane_fake_gpu::{FakeDriver, FakeOptions};

    use super::*;

    #[test]
    fn a_gpu_keeps_its_number_however_often_it_is_opened() {
        let driver = || Arc::new(FakeDriver::new(FakeOptions::default()).unwrap());
        let (one, other) = (driver(), driver());
        let open = |driver: &Arc<FakeDriver>, ordinal| Gpu::open(Arc::clone(driver) as _, ordinal).unwrap();
        let mut gpus = Gpus::default();
        let numbers =
            [open(&one, 1), open(&one, 0), open(&one, 1), open(&other, 1)].map(|gpu| gpus.add(&gpu));
        assert_eq!(numbers, [0, 1, 0, 2]);
    }
}
