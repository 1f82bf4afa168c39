//! How long a node takes to a first token, learned from first tokens that came.
//!
//! ```text
//!  ms = a + b * waiting + c * miss * (found + miss / 2) + d * requests
//!         waiting: tokens that the node still prefills, these among them; miss of them are this prompt's, behind `found` others
//! ```
//! The coefficients follow by recursive least squares with forgetting (Ljung, System Identification, 1999, 11.2), of the
//! relative error: else a few long prompts would decide all.

use std::time::Duration;

/// Coefficients.
const TERMS: usize = 4;
/// Of what was learned before an observation, so much counts after it: half of it is forgotten after 700.
const KEPT: f64 = 0.999;
/// How little is known at the beginning.
const UNKNOWN: f64 = 1e6;
/// With fewer observations nothing is predicted.
const OBSERVATIONS_MIN: u64 = 50;
/// Nor while the mean relative error is more.
const ERROR_MAX: f64 = 0.5;
/// Share of the newest observation in that mean.
const NEWEST: f64 = 0.02;
/// First tokens that took less or more than this say nothing of a node.
const SANE_MS: std::ops::RangeInclusive<f64> = 0.01..=3_600_000.0;
/// Errors count as relative to no less than this.
const SMALL_MS: f64 = 1.0;

/// What a first token is said to depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Terms([f64; TERMS]);

impl Terms {
    /// A prompt of which `miss` tokens are prefilled behind `found` others, at a node that has `pending` tokens to prefill
    /// before it and `requests` to work at.
    pub(super) fn new(miss: u64, found: u64, pending: u64, requests: u64) -> Self {
        let [miss, found, pending, requests] = [miss, found, pending, requests].map(|count| count as f64);
        // Of about the same size: the numbers of the covariance stay near each other.
        Self([1.0, (pending + miss) / 1e3, miss * (found + miss / 2.0) / 1e6, requests / 10.0])
    }
}

/// What is known of nodes that are alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    coefficients: [f64; TERMS],
    covariance: [[f64; TERMS]; TERMS],
    observations: u64,
    error: f64,
}

impl Default for Prediction {
    fn default() -> Self {
        let mut covariance = [[0.0; TERMS]; TERMS];
        (0..TERMS).for_each(|at| covariance[at][at] = UNKNOWN);
        Self { coefficients: [0.0; TERMS], covariance, observations: 0, error: 0.0 }
    }
}

impl Prediction {
    /// Whether it has seen enough to be right.
    pub fn is_calibrated(&self) -> bool {
        self.observations >= OBSERVATIONS_MIN && self.error <= ERROR_MAX
    }

    /// First tokens that it has learned from.
    pub fn observations(&self) -> u64 {
        self.observations
    }

    /// Mean of the last relative errors, each of what was predicted before the first token came.
    pub fn error(&self) -> f64 {
        self.error
    }

    /// Milliseconds to a first token; 0 where the formula says less.
    pub(super) fn first_token(&self, terms: Terms) -> f64 {
        self.value(&terms.0).max(0.0)
    }

    /// Milliseconds by which a prompt keeps a node from others, of which `miss` tokens are prefilled behind `found`.
    pub(super) fn prefill(&self, miss: u64, found: u64) -> f64 {
        let Terms([_, tokens, pairs, _]) = Terms::new(miss, found, 0, 0);
        let [_, token, pair, _] = self.coefficients.map(|each| each.max(0.0));
        token * tokens + pair * pairs
    }

    fn value(&self, terms: &[f64; TERMS]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(coefficient, term)| coefficient * term).sum()
    }

    /// A first token has come after so long.
    pub(super) fn observe(&mut self, terms: Terms, took: Duration) {
        let took = took.as_secs_f64() * 1e3;
        if !SANE_MS.contains(&took) || terms.0.iter().any(|term| !term.is_finite()) {
            return;
        }
        let scale = took.max(SMALL_MS);
        let error = (took - self.first_token(terms)).abs() / scale;
        // The first ones are predicted by nothing.
        if self.observations >= TERMS as u64 {
            let share = NEWEST.max(1.0 / (self.observations - TERMS as u64 + 1) as f64);
            self.error += share * (error.min(10.0) - self.error);
        }
        let terms = terms.0.map(|term| term / scale);
        let mut gain = [0.0; TERMS];
        for (row, gain) in self.covariance.iter().zip(&mut gain) {
            *gain = row.iter().zip(&terms).map(|(value, term)| value * term).sum();
        }
        let known: f64 = KEPT + gain.iter().zip(&terms).map(|(gain, term)| gain * term).sum::<f64>();
        let off = took / scale - self.value(&terms);
        let mut next = self.clone();
        for at in 0..TERMS {
            next.coefficients[at] += gain[at] / known * off;
            for other in 0..TERMS {
                let less = gain[at] * gain[other] / known;
                next.covariance[at][other] = (self.covariance[at][other] - less) / KEPT;
            }
            // What does not vary for long would be taken for unknown without end.
            next.covariance[at][at] = next.covariance[at][at].min(UNKNOWN);
        }
        next.observations += 1;
        let is_sound =
            next.coefficients.iter().chain(next.covariance.iter().flatten()).all(|it| it.is_finite());
        *self = if is_sound { next } else { Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of an engine that takes exactly that.
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
