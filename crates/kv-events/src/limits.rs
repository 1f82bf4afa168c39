//! How much one batch may hold.

/// What [`crate::decode_batch`] accepts. What it answers takes at most some 70 bytes for each byte of the batch: a hash of one
/// byte on the wire takes 33, in a vector that may have twice the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a batch.
    pub batch_bytes: usize,
    /// Events of a batch, unknown ones included.
    pub events: usize,
    /// Hashes of one event.
    pub hashes: usize,
    /// Tokens of one event.
    pub tokens: usize,
    /// Arrays and maps within each other, in values that are passed over.
    pub depth: usize,
}

impl Default for Limits {
    /// Room for the blocks of a prompt of a million tokens in one event.
    fn default() -> Self {
        Self { batch_bytes: 8 << 20, events: 1 << 16, hashes: 1 << 17, tokens: 1 << 20, depth: 16 }
    }
}
