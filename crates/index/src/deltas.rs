//! Deltas that wait for earlier ones, by number and within bounds.

use std::collections::BTreeMap;

use crate::messages::Delta;

/// The waiting deltas of one owner.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    by_first: BTreeMap<u64, Delta>,
    /// Sum of [`Delta::size`].
    size: usize,
}

impl Waiting {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_first.is_empty()
    }

    /// Keeps a delta. If two have the same first change, the longer stays. Above a limit the earliest goes, because a
    /// coming snapshot most likely covers it. Returns how many it dropped.
    pub(crate) fn push(&mut self, delta: Delta, most: usize, size_most: usize) -> u64 {
        if self.by_first.get(&delta.first).is_some_and(|other| other.last >= delta.last) {
            return 0;
        }
        self.size += delta.size();
        if let Some(shorter) = self.by_first.insert(delta.first, delta) {
            self.size -= shorter.size();
        }
        let mut dropped = 0;
        while self.by_first.len() > most || self.size > size_most {
            let Some((_, earliest)) = self.by_first.pop_first() else { break };
            self.size -= earliest.size();
            dropped += 1;
        }
        dropped
    }

    /// Takes the earliest delta if it begins right after change `applied`, or before that.
    pub(crate) fn pop(&mut self, applied: u64) -> Option<Delta> {
        let earliest = self.by_first.first_entry()?;
        if *earliest.key() > applied.saturating_add(1) {
            return None;
        }
        let delta = earliest.remove();
        self.size -= delta.size();
        Some(delta)
    }
}
