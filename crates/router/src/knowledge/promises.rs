//! Blocks that nodes will have, since they were just given prompts with them: an engine tells of blocks only when it has
//! computed them, and equal prompts that come meanwhile shall meet. Promises end by themselves, after one to two [`LIFETIME`]s.

use std::time::{Duration, Instant};

use crate::schedule::Index;

/// How long a promise holds at least.
pub(super) const LIFETIME: Duration = Duration::from_secs(5);

/// Two tables, of which the older one is emptied when the younger one's time is over.
#[derive(Debug)]
pub(super) struct Promises {
    young: Index,
    old: Index,
    since: Option<Instant>,
}

impl Promises {
    /// Room for about that many blocks at a time.
    pub(super) fn new(blocks_max: usize) -> Self {
        Self { young: Index::new(blocks_max), old: Index::new(blocks_max), since: None }
    }

    /// The node was given a prompt of these blocks.
    pub(super) fn add(&mut self, blocks: &[u64], node: usize, now: Instant) {
        self.age(now);
        blocks.iter().rev().for_each(|&block| self.young.insert_one(block, node));
    }

    /// What is too old goes.
    pub(super) fn age(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        let age = now.saturating_duration_since(since);
        if age < LIFETIME {
            return;
        }
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.clear();
        if age >= 2 * LIFETIME {
            self.old.clear();
        }
        self.since = Some(now);
    }

    /// As [`Index::nodes_of`].
    pub(super) fn nodes_of(&self, block: u64, table: usize) -> u64 {
        self.young.nodes_of(block, table) | self.old.nodes_of(block, table)
    }

    /// The node keeps no promise.
    pub(super) fn forget(&mut self, node: usize) {
        self.young.forget(node);
        self.old.forget(node);
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.young.bytes() + self.old.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_ends_by_itself() {
        let start = Instant::now();
        let [one, two, five] = [1 << 40, 2 << 40, 5 << 40];
        let mut promises = Promises::new(64);
        promises.add(&[one, two], 3, start);
        promises.age(start + LIFETIME);
        assert_eq!((promises.nodes_of(one, 0), promises.nodes_of(two, 0)), (8, 8));
        promises.add(&[five], 0, start + LIFETIME);
        promises.age(start + 2 * LIFETIME);
        assert_eq!((promises.nodes_of(one, 0), promises.nodes_of(five, 0)), (0, 1));
        promises.age(start + 5 * LIFETIME);
        assert_eq!(promises.nodes_of(five, 0), 0);
    }
}
