//! What carriers do when memory is registered and given back.

use kvlane_gpu::{Gpu, GpuError};

use crate::transfers::Memory;
use crate::window::WindowRange;

/// Why memory cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{carrier}: {why}")]
pub struct RegisterError {
    /// The carrier's name.
    pub carrier: &'static str,
    /// In words.
    pub why: String,
}

/// Memory as a carrier sees it when it is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Its number, which peers name.
    pub number: u32,
    /// How often the number was used before.
    pub generation: u32,
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Where it lies.
    pub memory: Memory,
    /// Whether peers may write it.
    pub is_writable: bool,
}

/// A window as a carrier sees it when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedWindow<'a> {
    /// Its number, which its peer names instead of a region's.
    pub number: u32,
    /// How often the number was used before.
    pub generation: u32,
    /// What it shows of registered regions.
    pub ranges: &'a [WindowRange],
    /// Where these bytes lie.
    pub memory: Memory,
}

/// What a carrier does when memory is registered and given back. It is called outside of the engine's lock, and may take its
/// time.
pub trait Registrar: Send + Sync {
    /// Memory of a GPU is about to be registered. From then on [`Memory::Gpu`] with this number means that GPU. Called before
    /// each such registration, with the same number for the same GPU.
    ///
    /// # Errors
    /// A driver refuses what this carrier needs: then the memory is not registered.
    fn add_gpu(&self, number: u16, gpu: &Gpu) -> Result<(), GpuError> {
        let _ = (number, gpu);
        Ok(())
    }

    /// The memory may be touched by this carrier from now on. Answers what peers have to know to reach it, if anything: at
    /// most 255 bytes.
    ///
    /// # Errors
    /// It cannot: then nothing is registered. A carrier that just does not reach this memory answers no key.
    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError>;

    /// The region is being given back. What peers read of it on their own, and is over after this, does not count.
    fn withdraw(&self, region: &MemoryRegion) {
        let _ = region;
    }

    /// Its peer may read through a window from now on.
    fn open_window(&self, window: &OpenedWindow<'_>) {
        let _ = window;
    }

    /// A window is being closed. What its peer reads through it on its own, and is over after this, does not count.
    fn close_window(&self, number: u32, generation: u32) {
        let _ = (number, generation);
    }

    /// Nothing of the region is under way any more.
    fn unregister(&self, region: &MemoryRegion) {
        let _ = region;
    }
}
