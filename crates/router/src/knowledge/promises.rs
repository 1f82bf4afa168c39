//! Promises: blocks that nodes will have, because they were just given prompts of them. An engine reports blocks only once it
//! has computed them, and equal prompts that come before should meet at one node. A promise expires after one to two
//! [`LIFETIME`]s.

use std::time::{Duration, Instant};

use crate::schedule::Index;

/// Shortest time that a promise holds.
pub(super) const LIFETIME: Duration = Duration::from_secs(5);

/// Two generations of promises. Every [`LIFETIME`] the young one becomes the old one, whose own promises expire.
#[derive(Debug)]
pub(super) struct Promises {
    young: Index,
    old: Index,
    /// When the young generation began.
    since: Option<Instant>,
}

impl Promises {
    /// Room for about `blocks_max` blocks in each generation.
    pub(super) fn new(blocks_max: usize) -> Self {
        Self { young: Index::new(blocks_max), old: Index::new(blocks_max), since: None }
    }

    /// Promises these blocks at a node.
    pub(super) fn add(&mut self, blocks: &[u64], node: usize, now: Instant) {
        self.expire(now);
        blocks.iter().rev().for_each(|&block| self.young.insert_one(block, node));
    }

    /// Drops promises that have expired.
    pub(super) fn expire(&mut self, now: Instant) {
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

    /// Drops all promises at a node.
    pub(super) fn forget(&mut self, node: usize) {
        self.young.forget(node);
        self.old.forget(node);
    }

    /// Memory of both generations.
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
        promises.expire(start + LIFETIME);
        assert_eq!((promises.nodes_of(one, 0), promises.nodes_of(two, 0)), (8, 8));
        promises.add(&[five], 0, start + LIFETIME);
        promises.expire(start + 2 * LIFETIME);
        assert_eq!((promises.nodes_of(one, 0), promises.nodes_of(five, 0)), (0, 1));
        promises.expire(start + 5 * LIFETIME);
        assert_eq!(promises.nodes_of(five, 0), 0);
    }
}
