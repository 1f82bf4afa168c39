//! Checks: what the background reads outside the lock, to seal a block or to verify it.

use kvlane_block::{BlockHash, Namespace};
use kvlane_memory::PoolPage;

use crate::api::{ShardNumber, StoredBlock};
use crate::entries::{Entry, State};
use crate::index::Index;
use crate::journal::Change;
use crate::limbo::Extent;

/// A block whose bytes are to be read. It must be given back to `finish_seal` or `finish_scrub`; until then its
/// memory is not reused, even if the block dies.
#[derive(Debug)]
pub struct Check {
    pub(crate) block: StoredBlock,
    /// The number of a seal, from 0 on in the order of commits. None for a scrub or a spill.
    seal: Option<u64>,
    /// Extent and checksum of each shard.
    shards: Vec<(Extent, u32)>,
}

impl Check {
    /// First pool page, bytes and stored crc32c of each shard; the latter means nothing before the block is sealed.
    pub fn shards(&self) -> impl Iterator<Item = (PoolPage, u64, u32)> {
        self.shards.iter().map(|&(extent, crc)| (extent.page, extent.bytes, crc))
    }

    /// Sum over the shards.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|(extent, _)| extent.bytes).sum()
    }
}

/// A block that was dropped because its bytes were not those that were sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// The namespace that it belonged to.
    pub namespace: Namespace,
    /// The engine's hash of it.
    pub hash: BlockHash,
}

impl Index {
    /// True when a committed block waits for its seal.
    pub fn has_unsealed(&self) -> bool {
        !self.seal_queue.is_empty()
    }

    /// Takes committed blocks from the queue in order: at least one if there are any, then up to `max_bytes` and
    /// `max_blocks`.
    pub fn take_unsealed(&mut self, max_bytes: u64, max_blocks: usize) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut bytes = 0;
        while bytes < max_bytes
            && checks.len() < max_blocks
            && let Some(block) = self.seal_queue.pop_front()
        {
            if self.entries.current(block).is_some() {
                let number = self.seals_queued - self.seal_queue.len() as u64 - 1;
                self.sealing.insert(number);
                let check = Check { seal: Some(number), ..self.start_check(block.slot) };
                bytes += check.bytes();
                checks.push(check);
            }
        }
        checks
    }

    /// All seals with a lower number than this are over: their blocks are visible, or died.
    pub fn sealed_through(&self) -> u64 {
        let queued = self.seals_queued - self.seal_queue.len() as u64;
        self.sealing.first().map_or(queued, |first| queued.min(*first))
    }

    /// Makes a committed block visible with these crc32c, one a shard, unless it died meanwhile.
    pub fn finish_seal(&mut self, check: Check, crcs: &[u32]) {
        assert!(
            crcs.len() == check.shards.len(),
            "{} checksums for {} shards",
            crcs.len(),
            check.shards.len()
        );
        if let Some(number) = check.seal {
            self.sealing.remove(&number);
        }
        if !self.end_check(&check) {
            return;
        }
        let entry = self.entries.at_mut(check.block.slot);
        assert!(entry.state == State::Committed, "sealed twice");
        entry.state = State::Sealed;
        let (number, hash) = (entry.space, entry.hash);
        let space = &mut self.spaces[number];
        for (shard, &crc) in ShardNumber::all(crcs.len()).zip(crcs) {
            space.rows.set_crc(entry.row, shard, crc);
        }
        space.sealed += 1;
        self.counters.sealed_blocks += 1;
        self.counters.sealed_bytes += space.block_bytes();
        self.watches.sealed((number, hash));
        self.note_change(Change::Visible, number, hash);
        self.queue_spill(check.block);
    }

    /// The next visible block at or after slot `cursor`, which moves behind it; looks at up to `steps` slots. None
    /// with the cursor back at 0 is the end of a pass.
    pub fn next_scrub(&mut self, cursor: &mut u32, steps: u32) -> Option<Check> {
        let end = self.entries.slots().min(cursor.saturating_add(steps));
        for slot in *cursor..end {
            let entry = self.entries.at(slot);
            if entry.state == State::Sealed && entry.checks == 0 {
                *cursor = slot + 1;
                return Some(self.start_check(slot));
            }
        }
        *cursor = if end == self.entries.slots() { 0 } else { end };
        None
    }

    /// Ends a scrub's check. With `intact` false the block is dropped, if it is still there.
    pub fn finish_scrub(&mut self, check: Check, intact: bool) -> Option<Damaged> {
        self.counters.scrub_checked += 1;
        if !self.end_check(&check) || intact {
            return None;
        }
        let Entry { space, hash, .. } = *self.entries.at(check.block.slot);
        self.counters.scrub_bad += 1;
        self.drop_block(check.block.slot);
        Some(Damaged { namespace: self.spaces[space].namespace, hash })
    }

    pub(crate) fn start_check(&mut self, slot: u32) -> Check {
        let entry = self.entries.at_mut(slot);
        entry.checks += 1;
        let space = &self.spaces[entry.space];
        let shards = space.rows.shards(entry.row).zip(&space.shard_bytes);
        let shards = shards.map(|((page, crc), &bytes)| (Extent { page, bytes }, crc)).collect();
        Check { block: StoredBlock { slot, generation: entry.generation }, seal: None, shards }
    }

    /// True when the block still lives.
    pub(crate) fn end_check(&mut self, check: &Check) -> bool {
        if self.entries.current(check.block).is_none() {
            let unused = self.limbo.reader_done(check.block);
            self.free(unused);
            return false;
        }
        self.entries.at_mut(check.block.slot).checks -= 1;
        true
    }
}
