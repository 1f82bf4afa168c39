//! A recorded trace: requests with their lengths and the blocks of their prompts.

use std::time::Duration;

use kvlane_policy::spread;

/// One recorded request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// When it came, from the trace's start.
    pub at: Duration,
    /// Length of its prompt, at least 1.
    pub prompt_tokens: u64,
    /// Length of its answer, at least 1.
    pub output_tokens: u64,
    /// The blocks of its prompt. An id stands for a block and all blocks before it.
    pub blocks: Vec<u64>,
}

/// Recorded requests in the order in which they came.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Ordered by time.
    pub requests: Vec<Request>,
}

impl Trace {
    /// Sorts `requests` by time, and drops those without a prompt or an answer. Blocks beyond a prompt's length are dropped.
    pub fn new(block_tokens: u64, requests: Vec<Request>) -> Self {
        let mut requests: Vec<Request> = requests
            .into_iter()
            .filter(|request| request.prompt_tokens > 0 && request.output_tokens > 0)
            .collect();
        for request in &mut requests {
            let most = request.prompt_tokens.div_ceil(block_tokens.max(1));
            request.blocks.truncate(usize::try_from(most).unwrap_or(usize::MAX));
            // Traces number their blocks, and caches and the router's index expect hashes.
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
