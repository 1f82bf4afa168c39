//! [`ReplacementPolicy`]: decides which blocks are evicted when room is needed, and which are admitted at all.
//!
//! The caller (a store, or [`CacheModel`](crate::CacheModel) in virtual time) knows the blocks. A policy knows only
//! slots, and looks blocks up through [`Blocks`]. For one request the caller
//!
//! 1. reports the resident blocks with [`touch`](ReplacementPolicy::touch) and the missing ones with
//!    [`missed`](ReplacementPolicy::missed);
//! 2. calls [`admit`](ReplacementPolicy::admit) once for the missing run, if storing it needs victims;
//! 3. makes room with as many calls of [`take_victim`](ReplacementPolicy::take_victim) as it needs;
//! 4. adds the new blocks with [`insert`](ReplacementPolicy::insert), behind the last block that was hit.
//!
//! A store does the first step when it looks a prompt up, and the others when the prompt's blocks are saved. Saves may
//! come in several parts; then the store also calls [`renew`](ReplacementPolicy::renew) for the blocks before the new
//! ones.
//!
//! Every policy keeps four rules, because blocks are prefixes of prompts:
//!
//! - A run is inserted with its tail as the next victim.
//! - A hit counts from the tail to the head, so the head ends up youngest.
//! - A block is evicted only if no resident block continues it ([`Blocks::may_evict`]).
//! - A block that is leased or being written is passed over, but stays in the policy.

use crate::kind::PolicyKind;
use crate::learning::Learning;

/// The caller's blocks, as a policy looks them up. Implemented by the store and by [`CacheModel`](crate::CacheModel).
pub trait Blocks {
    /// The block that this one continues, resident or not. None for the first block of a prompt, and for blocks that
    /// continue none, such as those of a sliding window.
    fn parent(&self, slot: u32) -> Option<u32>;

    /// The block's fingerprint: always the same for the same content, and uniform over 64 bits.
    fn key(&self, slot: u32) -> u64;
    /// False while the block is leased, being written, or continued by a resident block.
    fn may_evict(&self, slot: u32) -> bool;
    /// True while the block is leased or being written. It then stays even if all blocks that continue it are evicted.
    fn in_use(&self, slot: u32) -> bool;
}

/// Decides what to evict and what to admit. Slots are dense and below `u32::MAX - 1`. Memory is a few bytes times the
/// largest slot, and for some policies as much again for the keys of evicted blocks.
pub trait ReplacementPolicy: Send {
    /// The policy's kind, by which metrics name it.
    fn kind(&self) -> PolicyKind;

    /// Called when a request has missed a run of blocks. `run` gives their keys from the head; `cached` is how many
    /// blocks of the prompt before them are resident.
    fn missed(&mut self, cached: usize, run: &mut dyn Iterator<Item = u64>) {
        let _ = (cached, run);
    }

    /// Whether [`admit`](Self::admit) may return false.
    fn has_gate(&self) -> bool {
        false
    }

    /// Whether a run of missing blocks is worth `victims` evictions, which are at least one. `run` gives their keys
    /// from the head; `parent` is the resident block that they continue. After a refusal the caller still stores the
    /// blocks that fit without a victim.
    fn admit(&self, run: &[u64], parent: Option<u32>, victims: usize, blocks: &dyn Blocks) -> bool {
        let _ = (run, parent, victims, blocks);
        true
    }

    /// Inserts new blocks that continue each other, head first, behind `parent`. None of them may be in the policy yet.
    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks);

    /// Called when a request has hit these blocks, given from the head of its prompt. Slots that are not in the policy
    /// are passed over.
    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks);

    /// Called when blocks that continue these are being stored; gives slots from the tail to the head of a prompt. This
    /// is not a use. But a policy that inserts new blocks just below their parent in age must not let the parent grow
    /// old.
    fn renew(&mut self, from_tail: &mut dyn Iterator<Item = u32>) {
        let _ = from_tail;
    }

    /// Removes a slot that left the cache otherwise than by eviction. Returns false if it was not in the policy.
    fn remove(&mut self, slot: u32) -> bool;

    /// Removes and returns the victim: the first slot in the policy's order that [`Blocks::may_evict`] accepts. None
    /// after `max_refusals`, or after a quarter of that in one of several queues.
    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32>;

    /// Called when the cache turns out to hold this many blocks.
    fn grow(&mut self, capacity: usize) {
        let _ = capacity;
    }

    /// The policy's [`Learning`] interface; None if it does not learn.
    fn learning(&self) -> Option<&dyn Learning> {
        None
    }

    /// The mutable form of [`learning`](Self::learning).
    fn learning_mut(&mut self) -> Option<&mut dyn Learning> {
        None
    }

    /// The number of slots in the policy.
    fn len(&self) -> usize;

    /// True if the policy has no slot, so that nothing could be evicted.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if the policy has this slot.
    fn contains(&self, slot: u32) -> bool;

    /// Estimated bytes on the heap.
    fn heap_bytes(&self) -> usize;

    /// All slots, roughly the next victim first. A policy that takes over starts with this order.
    fn slots(&self) -> Vec<u32>;
}
