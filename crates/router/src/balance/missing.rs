//! Finds indicators that have a weight but that no node of a role reports. Each is named once, for the log.

use std::time::{Duration, Instant};

use super::indicators::{Indicators, NAMES};

/// Time without a report before an indicator counts as missing: engines may have to start first, and their metrics come every
/// two seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// The missing indicators of one role.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MissingIndicators {
    /// Since when no node reports an indicator; None while one does.
    since: [Option<Instant>; NAMES.len()],
    is_named: [bool; NAMES.len()],
}

impl MissingIndicators {
    /// Takes in the indicators of the role's nodes. Returns the names that have been missing for [`PATIENCE`], each once.
    pub(super) fn observe<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a Indicators>,
        weights: &[f64; NAMES.len()],
        now: Instant,
    ) -> Vec<&'static str> {
        let mut reported = None;
        for node in nodes {
            let reported = reported.get_or_insert([false; NAMES.len()]);
            reported.iter_mut().zip(node).for_each(|(reported, value)| *reported |= value.is_some());
        }
        // A role without nodes has no missing indicators.
        let reported = reported.unwrap_or([true; NAMES.len()]);
        let mut news = Vec::new();
        for (at, name) in NAMES.iter().enumerate() {
            if reported[at] || weights[at] <= 0.0 {
                self.since[at] = None;
                continue;
            }
            let since = *self.since[at].get_or_insert(now);
            if !self.is_named[at] && now.saturating_duration_since(since) >= PATIENCE {
                self.is_named[at] = true;
                news.push(*name);
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: [f64; NAMES.len()] = [1.0, 3.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0];

    #[test]
    fn what_counts_and_no_node_tells_for_long_is_named_once() {
        let begin = Instant::now();
        let mut missing = MissingIndicators::default();
        let mut node = [Some(1.0), None, None, None, None, None, None, None];
        let mut see = |nodes: &[Indicators], seconds| {
            missing.observe(nodes.iter(), &WEIGHTS, begin + Duration::from_secs(seconds))
        };
        assert!(see(&[node], 0).is_empty() && see(&[node], 29).is_empty());
        // One node of two is enough.
        let other = [None, Some(0.0), None, None, None, None, None, None];
        assert_eq!(see(&[node, other], 30), ["kv-cache"]);
        assert!(see(&[node], 31).is_empty() && see(&[node], 60).is_empty());
        assert_eq!(see(&[node], 61), ["waiting"]);
        assert!(see(&[node], 200).is_empty(), "each once");
        node[0] = None;
        assert!(see(&[], 300).is_empty() && see(&[], 400).is_empty(), "no node");
        assert!(see(&[node], 401).is_empty());
        assert!(see(&[node], 390).is_empty(), "a clock that goes back");
        assert_eq!(see(&[node], 431), ["running"]);
    }
}
