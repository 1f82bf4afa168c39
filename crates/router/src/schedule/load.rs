//! A node's load: what this router reserved there ([`super`]), and what the engine's own metrics add for other clients.

/// A decode node with a KV cache this full, in percent, has no room for a request that could go elsewhere.
pub(super) const CACHE_PERCENT_MAX: u64 = 80;

/// The load of a node. Tokens are those of prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Legs that this router has there.
    pub own_requests: u64,
    /// The part of `own_requests` that it decodes, or will decode once another node has prefilled the prompt.
    pub own_decodes: u64,
    /// The part of `own_decodes` whose prompts prefill nodes have yet to prefill.
    pub own_awaited: u64,
    /// Tokens that it still has to prefill for `own_requests`.
    pub own_tokens: u64,
    /// The part of `own_tokens` whose answers come in one piece: nothing shows when they are prefilled.
    pub own_unseen: u64,
    /// Requests of other clients, by the node's own metrics.
    pub other_requests: u64,
    /// As in [`Reported`].
    pub waiting: Option<u64>,
    /// As in [`Reported`].
    pub preempted: Option<f64>,
    /// As in [`Reported`].
    pub step_tokens: Option<f64>,
    /// As in [`Reported`].
    pub cache_percent: Option<u64>,
}

/// The load that a node's own metrics report. None: the engine has no such metric.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reported {
    /// Requests that run or wait, of all clients.
    pub requests: u64,
    /// The part of `requests` that waits.
    pub waiting: Option<u64>,
    /// Percent of its KV cache that running requests use.
    pub cache_percent: Option<u64>,
    /// Requests a second that it preempted for lack of room, since the previous scrape.
    pub preempted: Option<f64>,
    /// Mean tokens of a step since the previous scrape; 0 if it made none.
    pub step_tokens: Option<f64>,
}

impl Load {
    /// All requests that run or wait there, of this router and of others.
    pub fn batch(&self) -> u64 {
        self.own_requests + self.other_requests
    }

    /// Tokens that it certainly still has to prefill.
    pub fn prefilling(&self) -> u64 {
        self.own_tokens.saturating_sub(self.own_unseen)
    }

    /// Own requests that it decodes now.
    pub fn decoding(&self) -> u64 {
        // A decode leg may end before its prefill leg does.
        self.own_decodes.saturating_sub(self.own_awaited)
    }

    /// Takes in the node's metrics. Requests beyond this router's own are other clients'. Own requests come and go during the
    /// scrape. So the greater count of before (`own_before`) and now is subtracted. Otherwise the router would take its own
    /// requests for others'.
    pub fn observe(&mut self, reported: Reported, own_before: u64) {
        self.other_requests = reported.requests.saturating_sub(self.own_requests.max(own_before));
        self.waiting = reported.waiting;
        (self.preempted, self.step_tokens) = (reported.preempted, reported.step_tokens);
        self.cache_percent = reported.cache_percent;
    }

    /// Drops all that the node's metrics reported, because they have failed for too long.
    pub fn observe_nothing(&mut self) {
        self.other_requests = 0;
        self.waiting = None;
        (self.preempted, self.step_tokens) = (None, None);
        self.cache_percent = None;
    }

    /// LMetric's cost (arXiv 2603.15202), which has no weights: (tokens to prefill until this prompt is done) x (requests that
    /// share the node). The first factor stands for the wait, the second for the requests that it slows down.
    ///
    /// - `miss_tokens` counts as at least `grain`, its resolution. Otherwise a node with all of a prompt would get thousands of
    ///   requests for it before the first one goes elsewhere.
    /// - `beside` is added to the node's requests. LMetric's own is 1: the request itself.
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
        // Requests that ended during the scrape are still in the node's count.
        load.observe(requests(5), 6);
        assert_eq!((load.other_requests, load.own_requests), (0, 3));
        load.observe(requests(4), 3);
        load.observe_nothing();
        assert_eq!((load.batch(), load.cache_percent), (3, None));
    }
}
