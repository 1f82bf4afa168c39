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
    blocks: Vec<u32>,
    requests: Vec<Places>,
    /// Blocks of all requests that were looked up.
    references: usize,
    /// Fingerprint of each different block.
    keys: Vec<u64>,
    numbers: KeyMap<u32>,
}

/// A request's blocks in [`Trace::blocks`]: they begin where those of the request before end.
#[derive(Clone, Copy)]
struct Places {
    looked_up_end: usize,
    end: usize,
    at: Duration,
}

/// A request of a trace.
#[derive(Clone)]
pub struct TraceRequest<Keys> {
    /// When it arrived.
    pub at: Duration,
    /// The keys of its blocks: those that it looked up, then those that it only saved.
    pub keys: Keys,
    /// How many of them it looked up.
    pub looked_up: usize,
}

impl Trace {
    /// A trace without requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request that arrived `at` this time after the start of the trace.
    pub fn push(&mut self, at: Duration, ids: &[u64]) {
        self.push_with_saved(at, ids, &[]);
    }

    /// Adds a request that looked `ids` up, and saved `saved` behind them: they are no references, and later requests may hit
    /// them.
    pub fn push_with_saved(&mut self, at: Duration, ids: &[u64], saved: &[u64]) {
        for &id in ids.iter().chain(saved) {
            let key = spread(id);
            let next = self.keys.len() as u32;
            let number = *self.numbers.entry(key).or_insert(next);
            if number == next {
                self.keys.push(key);
            }
            self.blocks.push(number);
        }
        self.references += ids.len();
        let end = self.blocks.len();
        self.requests.push(Places { looked_up_end: end - saved.len(), end, at });
    }

    /// The same requests, each followed by one of the same length whose blocks are never requested again. A policy
    /// should keep these from displacing the rest.
    pub fn with_scans(&self) -> Self {
        let mut mixed = Self::new();
        let mut next_scan = u64::MAX;
        let mut blocks = Vec::new();
        for TraceRequest { at, keys, looked_up } in self.requests() {
            for scan in [false, true] {
                blocks.clear();
                blocks.extend(keys.clone().map(|key| {
                    next_scan -= u64::from(scan);
                    if scan { next_scan } else { key }
                }));
                let (ids, saved) = blocks.split_at(looked_up);
                mixed.push_with_saved(at, ids, saved);
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
        self.references
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
        for &Places { looked_up_end, end, .. } in &self.requests {
            let looked_up = &self.blocks[start..looked_up_end];
            hits += looked_up.iter().take_while(|&&block| seen[block as usize]).count();
            self.blocks[start..end].iter().for_each(|&block| seen[block as usize] = true);
            start = end;
        }
        hits as f64 / self.references.max(1) as f64
    }

    /// The numbers of references and of different blocks from `start` on.
    pub fn count_since(&self, start: Duration) -> (usize, usize) {
        let first = self.requests.partition_point(|places| places.at < start);
        let looked_up = self.requests[first..].iter().scan(self.start_of(first), |from, places| {
            let blocks = &self.blocks[*from..places.looked_up_end];
            *from = places.end;
            Some(blocks)
        });
        let (mut references, mut distinct) = (0, HashSet::<u32>::new());
        for blocks in looked_up {
            references += blocks.len();
            distinct.extend(blocks);
        }
        (references, distinct.len())
    }

    /// When the last request arrived.
    pub fn end(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |places| places.at)
    }

    /// The blocks of all requests, numbered from 0 by their first request. For each request the end of its looked-up blocks
    /// among them, and of all its blocks.
    pub(crate) fn numbered(&self) -> (&[u32], impl DoubleEndedIterator<Item = (usize, usize)> + '_) {
        (&self.blocks, self.requests.iter().map(|places| (places.looked_up_end, places.end)))
    }

    /// All requests, in order.
    pub fn requests(&self) -> impl Iterator<Item = TraceRequest<impl ExactSizeIterator<Item = u64> + Clone>> {
        let starts = std::iter::once(0).chain(self.requests.iter().map(|places| places.end));
        starts.zip(&self.requests).map(|(start, places)| TraceRequest {
            at: places.at,
            keys: self.blocks[start..places.end].iter().map(|&block| self.keys[block as usize]),
            looked_up: places.looked_up_end - start,
        })
    }

    fn start_of(&self, request: usize) -> usize {
        request.checked_sub(1).map_or(0, |before| self.requests[before].end)
    }
}
