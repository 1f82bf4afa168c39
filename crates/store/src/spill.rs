//! Spilling: what has become visible in the pool goes to the tier below, behind the back of who saved it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvlane_memory::PAGE_BYTES;

use crate::entries::{Entry, State};
use crate::index::Index;
use crate::seal::Check;
use crate::store::Store;
use crate::tier::{BlockKey, PoolExtent, SealedShard};

/// Blocks that may wait for the tier, 8 bytes each; of more, those that wait the longest are left out.
pub(crate) const WAITING_BLOCKS_MAX: usize = 1 << 18;
/// Bytes that the tier reads at the same time. The memory of those blocks is not free before it is done, whoever needs
/// room.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

/// A visible block on its way to the tier. Give it back with [`Index::finish_spill`]; its memory is not reused before.
#[derive(Debug)]
pub struct Spill {
    /// What it is called there.
    pub key: BlockKey,
    check: Check,
}

impl Spill {
    /// Bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.check.bytes()
    }

    /// Where its shards are, and their checksums.
    pub fn shards(&self) -> Vec<SealedShard> {
        let shard = |(page, bytes, crc32c)| {
            let at = PoolExtent { offset: u64::from(page) * PAGE_BYTES, bytes };
            SealedShard { at, crc32c }
        };
        self.check.shards().map(shard).collect()
    }
}

impl Index {
    /// From now on at most so many blocks that became visible wait for [`take_spill`](Self::take_spill); 0, as it is at
    /// first, for none.
    pub fn set_spill_limit(&mut self, blocks: usize) {
        self.spill_limit = blocks;
        self.spill_queue.truncate(blocks);
    }

    /// True when a block waits for the tier.
    pub fn has_spill(&self) -> bool {
        !self.spill_queue.is_empty()
    }

    /// The block that has waited the longest for the tier, if it is still there.
    pub fn take_spill(&mut self) -> Option<Spill> {
        while let Some((slot, generation)) = self.spill_queue.pop_front() {
            let Some(&Entry { space, hash, state: State::Sealed, .. }) =
                self.entries.current(slot, generation)
            else {
                self.counters.unspilled_blocks += 1;
                continue;
            };
            let space = &self.spaces[space as usize];
            let key = BlockKey { namespace: space.namespace, cut: space.cut, hash };
            return Some(Spill { key, check: self.start_check(slot) });
        }
        None
    }

    /// The tier does not read this block any more, and has it or not.
    pub fn finish_spill(&mut self, spill: &Spill, is_kept: bool) {
        self.end_check(&spill.check);
        match is_kept {
            true => self.counters.spilled_blocks += 1,
            false => self.counters.unspilled_blocks += 1,
        }
    }

    pub(crate) fn queue_spill(&mut self, slot: u32, generation: u32) {
        if self.spill_limit == 0 {
            return;
        }
        if self.spill_queue.len() >= self.spill_limit {
            self.spill_queue.pop_front();
            self.counters.unspilled_blocks += 1;
        }
        self.spill_queue.push_back((slot, generation));
    }
}

impl Store {
    /// Hands blocks to the tier as they become visible, until `stop`.
    pub(crate) fn spill_until(self: &Arc<Self>, stop: &AtomicBool) {
        let Some(tier) = &self.tier else { return };
        loop {
            let spill = {
                let mut index = self.index.lock();
                loop {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if index.spilling_bytes < IN_FLIGHT_BYTES
                        && let Some(spill) = index.take_spill()
                    {
                        index.spilling_bytes += spill.bytes();
                        break spill;
                    }
                    self.spill_changed.wait(&mut index);
                }
            };
            let store = Arc::clone(self);
            if tier.contains(&spill.key) {
                store.end_spill(&spill, true);
                continue;
            }
            let (key, shards) = (spill.key, spill.shards());
            tier.write(key, shards, Box::new(move |is_kept| store.end_spill(&spill, is_kept)));
        }
    }

    fn end_spill(&self, spill: &Spill, is_kept: bool) {
        let mut index = self.index.lock();
        index.finish_spill(spill, is_kept);
        index.spilling_bytes -= spill.bytes();
        self.spill_changed.notify_all();
    }

    /// Waits until all that was visible before this call has been handed to the tier and the tier is done with it, or
    /// until `deadline`: false.
    pub fn settle_spill(&self, deadline: std::time::Instant) -> bool {
        let mut index = self.index.lock();
        while index.has_spill() || index.spilling_bytes > 0 {
            if self.spill_changed.wait_until(&mut index, deadline).timed_out() {
                return !index.has_spill() && index.spilling_bytes == 0;
            }
        }
        true
    }
}
