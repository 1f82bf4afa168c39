//! What the scheduler's side says of an engine's KV cache group.

/// One KV cache group of the engine.
#[derive(Debug, Clone)]
pub struct GroupSpec {
    /// Digest of what the group's content means.
    pub namespace: [u8; 16],
    /// For logs and lists of spaces; two groups may have the same.
    pub name: String,
    /// Tokens that one block holds.
    pub tokens_per_block: u32,
    /// 0 when a hit needs the whole prefix, else how many blocks before its end.
    pub window_blocks: u32,
}
