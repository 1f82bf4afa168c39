//! Spills: writes blocks that became visible in the pool to the tier below, in a thread of its own. No save waits for it.
//!
//! ```text
//!   visible --> spill_queue --> take_spill: its memory is kept --> Below::write --> done --> finish_spill
//!                  '- died, or the queue is full: counted as unspilled
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvlane_block::{BlockKey, PoolExtent, SealedShard};
use kvlane_memory::PoolPage;
use kvlane_policy::Memo;

use crate::api::StoredBlock;
use crate::done::Done;
use crate::entries::{Entry, State};
use crate::index::Index;
use crate::replacement::REFUSED_SPILLS;
use crate::seal::Check;
use crate::store::Store;

/// Bytes of the spills in flight. Their memory cannot be freed before the tier is done, even if a claim needs room.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

/// A visible block that the tier is to write. Its memory is not reused before [`Index::finish_spill`] gets it back.
#[derive(Debug)]
pub struct Spill {
    /// The block's key in the tier.
    pub key: BlockKey,
    /// The policy's memo of the block, which the tier keeps with it.
    pub memo: Memo,
    check: Check,
    number: u64,
}

impl Spill {
    /// Sum over the shards.
    pub fn bytes(&self) -> u64 {
        self.check.bytes()
    }

    /// Extent and checksum of each shard.
    pub fn shards(&self) -> Vec<SealedShard> {
        let shard = |(page, bytes, crc32c): (PoolPage, u64, u32)| SealedShard {
            extent: PoolExtent { offset: page.offset(), bytes },
            crc32c,
        };
        self.check.shards().map(shard).collect()
    }
}

impl Index {
    /// Sets how many visible blocks may wait for [`take_spill`](Self::take_spill). 0, the initial limit, queues none.
    pub fn set_spill_limit(&mut self, blocks: usize) {
        self.spill_limit = blocks;
        assert!(self.spill_queue.len() <= blocks, "the limit is set before blocks are queued");
    }

    /// True when a block waits for the tier.
    pub fn has_spill(&self) -> bool {
        !self.spill_queue.is_empty()
    }

    /// Takes the oldest queued block that is still visible.
    pub fn take_spill(&mut self) -> Option<Spill> {
        while let Some(block) = self.spill_queue.pop_front() {
            let number = self.spills_taken;
            self.spills_taken += 1;
            let Some(&Entry { space, hash, state: State::Sealed, .. }) = self.entries.current(block) else {
                self.counters.unspilled_blocks += 1;
                continue;
            };
            let key = BlockKey { space: self.space_name(space), hash };
            self.spilling.insert(number);
            let memo = self.policy_memo(block.slot).unwrap_or_default();
            return Some(Spill { key, memo, check: self.start_check(block.slot), number });
        }
        None
    }

    /// Ends a spill whose memory the tier no longer reads. `is_kept`: the tier has the block.
    pub fn finish_spill(&mut self, spill: &Spill, is_kept: bool) {
        self.end_check(&spill.check);
        self.spilling.remove(&spill.number);
        match is_kept {
            true => self.counters.spilled_blocks += 1,
            false => self.counters.unspilled_blocks += 1,
        }
    }

    /// Whether the block still lives.
    pub fn is_current(&self, spill: &Spill) -> bool {
        self.entries.current(spill.check.block).is_some()
    }

    /// How many blocks were ever queued for the tier.
    fn spills_queued(&self) -> u64 {
        self.spills_taken + self.spill_queue.len() as u64
    }

    /// Whether the tier is done with the first `goal` blocks that were queued.
    fn has_spilled(&self, goal: u64) -> bool {
        self.spills_taken >= goal && self.spilling.first().is_none_or(|first| *first >= goal)
    }

    pub(crate) fn queue_spill(&mut self, block: StoredBlock) {
        if self.spill_limit == 0 {
            return;
        }
        if self.spill_queue.len() >= self.spill_limit {
            self.spill_queue.pop_front();
            self.spills_taken += 1;
            self.counters.unspilled_blocks += 1;
        }
        self.spill_queue.push_back(block);
    }
}

impl Store {
    /// Writes blocks to the tier as they become visible, until `stop`.
    pub(crate) fn spill_until(self: &Arc<Self>, stop: &AtomicBool) {
        let Some(below) = &self.below else { return };
        loop {
            let spill = {
                let mut index = self.index.lock();
                loop {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if index.spilling_bytes < IN_FLIGHT_BYTES && index.has_spill() {
                        if let Some(spill) = index.take_spill() {
                            index.spilling_bytes += spill.bytes();
                            break spill;
                        }
                        // All queued blocks had died and the queue is empty: `settle_spill` may end.
                        self.spill_changed.notify_all();
                    }
                    self.spill_changed.wait(&mut index);
                }
            };
            let store = Arc::clone(self);
            // A block must not reach the tier after the drop of its namespace did.
            let _no_drop = self.drops.read();
            if !self.index.lock().is_current(&spill) {
                store.end_spill(&spill, false);
                continue;
            }
            if below.contains(&spill.key) {
                store.end_spill(&spill, true);
                continue;
            }
            let (key, memo, shards) = (spill.key, spill.memo, spill.shards());
            let done = move |is_kept| {
                let tier_works = store.index.lock().record_spill(is_kept);
                match tier_works {
                    Some(true) => {
                        // Log: the SSD takes blocks again after it had refused some.
                        tracing::info!("SSD keeps blocks again: the pool admits blocks for its sake again");
                    }
                    // Log: the SSD refused 64 blocks in a row; new blocks live in the pool only. Do: `kvlane
                    // status` says why: a full queue, a full or a failing disk.
                    Some(false) => tracing::warn!(
                        refused_blocks = REFUSED_SPILLS,
                        "SSD has kept none of the last blocks: the pool admits blocks as if there were no SSD"
                    ),
                    None => {}
                }
                store.end_spill(&spill, is_kept);
            };
            below.write(key, shards, memo, Done::new(done));
        }
    }

    fn end_spill(&self, spill: &Spill, is_kept: bool) {
        let mut index = self.index.lock();
        index.finish_spill(spill, is_kept);
        index.spilling_bytes -= spill.bytes();
        self.spill_changed.notify_all();
    }

    /// Waits until the tier is done with all blocks that were visible before this call. False at the deadline.
    pub fn settle_spill(&self, deadline: Instant) -> bool {
        let mut index = self.index.lock();
        let goal = index.spills_queued();
        while !index.has_spilled(goal) {
            if self.spill_changed.wait_until(&mut index, deadline).timed_out() {
                return index.has_spilled(goal);
            }
        }
        true
    }
}
