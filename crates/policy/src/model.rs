//! [`CacheModel`]: a cache without bytes. It keeps the keys that a store would keep as blocks, and runs a policy on
//! them.

use std::collections::hash_map::Entry;

use crate::ghost::{KeyMap, map_bytes};
use crate::kind::PolicyKind;
use crate::learning::{Learning, LearntClass};
use crate::memo::Memo;
use crate::replacement::{Blocks, ReplacementPolicy};

const NONE: u32 = u32::MAX;
/// Refusals in a search for one victim; as in the store.
const REFUSALS: usize = 256;

struct Block {
    key: u64,
    parent: u32,
    /// The number of resident blocks that continue it.
    children: u32,
    /// Number of the last request that used it.
    request: u32,
}

/// The blocks as the policy sees them. Blocks of the present request count as leased.
struct Resident {
    blocks: Vec<Block>,
    /// Number of the present request.
    request: u32,
    /// The block that a fetched run continues; it is not evictable.
    continued: u32,
}

impl Blocks for Resident {
    fn key(&self, slot: u32) -> u64 {
        self.blocks[slot as usize].key
    }

    fn parent(&self, slot: u32) -> Option<u32> {
        let parent = self.blocks[slot as usize].parent;
        (parent != NONE).then_some(parent)
    }

    fn may_evict(&self, slot: u32) -> bool {
        let block = &self.blocks[slot as usize];
        block.children == 0 && block.request != self.request && slot != self.continued
    }

    fn in_use(&self, slot: u32) -> bool {
        self.blocks[slot as usize].request == self.request
    }
}

/// How many blocks of a request were resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Resident blocks from the first one on, up to the first that is missing.
    pub prefix_hits: usize,
    /// Resident blocks anywhere in the prompt.
    pub block_hits: usize,
}

/// A block that was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The block's fingerprint.
    pub key: u64,
    /// The policy's memo of the block, for a tier below. None if the policy does not learn.
    pub memo: Option<Memo>,
}

/// A cache of `capacity` blocks, driven request by request. A request looks up its blocks, touches the hits, and stores
/// the missing ones in place of victims. Memory is in proportion to the capacity.
pub struct CacheModel {
    resident: Resident,
    free: Vec<u32>,
    slots: KeyMap<u32>,
    policy: Box<dyn ReplacementPolicy>,
    capacity: usize,
    /// References so far, which is the time of a policy that takes over.
    references: u64,
    /// Hit density of the blocks that a tier below gives up; see [`Learning::set_below`].
    below: Option<f32>,
    hit: Vec<u32>,
    run: Vec<u32>,
}

impl CacheModel {
    /// An empty cache with a policy of this kind.
    pub fn new(policy: PolicyKind, capacity: usize) -> Self {
        Self::with_policy(policy.build(capacity), capacity)
    }

    /// An empty cache with this policy, which must be empty too.
    pub fn with_policy(policy: Box<dyn ReplacementPolicy>, capacity: usize) -> Self {
        let resident = Resident { blocks: Vec::new(), request: 0, continued: NONE };
        Self {
            resident,
            free: Vec::new(),
            slots: KeyMap::default(),
            policy,
            capacity,
            references: 0,
            below: None,
            hit: Vec::new(),
            run: Vec::new(),
        }
    }

    /// The number of resident blocks.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True if no block is resident.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The kind of the active policy.
    pub fn policy(&self) -> PolicyKind {
        self.policy.kind()
    }

    /// True if the block is resident.
    pub fn contains(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// Estimated bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.resident.blocks.capacity() * size_of::<Block>()
            + (self.free.capacity() + self.hit.capacity() + self.run.capacity()) * size_of::<u32>()
            + map_bytes(&self.slots)
            + self.policy.heap_bytes()
    }

    /// Switches to another policy, which takes over the resident blocks.
    pub fn switch(&mut self, policy: PolicyKind) {
        if policy != self.policy.kind() {
            let (capacity, references) = (self.capacity, self.references);
            self.policy = policy.take_over(self.policy.as_ref(), capacity, references, &self.resident);
            // Reset the density of the tier below to 0: the new policy has to measure it.
            self.set_below(self.below.map(|_| 0.0));
        }
    }

    /// The policy's memo of a resident block, for a tier below.
    pub fn memo(&self, key: u64) -> Option<Memo> {
        self.slots.get(&key).and_then(|&slot| self.policy.learning()?.memo(slot))
    }

    /// The hit density of a block by the policy: from its own memo, or from `memo` if the block is not resident. See
    /// [`Learning::density`].
    pub fn density(&self, key: u64, memo: Memo) -> Option<f32> {
        self.policy.learning()?.density(self.memo(key).unwrap_or(memo))
    }

    /// Tells a learning policy the hit density of a tier below, see [`Learning::set_below`].
    pub fn set_below(&mut self, density: Option<f32>) {
        self.below = density;
        if let Some(learning) = self.policy.learning_mut() {
            learning.set_below(density);
        }
    }

    /// Fetches blocks of a prompt from a tier below, one for each of `memos`, behind the `cached` first blocks, which
    /// are the only resident ones. Fetched blocks are not judged. Passes the blocks that they displace to `evicted`.
    pub fn fetch(&mut self, keys: &[u64], cached: usize, memos: &[Memo], mut evicted: impl FnMut(Evicted)) {
        self.resident.request = self.resident.request.wrapping_add(1);
        let parent =
            cached.checked_sub(1).and_then(|last| self.slots.get(&keys[last]).copied()).unwrap_or(NONE);
        // As in a store, the resident blocks of the prompt are not leased yet, so protect the last one.
        self.resident.continued = parent;
        self.add_run(&keys[cached..cached + memos.len()], parent, &mut evicted);
        self.resident.continued = NONE;
        if let Some(learning) = self.policy.learning_mut() {
            self.run.iter().zip(memos).for_each(|(&slot, &memo)| learning.remember(slot, memo));
        }
    }

    /// Runs a request for a prompt of these blocks, head first. Passes the blocks that it displaces to `evicted`.
    pub fn request(&mut self, keys: &[u64], mut evicted: impl FnMut(Evicted)) -> Outcome {
        self.resident.request = self.resident.request.wrapping_add(1);
        self.hit.clear();
        let mut outcome = Outcome::default();
        let mut parent = NONE;
        let mut at = 0;
        while let Some(&key) = keys.get(at) {
            if let Some(&slot) = self.slots.get(&key) {
                outcome.prefix_hits += usize::from(outcome.block_hits == at);
                outcome.block_hits += 1;
                self.resident.blocks[slot as usize].request = self.resident.request;
                self.hit.push(slot);
                parent = slot;
                at += 1;
                continue;
            }
            self.touch_hits();
            let missing = keys[at..].iter().take_while(|key| !self.slots.contains_key(key)).count();
            let stored = self.store_run(at, &keys[at..at + missing], parent, &mut evicted);
            at += missing;
            if stored < missing {
                // The blocks behind a gap are unreachable: they neither count as used nor are stored.
                break;
            }
            parent = self.run.last().copied().unwrap_or(parent);
        }
        self.touch_hits();
        outcome
    }

    fn touch_hits(&mut self) {
        // As in a store, report the hits of a run at once, and never an empty run.
        if !self.hit.is_empty() {
            self.policy.touch(&self.hit, &self.resident);
            self.references += self.hit.len() as u64;
            self.hit.clear();
        }
    }

    /// The classes that the policy has learnt; empty if it does not learn.
    pub fn learnt(&self) -> Vec<LearntClass> {
        self.policy.learning().map(Learning::learnt).unwrap_or_default()
    }

    /// Stores the blocks of a missing run behind `parent` that the policy admits. Returns their number, from the head
    /// on.
    fn store_run(
        &mut self,
        cached: usize,
        keys: &[u64],
        parent: u32,
        evicted: &mut impl FnMut(Evicted),
    ) -> usize {
        self.policy.missed(cached, &mut keys.iter().copied());
        self.references += keys.len() as u64;
        let above = (parent != NONE).then_some(parent);
        let victims = (self.len() + keys.len()).saturating_sub(self.capacity);
        let refused = victims > 0 && !self.policy.admit(keys, above, victims, &self.resident);
        let admitted = if refused { keys.len().saturating_sub(victims) } else { keys.len() };
        self.add_run(&keys[..admitted], parent, evicted);
        self.run.len()
    }

    /// Adds blocks that continue each other and `parent`, until no victim is left. Leaves their slots in `run`.
    fn add_run(&mut self, keys: &[u64], parent: u32, evicted: &mut impl FnMut(Evicted)) {
        self.run.clear();
        let mut last = parent;
        for &key in keys {
            if self.len() >= self.capacity && !self.evict(evicted) {
                break;
            }
            // Only a faulty trace has a block twice in a prompt; the run ends there.
            let Some(slot) = self.add(key, last) else { break };
            last = slot;
            self.run.push(slot);
        }
        let parent = (parent != NONE).then_some(parent);
        self.policy.insert(&self.run, parent, &self.resident);
    }

    /// Adds a block and returns its slot; None if the key is resident already.
    fn add(&mut self, key: u64, parent: u32) -> Option<u32> {
        let Entry::Vacant(vacant) = self.slots.entry(key) else { return None };
        let block = Block { key, parent, children: 0, request: self.resident.request };
        let slot = self.free.pop().unwrap_or(self.resident.blocks.len() as u32);
        vacant.insert(slot);
        match self.resident.blocks.get_mut(slot as usize) {
            Some(old) => *old = block,
            None => self.resident.blocks.push(block),
        }
        if parent != NONE {
            self.resident.blocks[parent as usize].children += 1;
        }
        Some(slot)
    }

    fn evict(&mut self, evicted: &mut impl FnMut(Evicted)) -> bool {
        let Some(victim) = self.policy.take_victim(REFUSALS, &self.resident) else { return false };
        let Block { key, parent, .. } = self.resident.blocks[victim as usize];
        let memo = self.policy.learning().and_then(|learning| learning.memo(victim));
        self.slots.remove(&key);
        self.free.push(victim);
        if parent != NONE {
            let parent = &mut self.resident.blocks[parent as usize];
            parent.children = parent.children.saturating_sub(1);
        }
        evicted(Evicted { key, memo });
        true
    }
}
