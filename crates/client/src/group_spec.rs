//! An engine's KV cache group, as its scheduler describes it to the daemon.

/// One KV cache group of the engine.
#[derive(Debug, Clone)]
pub struct GroupSpec {
    /// Digest of what the group's content means.
    pub namespace: [u8; 16],
    /// For logs and lists of spaces; two groups may have the same name.
    pub name: String,
    /// Tokens in one block.
    pub tokens_per_block: u32,
    /// Number of last blocks that a hit needs, for a sliding window; 0 if it needs the whole prefix.
    pub window_blocks: u32,
    /// Whether other hosts may have the group's blocks: its namespace is a digest of contents, or the user has named it.
    pub crosses_hosts: bool,
}
