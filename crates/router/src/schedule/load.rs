//! What a node has to do: what this router gave it, and what others did.

/// A decode node whose KV cache is fuller than this has no room for what could go elsewhere.
pub(super) const CACHE_PERCENT_MAX: u64 = 80;

/// What a node works at. Tokens are those of prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Requests that this router has there.
    pub own_requests: u64,
    /// Of these, requests that it decodes, or will: whoever prefilled them.
    pub own_decodes: u64,
    /// Of these, requests whose prompts other nodes have yet to prefill.
    pub own_awaited: u64,
    /// Tokens of own requests that are still to be prefilled.
    pub own_tokens: u64,
    /// Of these, tokens of answers that come in one piece: when they have been prefilled nobody sees.
    pub own_unseen: u64,
    /// Requests of others, by the node's own metrics.
    pub other_requests: u64,
    /// Requests that wait in it, by its own metrics; None if they are not known.
    pub waiting: Option<u64>,
    /// As in [`Reported`].
    pub preempted: Option<f64>,
    /// As in [`Reported`].
    pub step_tokens: Option<f64>,
    /// Percent of the node's KV cache that running requests use, by its own metrics; None if they are not known.
    pub cache_percent: Option<u64>,
}

/// What a node's own metrics say.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reported {
    /// Requests that run and that wait, whoever sent them.
    pub requests: u64,
    /// Of these, those that wait; None where it does not tell.
    pub waiting: Option<u64>,
    /// Percent of its KV cache that running requests use; None where it does not tell.
    pub cache_percent: Option<u64>,
    /// Requests that it has put off for lack of room, a second, since it was asked before; None where it does not tell.
    pub preempted: Option<f64>,
    /// Tokens that a step has computed since then, on average, 0 if it has made none; None where it does not tell.
    pub step_tokens: Option<f64>,
}

impl Load {
    /// All requests that it works at or that wait in it.
    pub fn batch(&self) -> u64 {
        self.own_requests + self.other_requests
    }

    /// Tokens that are certainly still to be prefilled.
    pub fn prefilling(&self) -> u64 {
        self.own_tokens.saturating_sub(self.own_unseen)
    }

    /// Own requests that it decodes now.
    pub fn decoding(&self) -> u64 {
        // A leg may end before the one that it waits for.
        self.own_decodes.saturating_sub(self.own_awaited)
    }

    /// The node's metrics have come. What they tell beyond this router's own requests is others'. The own ones come and go
    /// while the node answers: `own_before` is how many there were when it was asked, and the greater number counts, since a
    /// node must not look loaded by its own shadow.
    pub fn observe(&mut self, reported: Reported, own_before: u64) {
        self.other_requests = reported.requests.saturating_sub(self.own_requests.max(own_before));
        self.waiting = reported.waiting;
        (self.preempted, self.step_tokens) = (reported.preempted, reported.step_tokens);
        self.cache_percent = reported.cache_percent;
    }

    /// Nothing is known of others any more.
    pub fn observe_nothing(&mut self) {
        self.other_requests = 0;
        self.waiting = None;
        (self.preempted, self.step_tokens) = (None, None);
        self.cache_percent = None;
    }

    /// The product of the time until a request starts and what it slows down: (tokens to be prefilled before it is done) x
    /// (requests that it shares the node with, and itself). Without weights, after LMetric (arXiv 2603.15202). `miss_tokens` is
    /// known to within `grain` tokens only, so it counts as no less: else a node that has all of a prompt would get thousands
    /// of requests for it before the first one goes elsewhere. `beside` counts as so many requests more: with 1, the request itself,
    /// it is LMetric's.
    pub fn work_with(&self, miss_tokens: u64, grain: u64, beside: u64) -> u128 {
        u128::from(self.own_tokens + miss_tokens.max(grain).max(1)) * u128::from(self.batch() + beside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_exceeds_our_own_is_others() {
        let mut load = Load { own_requests: 3, ..Load::default() };
        let requests = |requests| Reported {
            requests,
            waiting: Some(1),
            cache_percent: Some(40),
            ..Reported::default()
        };
        load.observe(requests(10), 2);
        assert_eq!((load.other_requests, load.batch(), load.cache_percent), (7, 10, Some(40)));
        // Requests that ended while the node answered are still in what it counted.
        load.observe(requests(5), 6);
        assert_eq!((load.other_requests, load.own_requests), (0, 3));
        load.observe(requests(4), 3);
        load.observe_nothing();
        assert_eq!((load.batch(), load.cache_percent), (3, None));
    }
}
