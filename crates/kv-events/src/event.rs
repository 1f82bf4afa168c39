//! Events, as vLLM's vllm/distributed/kv_events.py defines them.

/// A block's hash as vLLM publishes it: 16 or 32 bytes, or the low 64 bits where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExternalHash {
    /// The low 64 bits.
    Number(u64),
    /// A hash of 128 bits.
    Short([u8; 16]),
    /// A hash of 256 bits.
    Long([u8; 32]),
}

/// A change of an engine's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks can be found from now on.
    Stored(BlockStored),
    /// Blocks are gone.
    Removed(BlockRemoved),
    /// All blocks are gone.
    Cleared,
}

/// What a block's hash depends on beside its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtraKey {
    /// An adapter's name, a salt, the hash of a picture.
    Text(String),
    /// Anything else. What it is is not kept.
    Other,
}

/// Blocks that follow each other in a prompt can be found from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockStored {
    /// The blocks, in the prompt's order.
    pub hashes: Vec<ExternalHash>,
    /// The block before the first. `None` at a prompt's start.
    pub parent: Option<ExternalHash>,
    /// The tokens of all these blocks.
    pub tokens: Vec<u32>,
    /// Tokens of one block.
    pub block_size: u32,
    /// The adapter's number. vLLM's newer field is the name.
    pub lora_id: Option<i64>,
    /// Where the blocks lie, as "GPU".
    pub medium: Option<String>,
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// What the hash of each block depends on beside its tokens: adapters, pictures, salts, embeddings. Empty where no block
    /// of the event has any.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// The KV cache group that the blocks belong to.
    pub group: Option<u32>,
}

/// Blocks are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRemoved {
    /// vLLM's own hashes of the blocks that went, in no order.
    pub hashes: Vec<ExternalHash>,
    /// Where they lay, as "GPU".
    pub medium: Option<String>,
    /// The KV cache group that they belonged to.
    pub group: Option<u32>,
}
