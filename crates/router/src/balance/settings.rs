//! The balancer's settings and their defaults.

use std::time::Duration;

use super::{indicators::NAMES, level::Thresholds};

/// How one role is scored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoleSettings {
    /// Weights of the indicators, in the order of [`NAMES`].
    pub weights: [f64; NAMES.len()],
    /// Bounds of the role's levels, for its mean score.
    pub thresholds: Thresholds,
}

/// Set by the file. docs/balance.md lists the keys with their defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceSettings {
    /// Time between two ticks.
    pub every: Duration,
    /// Ticks whose mean is a score.
    pub window: usize,
    /// Shortest time that a level lasts.
    pub level_dwell: Duration,
    /// How prefill nodes are scored.
    pub prefill: RoleSettings,
    /// How decode nodes are scored.
    pub decode: RoleSettings,
    /// Limit on the time to a first token.
    pub ttft: Duration,
    /// Limit on the time per token.
    pub tpot: Duration,
    /// Most tokens of a step: vLLM's max_num_batched_tokens.
    pub step_tokens: f64,
    /// Most requests that run at once: vLLM's max_num_seqs.
    pub decodes: f64,
    /// Tokens a second that a node prefills, until its class's rate is learned.
    pub prefill_rate: f64,
    /// Whether nodes change their role.
    pub flips: bool,
    /// How long an imbalance lasts before a node changes its role.
    pub flip_after: Duration,
    /// Shortest time between two changes of role.
    pub flip_every: Duration,
    /// Shortest time that a node keeps a role from the balancer.
    pub role_dwell: Duration,
    /// Most nodes that drain for a change of role at once.
    pub flips_at_once: usize,
    /// Whether a node that changes its role first finishes its requests.
    pub drains: bool,
    /// Share of [`Self::ttft`]. If a prompt would wait longer at the prefill nodes, a decode node prefills it that has room and
    /// prefills nothing else. 0: the prompt waits.
    pub relief: f64,
    /// How long an overload lasts before the balancer asks for a node.
    pub scale_up_after: Duration,
    /// How long an underload lasts before the balancer offers a node.
    pub scale_down_after: Duration,
}

impl Default for BalanceSettings {
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
