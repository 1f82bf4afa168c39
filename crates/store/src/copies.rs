//! Copies: blocks that a source brought from another host. The other host has them too, so they are the first to go.
//!
//! ```text
//!   claimed for a fetch --> visible --> first hit --> second hit: an own block, in the policy
//!      '---------- in the list of copies, not in the policy ----------'
//! ```
//! The replacement policy does not contain copies. They have a list of their own, least recently hit first, and a share of
//! the pool. Above their share they make room before any own block does; within it they go only if the policy has no
//! victim. A copy that would exceed the share takes free memory or another copy's, never an own block's.
//!
//! The tier below gets no copies. A block that was hit twice here is queued for it like one that an engine saved, because
//! the other host may lose its block at any time.

use kvlane_policy::{Blocks, PrefixLru};

/// The list of copies, by slot, and how much of the pool they may take.
pub(crate) struct Copies {
    /// A parent is newer than its children, as in the policies.
    pub(crate) order: PrefixLru,
    /// Pool bytes of all copies, in whole pages. Includes the copies that are being fetched.
    pub(crate) bytes: u64,
    /// Above this they go before own blocks do.
    share_bytes: u64,
}

impl Copies {
    pub(crate) fn new(pool_bytes: u64, share: f64) -> Self {
        let share_bytes = (pool_bytes as f64 * share.clamp(0.0, 1.0)) as u64;
        Self { order: PrefixLru::new(), bytes: 0, share_bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.order.contains(slot)
    }

    /// Whether they exceed their share, with so many more bytes.
    pub(crate) fn exceed_share(&self, more: u64) -> bool {
        self.bytes.saturating_add(more) > self.share_bytes
    }

    pub(crate) fn bytes_above_share(&self) -> u64 {
        self.bytes.saturating_sub(self.share_bytes)
    }

    /// The least recently hit copy that may be evicted, passing over `max_refusals` at most. It is no longer in the list.
    pub(crate) fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        self.order.take_oldest(max_refusals, |slot| blocks.may_evict(slot))
    }

    /// Called when blocks that continue these are being fetched; given from the tail. A new copy is listed just below its
    /// parent in age, so the parent must not be old.
    pub(crate) fn renew(&mut self, from_tail: impl Iterator<Item = u32>) {
        self.order.touch_from_tail(from_tail);
    }
}
