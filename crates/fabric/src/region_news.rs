//! [`RegionNews`]: the announcements of registered memory that a process sends to its peers over their control connections.

use crate::descriptor::RegionDescriptor;
use crate::transfers::Memory;
use crate::window::WindowRange;

/// By a carrier's code, the key with which that carrier reaches a region.
pub(crate) type Keys = Vec<(u8, Box<[u8]>)>;

/// The announcement of one region or window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RegionNews {
    /// The region is registered.
    Here { region: RegionDescriptor, memory: Memory, keys: Keys },
    /// The peer may read these ranges through a window. `has_more`: the next announcement has more ranges of the same window.
    Window { number: u32, generation: u32, memory: Memory, ranges: Vec<WindowRange>, has_more: bool },
    /// This generation is no longer registered.
    Gone { number: u32, generation: u32 },
}
