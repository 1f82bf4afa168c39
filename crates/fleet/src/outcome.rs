//! What became of requests.

use std::time::Duration;

/// What became of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Served {
    /// When it came.
    pub at: Duration,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Of these, found in the cache of the engine that prefilled.
    pub found_tokens: u64,
    /// Tokens of its answer.
    pub output_tokens: u64,
    /// Until its first token; None if none came.
    pub first: Option<Duration>,
    /// Until its last token; None if it did not come.
    pub last: Option<Duration>,
    /// The node that prefilled, by its number.
    pub prefill: Option<usize>,
    /// The node that decoded.
    pub decode: Option<usize>,
    /// How often it was begun, because a node died.
    pub attempts: u32,
}

impl Served {
    /// Time to the first token.
    pub fn ttft(&self) -> Option<Duration> {
        self.first
    }

    /// Time per token behind the first one; None for one token, or none.
    pub fn tpot(&self) -> Option<Duration> {
        let behind = u32::try_from(self.output_tokens).ok()?.checked_sub(1).filter(|count| *count > 0)?;
        Some((self.last? - self.first?) / behind)
    }
}

/// What a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Until its first token.
    pub ttft: Duration,
    /// Between its tokens, on average.
    pub tpot: Duration,
}

impl Limits {
    /// Whether it was served within them.
    pub fn hold(&self, served: &Served) -> bool {
        served.last.is_some()
            && served.ttft().is_some_and(|ttft| ttft <= self.ttft)
            && served.tpot().is_none_or(|tpot| tpot <= self.tpot)
    }
}

/// Of all requests of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Mean time to the first token.
    pub ttft_mean: Duration,
    /// Time to the first token: half of the requests waited no longer.
    pub ttft_p50: Duration,
    /// And 99 of 100.
    pub ttft_p99: Duration,
    /// Time per token.
    pub tpot_p50: Duration,
    /// And of 99 of 100.
    pub tpot_p99: Duration,
    /// Share that was served within the limits, 0 to 1.
    pub within: f64,
    /// Share of the prompts' tokens that was found in a cache, 0 to 1.
    pub found: f64,
    /// Requests without a last token.
    pub lost: usize,
}

impl Summary {
    /// Of these.
    pub fn of(served: &[Served], limits: Limits) -> Self {
        let mut ttft: Vec<Duration> = served.iter().filter_map(Served::ttft).collect();
        let mut tpot: Vec<Duration> = served.iter().filter_map(Served::tpot).collect();
        ttft.sort_unstable();
        tpot.sort_unstable();
        let within = served.iter().filter(|each| limits.hold(each)).count();
        let prompts: u64 = served.iter().map(|each| each.prompt_tokens).sum();
        let found: u64 = served.iter().map(|each| each.found_tokens).sum();
        let all: Duration = ttft.iter().sum();
        Self {
            ttft_mean: all / u32::try_from(ttft.len()).unwrap_or(u32::MAX).max(1),
            ttft_p50: quantile(&ttft, 50),
            ttft_p99: quantile(&ttft, 99),
            tpot_p50: quantile(&tpot, 50),
            tpot_p99: quantile(&tpot, 99),
            within: within as f64 / served.len().max(1) as f64,
            found: found as f64 / prompts.max(1) as f64,
            lost: served.iter().filter(|each| each.last.is_none()).count(),
        }
    }
}

/// The smallest of them that `percent` of 100 do not exceed; zero of none.
fn quantile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_those_that_came() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(quantile(&times, 50), Duration::from_millis(100));
        assert_eq!(quantile(&times, 99), Duration::from_millis(198));
        assert_eq!(quantile(&times[..1], 99), Duration::from_millis(1));
        assert_eq!(quantile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn a_request_without_its_last_token_is_not_within_any_limit() {
        let all = Limits { ttft: Duration::MAX, tpot: Duration::MAX };
        let second = Duration::from_secs(1);
        let served =
            Served { first: Some(second), last: Some(3 * second), output_tokens: 5, ..Served::default() };
        assert_eq!(served.tpot(), Some(second / 2));
        assert!(all.hold(&served) && !all.hold(&Served { last: None, ..served }));
        assert!(!Limits { ttft: second / 2, ..all }.hold(&served));
        assert!(!Limits { tpot: second / 4, ..all }.hold(&served));
        let one = Served { output_tokens: 1, last: Some(second), ..served };
        assert!(Limits { tpot: Duration::ZERO, ..all }.hold(&one), "there is nothing between tokens");
    }
}
