//! [`Run`]: a range of bytes that is contiguous on both sides of a transfer.

pub(crate) use kvlane_block::push_run as append;
use kvlane_block::{Contiguous, Position};

/// The position of a byte in registered memory: its region, and its offset there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The region, by its number at its owner.
    pub region: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// A range that is contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Its first byte here.
    pub local: Place,
    /// Its first byte at the peer.
    pub remote: Place,
    /// Bytes, the same on both sides.
    pub len: u64,
}

impl Place {
    fn moved(self, by: u64) -> Place {
        Place { offset: self.offset + by, ..self }
    }
}

impl Position for Place {
    fn after(self, bytes: u64) -> Option<Place> {
        Some(Place { offset: self.offset.checked_add(bytes)?, ..self })
    }
}

impl Contiguous for Run {
    type One = Place;
    type Other = Place;

    fn begin(&self) -> (Place, Place) {
        (self.local, self.remote)
    }

    fn bytes(&self) -> u64 {
        self.len
    }

    fn with_bytes(self, len: u64) -> Run {
        Run { len, ..self }
    }
}

impl Run {
    /// Splits off the first `len` bytes, and returns them and the rest.
    ///
    /// # Panics
    /// If the run is shorter.
    pub fn split(self, len: u64) -> (Run, Run) {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        let rest = Run { local: self.local.moved(len), remote: self.remote.moved(len), len: self.len - len };
        (Run { len, ..self }, rest)
    }
}
