//! Indicators that have a weight, and that no node of a role tells: each is named once.

use std::time::{Duration, Instant};

use super::indicators::{Indicators, NAMES};

/// Nodes' metrics come every two seconds, and they may have to start first.
const PATIENCE: Duration = Duration::from_secs(30);

/// Of one role.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Untold {
    since: [Option<Instant>; NAMES.len()],
    is_said: [bool; NAMES.len()],
}

impl Untold {
    /// A look at what the role's nodes tell. Answers what they have not told for long, and was not answered before.
    pub(super) fn see<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a Indicators>,
        weights: &[f64; NAMES.len()],
        now: Instant,
    ) -> Vec<&'static str> {
        let mut told = None;
        for node in nodes {
            let told = told.get_or_insert([false; NAMES.len()]);
            told.iter_mut().zip(node).for_each(|(told, value)| *told |= value.is_some());
        }
        // Where there are no nodes there is nothing to be told.
        let told = told.unwrap_or([true; NAMES.len()]);
        let mut news = Vec::new();
        for (at, name) in NAMES.iter().enumerate() {
            if told[at] || weights[at] <= 0.0 {
                self.since[at] = None;
                continue;
            }
            let since = *self.since[at].get_or_insert(now);
            if !self.is_said[at] && now.saturating_duration_since(since) >= PATIENCE {
                self.is_said[at] = true;
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
        let mut untold = Untold::default();
        let mut node = [Some(1.0), None, None, None, None, None, None, None];
        let mut see = |nodes: &[Indicators], seconds| {
            untold.see(nodes.iter(), &WEIGHTS, begin + Duration::from_secs(seconds))
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
