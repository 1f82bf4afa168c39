//! [`Registrar`]: the hooks of a carrier that the engine runs when memory is registered and given back.
//!
//! ```text
//!  region:  add_gpu (if it is on a GPU) --> register --> withdraw --> (nothing touches it any more) --> unregister
//!  window:                                  open_window --> close_window
//! ```
//! A carrier whose peers read by themselves revokes their access in `withdraw` and `close_window`: a read that ends after that
//! must not count at the peer.

use kvlane_gpu::{Gpu, GpuError};

use crate::transfers::Memory;
use crate::window::WindowRange;

/// Why memory cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{carrier}: {why}")]
pub struct RegisterError {
    /// The name of the carrier that failed.
    pub carrier: &'static str,
    /// The reason, for users.
    pub why: String,
}

/// A region, as a carrier gets it when it is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRegion {
    /// The number that peers name.
    pub number: u32,
    /// How often the number was used before.
    pub generation: u32,
    /// The first byte, in the host's or the GPU's address space.
    pub address: u64,
    /// Bytes of the region.
    pub len: u64,
    /// The memory of all of its bytes.
    pub memory: Memory,
    /// Whether peers may write it.
    pub is_writable: bool,
}

/// A window, as a carrier gets it when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedWindow<'a> {
    /// The number that its peer names in place of a region's.
    pub number: u32,
    /// How often the number was used before.
    pub generation: u32,
    /// The ranges of registered regions that the peer may read.
    pub ranges: &'a [WindowRange],
    /// The memory of all of these ranges.
    pub memory: Memory,
}

/// A carrier's part in registering memory and giving it back. The engine calls it without its lock, so it may be slow.
pub trait Registrar: Send + Sync {
    /// Memory of a GPU is about to be registered. From now on [`Memory::Gpu`] with this number means this GPU. Called before
    /// each such registration, with the same number for the same GPU.
    ///
    /// # Errors
    /// A driver refuses what this carrier needs. Then the memory is not registered.
    fn add_gpu(&self, number: u16, gpu: &Gpu) -> Result<(), GpuError> {
        let _ = (number, gpu);
        Ok(())
    }

    /// Registers a region. From now on this carrier may touch its memory. Returns the key that peers need to reach it, of at
    /// most 255 bytes. None: the carrier does not reach this memory, or needs no key.
    ///
    /// # Errors
    /// The carrier fails. Then no carrier has the region registered.
    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError>;

    /// The owner takes a region back. A read that a peer does by itself, and that ends after this call, must not count.
    fn withdraw(&self, region: &MemoryRegion) {
        let _ = region;
    }

    /// Lets a window's peer read through it from now on.
    fn open_window(&self, window: &OpenedWindow<'_>) {
        let _ = window;
    }

    /// The owner closes a window. A read that the peer does by itself, and that ends after this call, must not count.
    fn close_window(&self, number: u32, generation: u32) {
        let _ = (number, generation);
    }

    /// Unregisters a region that nothing touches any more.
    fn unregister(&self, region: &MemoryRegion) {
        let _ = region;
    }
}
