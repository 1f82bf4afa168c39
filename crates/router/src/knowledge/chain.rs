//! Names of blocks of tokens, which cover all tokens before them: our own, whatever hash an engine has.
//!
//! ```text
//!   seed(block size, adapter) -> block 0 -> block 1 -> ...      block = xxh3(its tokens, and what else decides its content,
//!                                                                            seeded with the one before)
//! ```
//! Engines may take another hash each, or start it from a random number; the tokens are what they have in common.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens that are hashed at a time, on the stack.
const TOKENS_A_STEP: usize = 64;
/// Keeps an adapter of an empty name apart from none.
const HAS_ADAPTER: u64 = 1 << 63;
/// Keeps a text beside the tokens apart from tokens.
const IS_TEXT: u64 = 0x6b76_6c61_6e65_0001;

/// What comes before the first block of a prompt.
pub fn seed(block_size: u32, adapter: Option<&str>) -> u64 {
    let kind = u64::from(block_size) | adapter.map_or(0, |_| HAS_ADAPTER);
    xxh3_64_with_seed(adapter.unwrap_or_default().as_bytes(), kind)
}

/// A block, from the one before it. `beside` decides its content together with the tokens, as a salt does.
pub fn block<'t>(parent: u64, tokens: &[u32], beside: impl Iterator<Item = &'t str>) -> u64 {
    let mut bytes = [0; 4 * TOKENS_A_STEP];
    let mut hash = parent;
    for step in tokens.chunks(TOKENS_A_STEP) {
        for (place, token) in bytes.chunks_exact_mut(4).zip(step) {
            place.copy_from_slice(&token.to_le_bytes());
        }
        hash = xxh3_64_with_seed(&bytes[..4 * step.len()], hash);
    }
    beside.fold(hash, |hash, text| xxh3_64_with_seed(text.as_bytes(), hash ^ IS_TEXT))
}

/// Most blocks of one prompt that the router looks up: half a million tokens in blocks of 16. Other requests wait meanwhile.
const BLOCKS_MAX: usize = 1 << 15;

/// The full blocks of a prompt, in order. vLLM salts the first block, and so all that follow.
pub fn chain(tokens: &[u32], block_size: u32, adapter: Option<&str>, salt: Option<&str>) -> Vec<u64> {
    let mut parent = seed(block_size, adapter);
    let blocks = tokens.chunks_exact(block_size.max(1) as usize).take(BLOCKS_MAX).enumerate();
    blocks
        .map(|(place, tokens)| {
            parent = block(parent, tokens, salt.filter(|_| place == 0).into_iter());
            parent
        })
        .collect()
}
