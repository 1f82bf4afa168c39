//! [`Trace`]: a recorded stream of requests, in memory.

use std::collections::HashSet;
use std::time::Duration;

use crate::ghost::KeyMap;
use crate::key::spread;

/// Requests in the order in which they arrived, each with the blocks of its prompt from the head on. An id names a
/// block and all blocks before it. Takes 4 bytes for each reference and about 30 for each block.
#[derive(Clone, Default)]
pub struct Trace {
    /// Blocks of all requests, as indices into `keys`.
    references: Vec<u32>,
    /// For each request its end in `references`, and when it arrived.
    requests: Vec<(usize, Duration)>,
    /// Fingerprint of each different block.
    keys: Vec<u64>,
    numbers: KeyMap<u32>,
}

impl Trace {
    /// A trace without requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request that arrived `at` this time after the start of the trace.
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

    /// The same requests, each followed by one of the same length whose blocks are never requested again. A policy
    /// should keep these from displacing the rest.
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

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// True if there is no request.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The number of block references in all requests.
    pub fn references(&self) -> usize {
        self.references.len()
    }

    /// The number of different blocks.
    pub fn distinct(&self) -> usize {
        self.keys.len()
    }

    /// The share of references that an unlimited cache hits as part of a prefix, 0 to 1.
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

    /// The numbers of references and of different blocks from `start` on.
    pub fn count_since(&self, start: Duration) -> (usize, usize) {
        let first = self.requests.partition_point(|&(_, at)| at < start);
        let from = first.checked_sub(1).map_or(0, |before| self.requests[before].0);
        let rest = &self.references[from..];
        (rest.len(), rest.iter().collect::<HashSet<_>>().len())
    }

    /// When the last request arrived.
    pub fn end(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |&(_, at)| at)
    }

    /// The blocks of all requests, numbered from 0 by their first request, and the end of each request among them.
    pub(crate) fn numbered(&self) -> (&[u32], impl Iterator<Item = usize> + '_) {
        (&self.references, self.requests.iter().map(|&(end, _)| end))
    }

    /// The arrival time of each request, and the keys of its blocks.
    pub fn requests(&self) -> impl Iterator<Item = (Duration, impl ExactSizeIterator<Item = u64> + Clone)> {
        let starts = std::iter::once(0).chain(self.requests.iter().map(|&(end, _)| end));
        starts.zip(&self.requests).map(|(start, &(end, at))| {
            (at, self.references[start..end].iter().map(|&block| self.keys[block as usize]))
        })
    }
}
