//! Requests that were recorded.

use std::time::Duration;

use kvlane_policy::spread;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Since the trace began.
    pub at: Duration,
    /// Tokens of its prompt, at least 1.
    pub prompt_tokens: u64,
    /// Tokens of its answer, at least 1.
    pub output_tokens: u64,
    /// The blocks of its prompt: an id names a block and all before it.
    pub blocks: Vec<u64>,
}

/// Requests in the order in which they came.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Of each block.
    pub block_tokens: u64,
    /// All of them, by time.
    pub requests: Vec<Request>,
}

impl Trace {
    /// Those of `requests` that have a prompt and an answer, by time. A request's length counts where its blocks are more.
    pub fn new(block_tokens: u64, requests: Vec<Request>) -> Self {
        let mut requests: Vec<Request> = requests
            .into_iter()
            .filter(|request| request.prompt_tokens > 0 && request.output_tokens > 0)
            .collect();
        for request in &mut requests {
            let most = request.prompt_tokens.div_ceil(block_tokens.max(1));
            request.blocks.truncate(usize::try_from(most).unwrap_or(usize::MAX));
            // Caches and the router's index take keys for hashes, and traces number their blocks.
            request.blocks.iter_mut().for_each(|block| *block = spread(*block));
        }
        requests.sort_by_key(|request| request.at);
        Self { block_tokens: block_tokens.max(1), requests }
    }

    /// When the last request came.
    pub fn end(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |request| request.at)
    }
}
