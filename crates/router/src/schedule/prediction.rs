//! Predicts how long a node takes to a request's first token and to each further one. Learned from tokens that came.
//!
//! ```text
//!  first token, ms     = a + b * waiting + c * miss * (found + miss / 2) + d * requests + g * loaded
//!         waiting: tokens that the node has to prefill, this prompt's `miss` included; these follow `found` tokens, of which
//!         the node loads `loaded` from its pool
//!  further tokens, ms  = e + f * requests
//! ```

use std::time::Duration;

use super::least_squares::LeastSquares;

/// Terms of a first token's formula.
const TERMS: usize = 5;
/// No engine generates one request's tokens faster than this. Faster ones came in one piece.
const FURTHER_LEAST: Duration = Duration::from_micros(500);
/// Length of the prompts that rates are given for.
const USUAL_TOKENS: u64 = 2000;
/// Loaded prompts that the load share needs.
const LOADS_MIN: u64 = 20;
/// Number of requests at which the speeds of nodes are compared.
const USUAL_REQUESTS: u64 = 32;

/// The terms that a first token's time depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Terms([f64; TERMS]);

impl Terms {
    /// A prompt with `miss` tokens to prefill behind `found` others, at a node that has `pending` tokens to prefill before it,
    /// and `requests` requests.
    pub(super) fn new(miss: u64, found: u64, pending: u64, requests: u64) -> Self {
        let [miss, found, pending, requests] = [miss, found, pending, requests].map(|count| count as f64);
        // Scaled to about the same size, so that the covariance stays well conditioned.
        Self([1.0, (pending + miss) / 1e3, miss * (found + miss / 2.0) / 1e6, requests / 10.0, 0.0])
    }

    /// Adds that the node loads this many tokens from its pool.
    pub(super) fn loading(mut self, tokens: u64) -> Self {
        self.0[4] = tokens as f64 / 1e3;
        self
    }
}

/// The learned times of one class of nodes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Prediction {
    first: LeastSquares<TERMS>,
    further: LeastSquares<2>,
    /// Number of first tokens that followed a load from a pool.
    loads: u64,
}

impl Prediction {
    /// Whether its predictions of first tokens may be used.
    pub fn is_calibrated(&self) -> bool {
        self.first.is_calibrated()
    }

    /// Number of first tokens that it has learned from.
    pub fn observations(&self) -> u64 {
        self.first.observations()
    }

    /// Mean relative error of recent predictions, each made before the first token came.
    pub fn error(&self) -> f64 {
        self.first.error()
    }

    /// Milliseconds to a first token, at least 0.
    pub(super) fn first_token(&self, terms: Terms) -> f64 {
        self.first.predict(&terms.0)
    }

    /// Milliseconds of a node's time that a prompt takes, with `miss` tokens to prefill behind `found` others.
    pub(super) fn prefill(&self, miss: u64, found: u64) -> f64 {
        let Terms([_, tokens, pairs, ..]) = Terms::new(miss, found, 0, 0);
        let [_, token, pair, ..] = self.first.coefficients.map(|each| each.max(0.0));
        token * tokens + pair * pairs
    }

    /// Tokens a second that a node prefills, in prompts of two thousand. None until calibrated.
    pub fn prefill_rate(&self) -> Option<f64> {
        let ms = self.prefill(USUAL_TOKENS, 0);
        (self.is_calibrated() && ms > 0.0).then(|| USUAL_TOKENS as f64 / ms * 1e3)
    }

    /// Time to load a token, divided by the time to compute one: from 0 to 1. None until calibrated, and with fewer than
    /// `LOADS_MIN` loads.
    pub fn load_share(&self) -> Option<f64> {
        let computed = self.prefill(USUAL_TOKENS, 0) / USUAL_TOKENS as f64;
        let loaded = self.first.coefficients[4].max(0.0) / 1e3;
        let is_known = self.is_calibrated() && self.loads >= LOADS_MIN && computed > 0.0;
        is_known.then(|| (loaded / computed).min(1.0))
    }

    /// Milliseconds between two tokens of a request at a node with `requests` requests in all. None until calibrated.
    pub fn further_token(&self, requests: u64) -> Option<f64> {
        self.further.is_calibrated().then(|| self.further.predict(&further(requests)))
    }

    /// Number of requests at once whose further tokens come within `limit`. None until calibrated.
    pub fn requests_within(&self, limit: Duration) -> Option<f64> {
        let [alone, each] = self.further.coefficients;
        let left = limit.as_secs_f64() * 1e3 - alone;
        let requests = if each > 0.0 { (left / each * 10.0).max(1.0) } else { f64::INFINITY };
        self.further.is_calibrated().then_some(requests)
    }

    /// How much better these nodes are at prefilling than at decoding. Only the ratio of two classes' values has a meaning.
    /// None until calibrated.
    pub fn leans_to_prefill(&self) -> Option<f64> {
        Some(self.prefill_rate()? * self.further_token(USUAL_REQUESTS)?).filter(|leans| *leans > 0.0)
    }

    /// Learns from a first token.
    pub(super) fn observe(&mut self, terms: Terms, took: Duration) {
        self.first.observe(&terms.0, took.as_secs_f64() * 1e3);
        self.loads += u64::from(terms.0[4] > 0.0);
    }

    /// Learns from a request's further tokens: their mean time, at a node with `requests` requests.
    pub(super) fn observe_further(&mut self, requests: u64, took: Duration) {
        // Tokens that came in one piece say nothing about the node.
        if took >= FURTHER_LEAST {
            self.further.observe(&further(requests), took.as_secs_f64() * 1e3);
        }
    }
}

fn further(requests: u64) -> [f64; 2] {
    [1.0, requests as f64 / 10.0]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The time of an engine that follows the formula exactly.
    fn took(miss: u64, found: u64, pending: u64, requests: u64) -> Duration {
        let (miss, found) = (miss as f64, found as f64);
        let ms = 11.0
            + 0.02 * (pending as f64 + miss)
            + 7.5e-7 * miss * (found + miss / 2.0)
            + 0.1 * requests as f64;
        Duration::from_secs_f64(ms / 1e3)
    }

    fn spread(number: u64) -> impl Iterator<Item = (u64, u64, u64, u64)> {
        let mut chance = number;
        std::iter::repeat_with(move || {
            let mut below = |most: u64| {
                chance =
                    chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (chance >> 33) % most
            };
            (1 + below(8000), below(4000), below(20_000), below(60))
        })
    }

    #[test]
    fn what_is_so_is_learned() {
        let mut prediction = Prediction::default();
        for (miss, found, pending, requests) in spread(1).take(200) {
            prediction
                .observe(Terms::new(miss, found, pending, requests), took(miss, found, pending, requests));
        }
        assert!(prediction.is_calibrated() && prediction.error() < 0.05, "{prediction:?}");
        for (miss, found, pending, requests) in spread(9).take(100) {
            let found_ms = prediction.first_token(Terms::new(miss, found, pending, requests));
            let wanted = took(miss, found, pending, requests).as_secs_f64() * 1e3;
            assert!((found_ms / wanted - 1.0).abs() < 0.05, "{found_ms} {wanted}");
        }
        let delay = prediction.prefill(1000, 0);
        assert!((delay / 20.4 - 1.0).abs() < 0.1, "{delay}");
    }

    #[test]
    fn what_a_load_takes_is_learned_from_prompts_that_were_loaded() {
        let mut prediction = Prediction::default();
        for (miss, found, pending, requests) in spread(7).take(100) {
            prediction
                .observe(Terms::new(miss, found, pending, requests), took(miss, found, pending, requests));
        }
        assert_eq!(prediction.load_share(), None, "nothing was loaded");
        for (miss, found, pending, requests) in spread(8).take(100) {
            let load = Duration::from_micros(2 * found);
            let terms = Terms::new(miss, found, pending, requests).loading(found);
            prediction.observe(terms, took(miss, found, pending, requests) + load);
        }
        // A computed token of two thousand takes 20.75 us.
        let share = prediction.load_share().unwrap();
        assert!((share / (2.0 / 20.75) - 1.0).abs() < 0.1, "{share}");
    }

    #[test]
    fn nothing_is_predicted_before_enough_is_seen_nor_of_what_does_not_follow_the_formula() {
        let mut prediction = Prediction::default();
        for (count, (miss, found, pending, requests)) in spread(2).take(60).enumerate() {
            assert_eq!(prediction.is_calibrated(), count >= 50);
            prediction
                .observe(Terms::new(miss, found, pending, requests), took(miss, found, pending, requests));
        }
        let mut noise = Prediction::default();
        for (at, (miss, found, pending, requests)) in spread(3).take(500).enumerate() {
            let ms = if at % 2 == 0 { 3 } else { 3000 };
            noise.observe(Terms::new(miss, found, pending, requests), Duration::from_millis(ms));
        }
        assert!(!noise.is_calibrated(), "{noise:?}");
    }

    #[test]
    fn a_node_that_becomes_slower_is_followed() {
        let mut prediction = Prediction::default();
        for (miss, found, pending, requests) in spread(4).take(1000) {
            prediction
                .observe(Terms::new(miss, found, pending, requests), took(miss, found, pending, requests));
        }
        for (miss, found, pending, requests) in spread(5).take(3000) {
            prediction.observe(
                Terms::new(miss, found, pending, requests),
                3 * took(miss, found, pending, requests),
            );
        }
        let ms = prediction.first_token(Terms::new(4000, 0, 0, 10));
        let wanted = 3e3 * took(4000, 0, 0, 10).as_secs_f64();
        assert!((ms / wanted - 1.0).abs() < 0.2, "{ms} {wanted}");
    }

    #[test]
    fn further_tokens_take_longer_the_more_requests_there_are() {
        let mut prediction = Prediction::default();
        assert_eq!(
            (prediction.further_token(9), prediction.requests_within(Duration::from_millis(20))),
            (None, None)
        );
        for (_, _, _, requests) in spread(6).take(200) {
            prediction.observe_further(requests, Duration::from_micros(7000 + 100 * requests));
        }
        let found = prediction.further_token(50).unwrap();
        assert!((found / 12.0 - 1.0).abs() < 0.02, "{found}");
        let within = prediction.requests_within(Duration::from_millis(20)).unwrap();
        assert!((within / 130.0 - 1.0).abs() < 0.05, "{within}");
        assert_eq!(prediction.leans_to_prefill(), None, "no first token has come");
    }

    proptest! {
        #[test]
        fn whatever_comes_it_stays_a_number(
            all in prop::collection::vec((any::<[u64; 4]>(), any::<u64>()), 0..200),
            small in prop::collection::vec((any::<[u8; 4]>(), 0u64..10_000), 0..200),
        ) {
            let mut prediction = Prediction::default();
            let small = small.into_iter().map(|(terms, ms)| (terms.map(u64::from), ms));
            for ([miss, found, pending, requests], ms) in all.into_iter().chain(small) {
                let (found, pending) = (found / 4, pending / 4);
                let terms = Terms::new(miss / 4, found, pending, requests);
                prediction.observe(terms, Duration::from_millis(ms % (1 << 40)));
                prop_assert!(prediction.first_token(terms).is_finite() && prediction.first_token(terms) >= 0.0);
                prop_assert!(prediction.prefill(miss / 4, found) >= 0.0);
                prop_assert!(prediction.error().is_finite());
            }
        }
    }
}
