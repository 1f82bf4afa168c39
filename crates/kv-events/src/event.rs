//! KV events. Source: vLLM's vllm/distributed/kv_events.py.

/// A block's hash as vLLM publishes it: 16 or 32 bytes, or its low 64 bits if VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExternalHash {
    /// The low 64 bits of a hash.
    Number(u64),
    /// A hash of 128 bits.
    Short([u8; 16]),
    /// A hash of 256 bits.
    Long([u8; 32]),
}

/// A change of an engine's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The engine finds these blocks from now on.
    Stored(BlockStored),
    /// The engine no longer has these blocks.
    Removed(BlockRemoved),
    /// The engine has no blocks any more.
    Cleared,
}

/// An input of a block's hash beside its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtraKey {
    /// An adapter's name, a salt, the hash of a picture.
    Text(String),
    /// A value of another type, which is not kept.
    Other,
}

/// Stored blocks, which follow each other in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockStored {
    /// The blocks, in the prompt's order.
    pub hashes: Vec<ExternalHash>,
    /// The block before the first. `None` at a prompt's start.
    pub parent: Option<ExternalHash>,
    /// The tokens of all blocks, one block after the other.
    pub tokens: Vec<u32>,
    /// Tokens of one block.
    pub block_size: u32,
    /// The adapter's number. Newer versions of vLLM send its name.
    pub lora_id: Option<i64>,
    /// The memory that the blocks lie in, such as "GPU".
    pub medium: Option<String>,
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// Further inputs of each block's hash: adapters, pictures, salts, embeddings. Empty if no block of the event has any.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// The KV cache group that the blocks belong to.
    pub group: Option<u32>,
    /// vLLM's name for what the group's layers keep: `full_attention`, `sliding_window`, `mamba`.
    pub kind: Option<String>,
    /// Tokens of context that a token of the group sees, if it is a sliding window's.
    pub window: Option<u32>,
}

/// Removed blocks, all of one medium and group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRemoved {
    /// The blocks, in no particular order.
    pub hashes: Vec<ExternalHash>,
    /// The memory that they lay in, such as "GPU".
    pub medium: Option<String>,
    /// The KV cache group that they belonged to.
    pub group: Option<u32>,
}
