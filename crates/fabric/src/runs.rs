//! Ranges that are contiguous on both sides.

pub(crate) use kvlane_block::push_run as append;
use kvlane_block::{Contiguous, Position};

/// A byte in registered memory: of which region, and how far from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The region, by its number at its owner.
    pub region: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// A range that is contiguous here and there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Where it begins here.
    pub local: Place,
    /// Where it begins at the peer.
    pub remote: Place,
    /// Bytes.
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
    /// The first `len` bytes, and the rest.
    ///
    /// # Panics
    /// If the run is shorter.
    pub fn split(self, len: u64) -> (Run, Run) {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        let rest = Run { local: self.local.moved(len), remote: self.remote.moved(len), len: self.len - len };
        (Run { len, ..self }, rest)
    }
}
