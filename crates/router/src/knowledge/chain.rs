//! Our own hashes of blocks. A hash covers the block's tokens and all tokens before them, and does not depend on the engine's
//! hash.
//!
//! ```text
//!   seed(block size, adapter) -> block 0 -> block 1 -> ...      block = xxh3(its tokens, and what else decides its content,
//!                                                                            seeded with the previous block)
//! ```
//! Engines may use different hash functions, or random seeds for them. Only the tokens are the same at all of them.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens that are hashed at a time, on the stack.
const TOKENS_A_STEP: usize = 64;
/// Distinguishes an adapter with an empty name from none.
const HAS_ADAPTER: u64 = 1 << 63;
/// Distinguishes an extra key from tokens.
const IS_TEXT: u64 = 0x6b76_6c61_6e65_0001;

/// The parent of a prompt's first block.
pub fn seed(block_size: u32, adapter: Option<&str>) -> u64 {
    let kind = u64::from(block_size) | adapter.map_or(0, |_| HAS_ADAPTER);
    xxh3_64_with_seed(adapter.unwrap_or_default().as_bytes(), kind)
}

/// The hash of a block with this parent. `extra` are further keys that decide its content, such as a salt.
pub fn block<'t>(parent: u64, tokens: &[u32], extra: impl Iterator<Item = &'t str>) -> u64 {
    let mut bytes = [0; 4 * TOKENS_A_STEP];
    let mut hash = parent;
    for step in tokens.chunks(TOKENS_A_STEP) {
        for (slot, token) in bytes.chunks_exact_mut(4).zip(step) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        hash = xxh3_64_with_seed(&bytes[..4 * step.len()], hash);
    }
    extra.fold(hash, |hash, text| xxh3_64_with_seed(text.as_bytes(), hash ^ IS_TEXT))
}

/// Most blocks of one prompt that the router looks up, because other requests wait meanwhile: half a million tokens in blocks
/// of 16.
const BLOCKS_MAX: usize = 1 << 15;

/// The hashes of a prompt's full blocks, in order. vLLM salts the first block, and so all that follow it.
pub fn chain(tokens: &[u32], block_size: u32, adapter: Option<&str>, salt: Option<&str>) -> Vec<u64> {
    let mut parent = seed(block_size, adapter);
    let blocks = tokens.chunks_exact(block_size.max(1) as usize).take(BLOCKS_MAX).enumerate();
    blocks
        .map(|(number, tokens)| {
            parent = block(parent, tokens, salt.filter(|_| number == 0).into_iter());
            parent
        })
        .collect()
}
