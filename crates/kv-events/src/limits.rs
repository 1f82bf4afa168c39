//! The limits of one batch.

/// Limits of [`crate::decode_batch`]. Its result takes at most some 70 bytes for each byte of the batch: a hash of one byte on
/// the wire takes 33, in a vector that may have twice the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of a batch.
    pub batch_bytes: usize,
    /// Most events of a batch, unknown ones included.
    pub events: usize,
    /// Most hashes of one event.
    pub hashes: usize,
    /// Most tokens of one event.
    pub tokens: usize,
    /// Deepest nesting of arrays and maps in values that are skipped.
    pub depth: usize,
}

impl Default for Limits {
    /// Room for the blocks of a prompt of a million tokens in one event.
    fn default() -> Self {
        Self { batch_bytes: 8 << 20, events: 1 << 16, hashes: 1 << 17, tokens: 1 << 20, depth: 16 }
    }
}
