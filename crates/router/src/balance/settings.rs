//! What an operator sets of the balancer, and what each default is good for.

use std::time::Duration;

use super::{indicators::NAMES, level::Thresholds};

/// Of one role's score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoleSettings {
    /// What each indicator counts, in the order of [`NAMES`].
    pub weights: [f64; NAMES.len()],
    /// Between its levels.
    pub thresholds: Thresholds,
}

/// What an operator sets. docs/routing.md has each default with its reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Nodes' loads are looked at so often.
    pub every: Duration,
    /// A score is the mean of so many looks.
    pub window: usize,
    /// A level stays for this time at least.
    pub level_dwell: Duration,
    /// Of prefill nodes.
    pub prefill: RoleSettings,
    /// Of decode nodes.
    pub decode: RoleSettings,
    /// Time to a first token that is still well.
    pub ttft: Duration,
    /// Time per token that is still well.
    pub tpot: Duration,
    /// Tokens of a step, at the most: vLLM's max_num_batched_tokens.
    pub step_tokens: f64,
    /// Requests that run at once, at the most: vLLM's max_num_seqs.
    pub decodes: f64,
    /// Tokens that a node prefills in a second, until that is known.
    pub prefill_rate: f64,
    /// Whether nodes change their role.
    pub flips: bool,
    /// An imbalance lasts so long before a node changes its role.
    pub flip_after: Duration,
    /// Between two nodes that change.
    pub flip_every: Duration,
    /// A node keeps a role for this time at least.
    pub role_dwell: Duration,
    /// So many nodes change at once, at the most.
    pub flips_at_once: usize,
    /// A node that changes takes the other role's requests when its own are over, and not before.
    pub drains: bool,
    /// A prompt that would wait at prefill nodes for more than this share of [`Self::ttft`] is prefilled by a decode node
    /// that prefills nothing else then and has room. 0: none is.
    pub relief: f64,
    /// An overload lasts so long before more nodes are asked for.
    pub scale_up_after: Duration,
    /// An underload lasts so long before fewer are asked for.
    pub scale_down_after: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            every: Duration::from_millis(250),
            window: 8,
            level_dwell: Duration::from_millis(500),
            prefill: RoleSettings {
                weights: [1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                thresholds: Thresholds { high_enter: 0.4, high_exit: 0.3, low_enter: 0.1, low_exit: 0.15 },
            },
            decode: RoleSettings {
                weights: [3.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
                thresholds: Thresholds { high_enter: 0.7, high_exit: 0.6, low_enter: 0.2, low_exit: 0.3 },
            },
            ttft: Duration::from_secs(2),
            tpot: Duration::from_millis(50),
            step_tokens: 8192.0,
            decodes: 256.0,
            prefill_rate: 10_000.0,
            flips: true,
            flip_after: Duration::from_millis(500),
            flip_every: Duration::from_millis(500),
            role_dwell: Duration::from_secs(10),
            flips_at_once: 4,
            drains: false,
            relief: 0.5,
            scale_up_after: Duration::from_secs(15),
            scale_down_after: Duration::from_secs(300),
        }
    }
}
