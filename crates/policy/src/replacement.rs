//! What a replacement policy is: which blocks go when room is needed, and which come in at all.
//!
//! The caller (a store, or [`CacheModel`](crate::CacheModel) in virtual time) knows the blocks; a policy knows slots, and
//! asks about them through [`Blocks`]. For one request the caller, in this order:
//!
//! 1. finds what is resident and reports it with [`touch`](ReplacementPolicy::touch), and what is not with
//!    [`missed`](ReplacementPolicy::missed);
//! 2. if storing the missing blocks needs victims, asks [`admit`](ReplacementPolicy::admit) once for their run;
//! 3. makes room with [`take_victim`](ReplacementPolicy::take_victim), as often as it needs to;
//! 4. adds the new blocks with [`insert`](ReplacementPolicy::insert), below the last that was hit.
//!
//! In a store the first happens when a prompt is looked up, the rest when its blocks are saved, maybe by and by: then it
//! also tells with [`renew`](ReplacementPolicy::renew) that the blocks before them still matter.
//!
//! All policies know that blocks are prefixes of prompts: a run comes in with its tail as the next to be evicted, a hit is
//! counted from the tail to the head, a block goes only when nothing resident continues it ([`Blocks::may_evict`]), and what
//! is leased or being written stays in its place but is passed over.

use crate::kind::PolicyKind;
use crate::learning::Learning;

/// What a policy asks about slots that it was told of.
pub trait Blocks {
    /// The block that this one continues, in or not; None of a prompt's first one, and of blocks that continue nothing, as those of
    /// a sliding window.
    fn parent(&self, slot: u32) -> Option<u32>;

    /// The block's fingerprint: equal for equal content whenever it comes back, and uniform over 64 bits.
    fn key(&self, slot: u32) -> u64;
    /// False while it is leased, being written, or continued by a resident block.
    fn may_evict(&self, slot: u32) -> bool;
    /// True while it is leased or being written: it will not be evicted even if all that continues it is.
    fn in_use(&self, slot: u32) -> bool;
}

/// Decides what to evict and what to keep out. Slots are dense and below `u32::MAX - 1`; memory is a few bytes times the
/// largest one, and for some policies as much again for the keys of evicted blocks.
pub trait ReplacementPolicy: Send {
    /// Which of the policies this is.
    fn kind(&self) -> PolicyKind;

    /// A request has missed these blocks, given by key from the head, behind the first `known` ones of its prompt.
    fn missed(&mut self, known: usize, run: &mut dyn Iterator<Item = u64>) {
        let _ = (known, run);
    }

    /// Whether [`admit`](Self::admit) may say no.
    fn has_gate(&self) -> bool {
        false
    }

    /// Storing these missing blocks, given by key from the head, behind a block that is in, costs `victims` evictions, more than
    /// none. Says whether they are worth that. What of them fits without a victim is stored at any rate.
    fn admit(&self, run: &[u64], parent: Option<u32>, victims: usize, blocks: &dyn Blocks) -> bool {
        let _ = (run, parent, victims, blocks);
        true
    }

    /// New blocks that continue each other, head first, and the block that the first of them continues. They must not be
    /// in yet.
    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks);

    /// A request has hit these blocks, given from the head of its prompt. Slots that are not in are passed over.
    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks);

    /// What continues these blocks, given from the tail to the head of a prompt, is being stored. That is not a use, but where
    /// new blocks come in below the one they continue, that one should not have grown old.
    fn renew(&mut self, from_tail: &mut dyn Iterator<Item = u32>) {
        let _ = from_tail;
    }

    /// `slot` is gone for another reason than eviction; false if it was not in.
    fn remove(&mut self, slot: u32) -> bool;

    /// Takes out the block to evict: the first in the policy's order that [`Blocks::may_evict`] agrees to. None after
    /// `max_refusals` that it did not agree to, or a quarter of that in one of several queues.
    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32>;

    /// The cache turned out to hold so many blocks.
    fn grow(&mut self, capacity: usize) {
        let _ = capacity;
    }

    /// This policy as one that learns; None if it does not.
    fn learning(&self) -> Option<&dyn Learning> {
        None
    }

    /// The same, to tell it something.
    fn learning_mut(&mut self) -> Option<&mut dyn Learning> {
        None
    }

    /// Slots that are in.
    fn len(&self) -> usize;

    /// True when nothing could be evicted.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when `slot` is in.
    fn contains(&self, slot: u32) -> bool;

    /// Bytes on the heap, about.
    fn heap_bytes(&self) -> usize;

    /// All slots, roughly the next victim first: what another policy starts with.
    fn slots(&self) -> Vec<u32>;
}
