//! A simulated pool of blocks that several engines share, as the engines of one host share their daemon's memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_policy::{CacheModel, PolicyKind};

/// How a pool is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolSetup {
    /// Name in the file and in messages.
    pub name: String,
    /// Tokens whose blocks it keeps. Each engine also keeps blocks of its own `kv_tokens`.
    pub tokens: u64,
    /// Policy by which blocks are evicted.
    pub eviction: PolicyKind,
    /// Milliseconds to load a token, during which the engine computes other requests.
    pub load_token_ms: f64,
    /// Whether the router learns which nodes share the pool.
    pub is_reported: bool,
}

impl Default for PoolSetup {
    /// Room for 256 GB of an 8B model's blocks, loaded at 45 GB/s.
    fn default() -> Self {
        Self {
            name: "pool".into(),
            tokens: 2_000_000,
            eviction: PolicyKind::Lru,
            load_token_ms: 0.003,
            is_reported: true,
        }
    }
}

/// A pool of several engines. Clones refer to the same pool.
#[derive(Clone)]
pub struct Pool {
    cache: Arc<Mutex<CacheModel>>,
    load_token_ms: f64,
}

impl Pool {
    /// Creates an empty pool.
    pub fn new(setup: &PoolSetup, block_tokens: u64) -> Self {
        let blocks = (setup.tokens / block_tokens.max(1)).clamp(1, u64::from(u32::MAX - 1)) as usize;
        let cache = Arc::new(Mutex::new(CacheModel::new(setup.eviction, blocks)));
        Self { cache, load_token_ms: setup.load_token_ms }
    }

    fn cache(&self) -> MutexGuard<'_, CacheModel> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of leading blocks that the pool holds.
    pub(crate) fn leading_blocks(&self, blocks: &[u64]) -> usize {
        let cache = self.cache();
        blocks.iter().take_while(|block| cache.contains(**block)).count()
    }

    /// Adds the blocks of a prompt that an engine has computed or loaded.
    pub(crate) fn keep(&self, blocks: &[u64]) {
        self.cache().request(blocks, |_| ());
    }

    pub(crate) fn load_ms(&self, tokens: u64) -> f64 {
        self.load_token_ms * tokens as f64
    }
}
