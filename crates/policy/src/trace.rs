//! A recorded stream of requests, in memory.

use std::collections::HashSet;
use std::time::Duration;

use crate::ghost::KeyMap;
use crate::key::spread;

/// Requests in the order in which they came, each with the blocks of its prompt from the head on. An id names a block and
/// all that comes before it. 4 bytes a reference and some 30 a block.
#[derive(Clone, Default)]
pub struct Trace {
    /// Blocks of all requests, by their number in `keys`.
    references: Vec<u32>,
    /// Where each request ends in `references`, and when it came.
    requests: Vec<(usize, Duration)>,
    /// Fingerprints of the different blocks, and their numbers.
    keys: Vec<u64>,
    numbers: KeyMap<u32>,
}

impl Trace {
    /// Without requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request that came `at` that time since the trace began.
    pub fn push(&mut self, at: Duration, ids: &[u64]) {
        for &id in ids {
            let key = spread(id);
            let next = self.keys.len() as u32;
            let number = *self.numbers.entry(key).or_insert(next);
            if number == next {
                self.keys.push(key);
            }
            self.references.push(number);
        }
        self.requests.push((self.references.len(), at));
    }

    /// The same requests, and after each one of the same length whose blocks are never asked for again: a load that a
    /// policy should keep from displacing the rest.
    pub fn with_scans(&self) -> Self {
        let mut mixed = Self::new();
        let mut next_scan = u64::MAX;
        let mut blocks = Vec::new();
        for (at, keys) in self.requests() {
            for scan in [false, true] {
                blocks.clear();
                blocks.extend(keys.clone().map(|key| {
                    next_scan -= u64::from(scan);
                    if scan { next_scan } else { key }
                }));
                mixed.push(at, &blocks);
            }
        }
        mixed
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// True without requests.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Block references of all requests.
    pub fn references(&self) -> usize {
        self.references.len()
    }

    /// Different blocks.
    pub fn distinct(&self) -> usize {
        self.keys.len()
    }

    /// The share of references that a cache without limit hits as part of a prefix, 0 to 1.
    pub fn ceiling(&self) -> f64 {
        let mut seen = vec![false; self.keys.len()];
        let mut hits = 0;
        let mut start = 0;
        for &(end, _) in &self.requests {
            let blocks = &self.references[start..end];
            hits += blocks.iter().take_while(|&&block| seen[block as usize]).count();
            blocks.iter().for_each(|&block| seen[block as usize] = true);
            start = end;
        }
        hits as f64 / self.references.len().max(1) as f64
    }

    /// References and different blocks from `start` on.
    pub fn count_since(&self, start: Duration) -> (usize, usize) {
        let first = self.requests.partition_point(|&(_, at)| at < start);
        let from = first.checked_sub(1).map_or(0, |before| self.requests[before].0);
        let rest = &self.references[from..];
        (rest.len(), rest.iter().collect::<HashSet<_>>().len())
    }

    /// When the last request came.
    pub fn end(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |&(_, at)| at)
    }

    /// The blocks of all requests, numbered from 0 as they were first asked for, and where each request ends in them.
    pub(crate) fn numbered(&self) -> (&[u32], impl Iterator<Item = usize> + '_) {
        (&self.references, self.requests.iter().map(|&(end, _)| end))
    }

    /// Each request: when it came, and the keys of its blocks.
    pub fn requests(&self) -> impl Iterator<Item = (Duration, impl ExactSizeIterator<Item = u64> + Clone)> {
        let starts = std::iter::once(0).chain(self.requests.iter().map(|&(end, _)| end));
        starts.zip(&self.requests).map(|(start, &(end, at))| {
            (at, self.references[start..end].iter().map(|&block| self.keys[block as usize]))
        })
    }
}
