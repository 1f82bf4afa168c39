//! A node's recent failures and the router's reaction, as `/nodes` and `kvlane route list` show them.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::nodes::Node;

/// Recent failures of a node, and the router's reaction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// The router ejected the node: requests go elsewhere.
    pub ejected: bool,
    /// Milliseconds until the router tries an ejected node.
    pub retry_in_ms: Option<u64>,
    /// Failures in a row.
    pub failures: u32,
    /// Answers of 500 that do not count as failures, because the requests may be at fault.
    pub doubts: usize,
    /// Reason of the last failure, if the node has served no request since.
    pub last_failure: Option<String>,
    /// A prefill node's answers in a row without a hand-off.
    pub without_hand_off: u32,
    /// Milliseconds until a pair probes a prefill node whose pairs are stopped.
    pub probe_in_ms: Option<u64>,
}

impl Condition {
    /// The condition of this node at `now`.
    pub fn of(node: &Node, now: Instant) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ejected = node.breaker.is_open();
        Self {
            ejected,
            retry_in_ms: ejected.then(|| node.breaker.wait(now).map_or(0, ms)),
            failures: node.breaker.failures(),
            doubts: node.doubts.count(now),
            last_failure: node.last_failure.as_deref().map(str::to_owned),
            without_hand_off: node.pairing.missed(),
            probe_in_ms: node.pairing.probe_in(now).map(ms),
        }
    }

    /// For people; empty if nothing is wrong.
    pub fn sentence(&self) -> String {
        let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
        let mut parts = Vec::new();
        if let Some(retry_in) = self.retry_in_ms {
            parts.push(format!("ejected, tried again in {}", seconds(retry_in)));
        }
        if self.failures > 0 {
            let last = self.last_failure.as_deref().unwrap_or("unknown");
            parts.push(format!("failures in a row: {}, last: {last}", self.failures));
        }
        if self.doubts > 0 {
            parts.push(format!("500s in doubt: {}", self.doubts));
        }
        if let Some(probe_in) = self.probe_in_ms {
            let missed = self.without_hand_off;
            parts.push(format!(
                "handed nothing over {missed} times in a row, next probe in {}",
                seconds(probe_in)
            ));
        }
        parts.join("; ")
    }
}
