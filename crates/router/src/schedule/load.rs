//! What a node has to do: what this router gave it, and what others did.

/// What a node works at. Tokens are those of prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that this router has there.
    pub own_requests: u64,
    /// Tokens of them that are still to be prefilled.
    pub own_tokens: u64,
    /// Requests of others, by the node's own metrics.
    pub other_requests: u64,
}

impl Load {
    /// All requests that it works at or that wait in it.
    pub fn batch(&self) -> u64 {
        self.own_requests + self.other_requests
    }

    /// The node's metrics tell how many requests run and wait in it. What is more than this router's own are others'.
    pub fn observe(&mut self, running_and_waiting: u64) {
        self.other_requests = running_and_waiting.saturating_sub(self.own_requests);
    }

    /// The product of the time until a request starts and what it slows down: (tokens to be prefilled before it is done) x
    /// (requests that it shares the node with, and itself). Without weights, after LMetric (arXiv 2603.15202). `miss_tokens` is
    /// known to within `grain` tokens only, so it counts as no less: else a node that has all of a prompt would get thousands
    /// of requests for it before the first one goes elsewhere.
    pub fn work_with(&self, miss_tokens: u64, grain: u64) -> u128 {
        u128::from(self.own_tokens + miss_tokens.max(grain).max(1)) * u128::from(self.batch() + 1)
    }
}
