//! The outcome of each request of a replay, and its summary.

use std::time::Duration;

/// The outcome of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Served {
    /// When it came, from the replay's start.
    pub at: Duration,
    /// Length of its prompt.
    pub prompt_tokens: u64,
    /// The part of `prompt_tokens` that the prefilling engine found in its cache or pool.
    pub found_tokens: u64,
    /// Length of its answer.
    pub output_tokens: u64,
    /// Time to its first token; None if none came.
    pub first: Option<Duration>,
    /// Time to its last token; None if it did not come.
    pub last: Option<Duration>,
    /// Number of the node that prefilled.
    pub prefill: Option<usize>,
    /// Number of the node that decoded.
    pub decode: Option<usize>,
    /// Times that it was started: more than one if a node died.
    pub attempts: u32,
}

impl Served {
    /// Time to the first token; None if none came.
    pub fn ttft(&self) -> Option<Duration> {
        self.first
    }

    /// Mean time per token after the first one. None for a single token, or if the last one did not come.
    pub fn tpot(&self) -> Option<Duration> {
        let behind = u32::try_from(self.output_tokens).ok()?.checked_sub(1).filter(|count| *count > 0)?;
        Some((self.last? - self.first?) / behind)
    }
}

/// Limits on a request's times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// To its first token.
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

/// Figures of all requests of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Mean time to the first token.
    pub ttft_mean: Duration,
    /// Median time to the first token.
    pub ttft_p50: Duration,
    /// The 99th percentile.
    pub ttft_p99: Duration,
    /// Median time per token.
    pub tpot_p50: Duration,
    /// The 99th percentile.
    pub tpot_p99: Duration,
    /// Share of the requests that were served within the limits, 0 to 1.
    pub within: f64,
    /// Share of the prompts' tokens that were found in a cache, 0 to 1.
    pub found: f64,
    /// Requests without a last token.
    pub lost: usize,
}

impl Summary {
    /// Summarises these requests.
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

/// The smallest value that `percent` of 100 do not exceed; zero if there are none.
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
