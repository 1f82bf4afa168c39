//! What an operator sets of the scheduler.

use super::policy::Policy;

/// What an operator sets.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Chooses workers and prefill nodes.
    pub policy: Policy,
    /// Chooses decode nodes.
    pub decode_policy: Policy,
    /// A prompt of which a decode node would prefill fewer tokens than this stays there.
    pub short_tokens: u64,
    /// Bytes of a prompt's text that count as one token.
    pub bytes_per_token: u32,
    /// Marks in the index, for each 64 nodes.
    pub marks_max: usize,
    /// Of what is left to chance.
    pub seed: u64,
}

impl Default for Settings {
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
