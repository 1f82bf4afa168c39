//! The scheduler's settings.

use super::policy::Policy;

/// Set by flags and the file; the default is what both leave out.
#[derive(Debug, Clone)]
pub struct SchedulerSettings {
    /// Picks workers and prefill nodes.
    pub policy: Policy,
    /// Picks decode nodes.
    pub decode_policy: Policy,
    /// A decode node serves a whole request if it has fewer tokens than this to prefill.
    pub short_tokens: u64,
    /// Bytes of a prompt's text that count as one token where no tokenizer counts.
    pub bytes_per_token: u32,
    /// Room of the index, for each 64 nodes.
    pub marks_max: usize,
    /// Seed of random choices.
    pub seed: u64,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            decode_policy: Policy::default(),
            short_tokens: 128,
            bytes_per_token: 4,
            marks_max: 1 << 20,
            seed: 0,
        }
    }
}
