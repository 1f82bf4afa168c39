//! Indicators of a node's load that can be compared: 0 is idle, 1 is all that the node can take.
//!
//! FlowKV (arXiv 2504.03775, section 3.4) has twelve: four for queues of prefill work, four for queues of decode work, and
//! four that both roles share. A role's score uses its own four and the shared ones, eight in all.

use std::{collections::VecDeque, time::Duration};

/// Names of a score's eight indicators, in the order of all arrays of this module.
pub const NAMES: [&str; 8] =
    ["running", "waiting", "swapped", "sending", "token-budget", "kv-cache", "gpu", "memory-bandwidth"];

/// One for each of [`NAMES`]; None if no source reports it.
pub type Indicators = [Option<f64>; NAMES.len()];

/// Cap of an indicator: an absurd value means no more than "too much".
const MOST: f64 = 2.0;

/// A node's load at one moment. None: no source reports it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sample {
    /// Tokens of prompts that it still has to prefill.
    pub prefill_tokens: u64,
    /// Requests that it decodes: their first token has been generated here, or they were handed over.
    pub decoding: u64,
    /// Prompts that it has prefilled and not yet transferred.
    pub sending: Option<f64>,
    /// Requests that wait in the engine.
    pub waiting: Option<f64>,
    /// Requests a second that the engine preempts for lack of room.
    pub preempted: Option<f64>,
    /// Mean tokens of a step.
    pub step_tokens: Option<f64>,
    /// Share of the KV cache that running requests use, 0 to 1.
    pub cache_used: Option<f64>,
    /// Share of the time in which its GPU computes, 0 to 1.
    pub gpu_used: Option<f64>,
    /// Share of the time in which its GPU's memory is read or written, 0 to 1.
    pub memory_used: Option<f64>,
}

/// The load that a node can take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity {
    /// Tokens a second that it prefills.
    pub prefill_rate: f64,
    /// Requests that it decodes at once within the limit on a token's time.
    pub decodes: f64,
    /// Most tokens of a step.
    pub step_tokens: f64,
    /// Prompts in transfer, or requests waiting at a decode node, that are a full load.
    pub queue: f64,
    /// Limit on the time to a first token.
    pub ttft: Duration,
}

impl Capacity {
    /// The time to prefill these tokens, as a share of `ttft`.
    fn wait(&self, tokens: f64) -> f64 {
        tokens / self.prefill_rate / self.ttft.as_secs_f64()
    }
}

impl Sample {
    /// Share of the node's capacity that its decoding takes.
    pub(super) fn decodes(&self, capacity: &Capacity) -> f64 {
        self.decoding as f64 / capacity.decodes
    }

    /// The indicators of a prefill node.
    pub fn of_prefill(&self, capacity: &Capacity) -> Indicators {
        let tokens = self.prefill_tokens as f64;
        let in_step = tokens.min(capacity.step_tokens);
        let waits = capacity.wait(tokens - in_step);
        let sending = self.sending.map(|sending| sending / capacity.queue);
        self.with_shared(
            [Some(in_step / capacity.step_tokens), Some(waits), self.preempted, sending],
            capacity,
        )
    }

    /// The indicators of a decode node, which sends nothing.
    pub fn of_decode(&self, capacity: &Capacity) -> Indicators {
        // Whichever runs out first: requests in a step, room in the KV cache, or time for prompts that it prefills itself.
        let running = self
            .decodes(capacity)
            .max(self.cache_used.unwrap_or(0.0))
            .max(capacity.wait(self.prefill_tokens as f64));
        let waiting = self.waiting.map(|waiting| waiting / capacity.queue);
        self.with_shared([Some(running), waiting, self.preempted, None], capacity)
    }

    fn with_shared(&self, queues: [Option<f64>; 4], capacity: &Capacity) -> Indicators {
        let [running, waiting, swapped, sending] = queues;
        let budget = self.step_tokens.map(|tokens| tokens / capacity.step_tokens);
        let all =
            [running, waiting, swapped, sending, budget, self.cache_used, self.gpu_used, self.memory_used];
        all.map(sane)
    }
}

/// Drops NaN, and clamps to 0..=[`MOST`].
fn sane(value: Option<f64>) -> Option<f64> {
    value.filter(|value| !value.is_nan()).map(|value| value.clamp(0.0, MOST))
}

/// The last samples of a node, for their means.
#[derive(Debug, Clone, Default)]
pub(super) struct Window {
    samples: VecDeque<Indicators>,
}

impl Window {
    /// Adds a sample, and drops the oldest ones above `most`.
    pub(super) fn push(&mut self, sample: Indicators, most: usize) {
        self.samples.push_back(sample);
        while self.samples.len() > most.max(1) {
            self.samples.pop_front();
        }
    }

    /// The mean of each indicator over the samples that have it. None if the newest sample lacks it, because old values say
    /// nothing about now.
    pub(super) fn mean(&self) -> Indicators {
        let mut means = [None; NAMES.len()];
        let Some(newest) = self.samples.back() else { return means };
        for (at, mean) in means.iter_mut().enumerate().filter(|(at, _)| newest[*at].is_some()) {
            let reported = || self.samples.iter().filter_map(|sample| sample[at]);
            *mean = Some(reported().sum::<f64>() / reported().count().max(1) as f64);
        }
        means
    }
}

/// The weighted mean of the indicators that are reported; None if none of these has a weight. A missing indicator loses its
/// weight, because counted as 0 it would make a loaded node look idle.
pub fn score(indicators: &Indicators, weights: &[f64; NAMES.len()]) -> Option<f64> {
    let reported = || indicators.iter().zip(weights).filter_map(|(value, weight)| Some(((*value)?, *weight)));
    let weight: f64 = reported().map(|(_, weight)| weight).sum();
    (weight > 0.0).then(|| reported().map(|(value, weight)| value * weight).sum::<f64>() / weight)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: Capacity = Capacity {
        prefill_rate: 10_000.0,
        decodes: 100.0,
        step_tokens: 8000.0,
        queue: 8.0,
        ttft: Duration::from_secs(2),
    };

    #[test]
    fn a_prefill_node_is_as_loaded_as_its_queue_is_long_beside_the_limit() {
        let idle = Sample::default().of_prefill(&CAPACITY);
        assert_eq!((idle[0], idle[1], idle[2]), (Some(0.0), Some(0.0), None));
        let busy = Sample { prefill_tokens: 18_000, ..Sample::default() };
        assert_eq!(busy.of_prefill(&CAPACITY)[..2], [Some(1.0), Some(0.5)]);
        let sending = Sample { sending: Some(4.0), step_tokens: Some(4000.0), ..Sample::default() };
        let sending = sending.of_prefill(&CAPACITY);
        assert_eq!((sending[3], sending[4]), (Some(0.5), Some(0.5)));
    }

    #[test]
    fn a_decode_node_is_as_loaded_as_its_batch() {
        let some = Sample { decoding: 50, waiting: Some(2.0), cache_used: Some(0.3), ..Sample::default() };
        let some = some.of_decode(&CAPACITY);
        assert_eq!((some[0], some[1], some[5]), (Some(0.5), Some(0.25), Some(0.3)));
    }

    #[test]
    fn what_is_missing_loses_its_weight_and_what_was_known_once_is_missing() {
        let weights = [1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mut indicators = [None; NAMES.len()];
        assert_eq!(score(&indicators, &weights), None);
        indicators[0] = Some(0.8);
        assert_eq!(score(&indicators, &weights), Some(0.8));
        indicators[1] = Some(0.0);
        assert_eq!(score(&indicators, &weights), Some(0.2));
        let mut window = Window::default();
        assert_eq!(window.mean(), [None; NAMES.len()]);
        window.push(indicators, 2);
        indicators[0] = Some(0.4);
        window.push(indicators, 2);
        assert!((window.mean()[0].unwrap() - 0.6).abs() < 1e-9);
        window.push(indicators, 2);
        assert_eq!(window.mean()[0], Some(0.4));
        window.push([None; NAMES.len()], 2);
        assert_eq!(window.mean(), [None; NAMES.len()]);
    }

    proptest! {
        #[test]
        fn whatever_is_told_a_score_is_a_number_within_its_bounds(
            tokens in any::<u64>(), decoding in any::<u64>(),
            reported in prop::array::uniform7(prop::option::of(prop_oneof![
                any::<f64>(), Just(f64::NAN), Just(f64::INFINITY), Just(-1.0), Just(1e18),
            ])),
        ) {
            let [sending, waiting, preempted, step_tokens, cache_used, gpu_used, memory_used] = reported;
            let sample = Sample {
                prefill_tokens: tokens, decoding, sending, waiting, preempted, step_tokens, cache_used,
                gpu_used, memory_used,
            };
            for indicators in [sample.of_prefill(&CAPACITY), sample.of_decode(&CAPACITY)] {
                let score = score(&indicators, &[1.0; NAMES.len()]).unwrap();
                prop_assert!((0.0..=MOST).contains(&score), "{score}");
            }
        }
    }
}
