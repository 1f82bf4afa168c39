//! Ranges of this process's memory: the host's ([`Piece`]), or the host's or a GPU's ([`Spot`]).

/// Bytes that a socket or a system call reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Piece {
    pub(crate) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    pub(crate) fn overlaps(self, other: Piece) -> bool {
        self.address < other.address + other.len && other.address < self.address + self.len
    }

    /// The bytes after the first `by`.
    pub(crate) fn after(self, by: usize) -> Piece {
        debug_assert!(by <= self.len);
        Piece { address: self.address + by, len: self.len - by }
    }
}

/// Bytes somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) piece: Piece,
    /// The number of the GPU on which they are; None for the host.
    pub(crate) gpu: Option<usize>,
}

impl Spot {
    pub(crate) fn overlaps(&self, other: Spot) -> bool {
        self.gpu == other.gpu && self.piece.overlaps(other.piece)
    }
}
