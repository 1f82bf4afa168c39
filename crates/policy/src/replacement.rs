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

use std::{fmt, str::FromStr};

use crate::learnt::LearntClass;
use crate::memo::Memo;
use crate::policies::{Arc, Learned, Lru, S3Fifo, Sieve, TinyLfu, WTinyLfu};

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

    /// So many references went by before this policy took over: its time goes on from there. Called while it is empty.
    fn begin_at(&mut self, references: u64) {
        let _ = references;
    }

    /// The cache turned out to hold so many blocks.
    fn grow(&mut self, capacity: usize) {
        let _ = capacity;
    }

    /// What it knows of a slot that is in, or was the last that it gave up, for a tier below that has the block too. None from
    /// policies that do not learn: they have no use for it.
    fn memo(&self, slot: u32) -> Option<Memo> {
        let _ = slot;
        None
    }

    /// A slot that is in came back from a tier below, which kept this of it.
    fn remember(&mut self, slot: u32, memo: Memo) {
        let _ = (slot, memo);
    }

    /// The hits that a block of which this is known will bring for each reference that it is kept, in whichever tier. None from
    /// policies that do not learn, or not yet.
    fn density(&self, memo: Memo) -> Option<f32> {
        let _ = memo;
        None
    }

    /// There is a tier below, which gets what comes in here and has given up blocks of this density lately; 0 before it had to
    /// give up any. What is not worth a place here may be worth one there. None: there is none, or it takes nothing.
    fn set_below(&mut self, density: Option<f32>) {
        let _ = density;
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

    /// What it has learnt of each kind of blocks that it has seen, the most seen first; nothing from policies that do not learn, or not yet.
    fn learnt(&self) -> Vec<LearntClass> {
        Vec::new()
    }

    /// All slots, roughly the next victim first: what another policy starts with.
    fn slots(&self) -> Vec<u32>;
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    /// [`Lru`]
    #[default]
    Lru,
    /// [`Arc`]
    Arc,
    /// [`S3Fifo`]
    S3Fifo,
    /// [`Sieve`]
    Sieve,
    /// [`TinyLfu`]
    TinyLfu,
    /// [`WTinyLfu`]
    WTinyLfu,
    /// [`Learned`]
    Learned,
}

impl PolicyKind {
    /// All of them, the default first.
    pub const ALL: [Self; 7] =
        [Self::Lru, Self::Arc, Self::S3Fifo, Self::Sieve, Self::TinyLfu, Self::WTinyLfu, Self::Learned];

    /// The name that flags and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Arc => "arc",
            Self::S3Fifo => "s3fifo",
            Self::Sieve => "sieve",
            Self::TinyLfu => "tinylfu",
            Self::WTinyLfu => "wtinylfu",
            Self::Learned => "learned",
        }
    }

    /// An empty policy for a cache of about `capacity` blocks: frequency sketches are sized by it, nothing else.
    pub fn build(self, capacity: usize) -> Box<dyn ReplacementPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new()),
            Self::Arc => Box::new(Arc::new()),
            Self::S3Fifo => Box::new(S3Fifo::new()),
            Self::Sieve => Box::new(Sieve::new()),
            Self::TinyLfu => Box::new(TinyLfu::new(capacity)),
            Self::WTinyLfu => Box::new(WTinyLfu::new(capacity)),
            Self::Learned => Box::new(Learned::new(capacity)),
        }
    }

    /// A policy for a cache of about `capacity` blocks that takes over what `from` holds, in its order, when `references` went by;
    /// how often blocks were used and which were evicted is learned anew.
    pub fn take_over(
        self,
        from: &dyn ReplacementPolicy,
        capacity: usize,
        references: u64,
        blocks: &dyn Blocks,
    ) -> Box<dyn ReplacementPolicy> {
        let mut policy = self.build(capacity);
        policy.begin_at(references);
        for slot in from.slots() {
            policy.insert(&[slot], None, blocks);
        }
        policy
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// Which policy a cache runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This one.
    Fixed(PolicyKind),
    /// The one that shadow caches find best, see [`Auto`](crate::Auto).
    Auto,
}

impl Choice {
    /// What it begins with. The one that learns was at or near the best on every trace that was looked at, so that the others
    /// have to show that they are better (docs/policies.md).
    pub fn first(self) -> PolicyKind {
        match self {
            Self::Fixed(kind) => kind,
            Self::Auto => PolicyKind::Learned,
        }
    }
}

impl Default for Choice {
    fn default() -> Self {
        Self::Fixed(PolicyKind::default())
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(kind) => kind.fmt(f),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// There is no policy of this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no policy: use lru, arc, s3fifo, sieve, tinylfu, wtinylfu or learned")]
pub struct UnknownPolicy(String);
