//! Samples the router's rates once a second.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use kvlane_door::{History, Rates};

use crate::{request_metrics::FIRST_TOKEN_BOUNDS_US, shared::Shared};

/// The series of the page's charts. All but `connections` are rates a second. The last ones are the first tokens in each
/// bucket of time, of which the page makes percentiles.
pub(super) const SERIES: [&str; 9 + FIRST_TOKENS] = [
    "connections",
    "requests",
    "errors",
    "refused",
    "shed",
    "retries",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "first_0",
    "first_1",
    "first_2",
    "first_3",
    "first_4",
    "first_5",
    "first_6",
    "first_7",
    "first_8",
    "first_9",
    "first_10",
    "first_11",
];
const FIRST_TOKENS: usize = FIRST_TOKEN_BOUNDS_US.len() + 1;
const RATES: usize = SERIES.len() - 1;

/// Makes the samples.
pub struct Sampler {
    shared: Arc<Shared>,
    history: Arc<History>,
    rates: Rates<RATES>,
}

impl Sampler {
    /// Without a sample yet.
    pub(super) fn new(shared: Arc<Shared>, history: Arc<History>) -> Self {
        Self { shared, history, rates: Rates::default() }
    }

    /// Samples all series once.
    pub fn sample(&mut self) {
        let counters = &self.shared.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut rates = [0; RATES];
        rates[2] = load(&counters.refused);
        rates[3] = load(&counters.shed);
        for (.., series) in self.shared.requests.all() {
            for (status, count) in series.statuses() {
                rates[0] += count;
                rates[1] += if status.starts_with('5') { count } else { 0 };
            }
            rates[4] += load(&series.retries);
            rates[5] += load(&series.prompt_tokens);
            rates[6] += load(&series.cached_tokens);
            rates[7] += load(&series.generated_tokens);
            for (sum, count) in rates[8..].iter_mut().zip(series.first_token.read().counts()) {
                *sum += count;
            }
        }
        let rates = self.rates.since_last(rates, Instant::now());
        let sample: Vec<f64> = [load(&counters.connections) as f64].into_iter().chain(rates).collect();
        self.history.push(&sample);
    }
}
