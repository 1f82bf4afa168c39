//! A cache without bytes: what a store keeps of its blocks, with a policy, over keys.

use std::collections::hash_map::Entry;

use crate::ghost::{KeyMap, map_bytes};
use crate::kind::PolicyKind;
use crate::learning::{Learning, LearntClass};
use crate::memo::Memo;
use crate::replacement::{Blocks, ReplacementPolicy};

const NONE: u32 = u32::MAX;
/// Blocks that may not go now, passed over in search of one victim; as in the store.
const REFUSALS: usize = 256;

struct Block {
    key: u64,
    parent: u32,
    /// Resident blocks that continue it.
    children: u32,
    /// The last request that used it.
    request: u32,
}

/// The blocks as the policy sees them. The blocks of the present request count as leased.
struct Resident {
    blocks: Vec<Block>,
    request: u32,
    /// What is fetched continues this one.
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

/// How much of one request was resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Blocks from the first one on, up to the first that was not.
    pub prefix_hits: usize,
    /// Blocks wherever they stand.
    pub block_hits: usize,
}

/// A block that had to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Its fingerprint.
    pub key: u64,
    /// What the policy knows of it, for a tier below.
    pub memo: Option<Memo>,
}

/// A cache of `capacity` blocks with a policy, driven request by request: a request's blocks are looked up, what was
/// hit is touched, what is missing comes in at the cost of victims. Its memory is in proportion to its capacity.
pub struct CacheModel {
    resident: Resident,
    free: Vec<u32>,
    slots: KeyMap<u32>,
    policy: Box<dyn ReplacementPolicy>,
    capacity: usize,
    /// So far, as the policy counts its time.
    references: u64,
    /// How dense is what a tier below gives up.
    below: Option<f32>,
    hit: Vec<u32>,
    run: Vec<u32>,
}

impl CacheModel {
    /// An empty cache.
    pub fn new(policy: PolicyKind, capacity: usize) -> Self {
        Self::with_policy(policy.build(capacity), capacity)
    }

    /// An empty cache that this policy, which is empty too, works for.
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

    /// Resident blocks.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True when nothing is resident.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The policy at work.
    pub fn policy(&self) -> PolicyKind {
        self.policy.kind()
    }

    /// True when the block is resident.
    pub fn contains(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// Bytes on the heap, about.
    pub fn heap_bytes(&self) -> usize {
        self.resident.blocks.capacity() * size_of::<Block>()
            + (self.free.capacity() + self.hit.capacity() + self.run.capacity()) * size_of::<u32>()
            + map_bytes(&self.slots)
            + self.policy.heap_bytes()
    }

    /// Goes on with another policy, which takes over what is resident.
    pub fn switch(&mut self, policy: PolicyKind) {
        if policy != self.policy.kind() {
            let (capacity, references) = (self.capacity, self.references);
            self.policy = policy.take_over(self.policy.as_ref(), capacity, references, &self.resident);
            // How dense the tier below is, is for the new one to say.
            self.set_below(self.below.map(|_| 0.0));
        }
    }

    /// What the policy knows of a resident block, for a tier below.
    pub fn memo(&self, key: u64) -> Option<Memo> {
        self.slots.get(&key).and_then(|&slot| self.policy.learning()?.memo(slot))
    }

    /// How dense the policy finds a block: by what it knows, or by `memo` if the block is not resident. See
    /// [`Learning::density`].
    pub fn density(&self, key: u64, memo: Memo) -> Option<f32> {
        self.policy.learning()?.density(self.memo(key).unwrap_or(memo))
    }

    /// See [`Learning::set_below`].
    pub fn set_below(&mut self, density: Option<f32>) {
        self.below = density;
        if let Some(learning) = self.policy.learning_mut() {
            learning.set_below(density);
        }
    }

    /// A tier below has the blocks of a prompt behind the `known` first ones, which are all that is resident of it, and
    /// `memos` of as many as are to come: those come in, unjudged, as if somebody had stored them. What they displace is given
    /// to `evicted`.
    pub fn fetch(&mut self, keys: &[u64], known: usize, memos: &[Memo], mut evicted: impl FnMut(Evicted)) {
        self.resident.request = self.resident.request.wrapping_add(1);
        let parent =
            known.checked_sub(1).and_then(|last| self.slots.get(&keys[last]).copied()).unwrap_or(NONE);
        // As in a store, what is there of the prompt is not leased yet.
        self.resident.continued = parent;
        self.add_run(&keys[known..known + memos.len()], parent, &mut evicted);
        self.resident.continued = NONE;
        if let Some(learning) = self.policy.learning_mut() {
            self.run.iter().zip(memos).for_each(|(&slot, &memo)| learning.remember(slot, memo));
        }
    }

    /// A request for a prompt of these blocks, head first. What had to go is given to `evicted`.
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
                // What follows is unreachable; it neither counts as used nor comes in.
                break;
            }
            parent = self.run.last().copied().unwrap_or(parent);
        }
        self.touch_hits();
        outcome
    }

    fn touch_hits(&mut self) {
        // As a store does, which tells of a prompt's hits once, and not of none.
        if !self.hit.is_empty() {
            self.policy.touch(&self.hit, &self.resident);
            self.references += self.hit.len() as u64;
            self.hit.clear();
        }
    }

    /// What its policy has learnt.
    pub fn learnt(&self) -> Vec<LearntClass> {
        self.policy.learning().map(Learning::learnt).unwrap_or_default()
    }

    /// Stores what the policy admits of a run that continues `parent`; says how many from its head.
    fn store_run(
        &mut self,
        known: usize,
        keys: &[u64],
        parent: u32,
        evicted: &mut impl FnMut(Evicted),
    ) -> usize {
        self.policy.missed(known, &mut keys.iter().copied());
        self.references += keys.len() as u64;
        let above = (parent != NONE).then_some(parent);
        let victims = (self.len() + keys.len()).saturating_sub(self.capacity);
        let refused = victims > 0 && !self.policy.admit(keys, above, victims, &self.resident);
        let admitted = if refused { keys.len().saturating_sub(victims) } else { keys.len() };
        self.add_run(&keys[..admitted], parent, evicted);
        self.run.len()
    }

    /// Adds blocks that continue each other and `parent`, as many as there can be room for; `run` has their slots then.
    fn add_run(&mut self, keys: &[u64], parent: u32, evicted: &mut impl FnMut(Evicted)) {
        self.run.clear();
        let mut last = parent;
        for &key in keys {
            if self.len() >= self.capacity && !self.evict(evicted) {
                break;
            }
            // A prompt holds a block twice only where a trace is wrong; its chain ends there.
            let Some(slot) = self.add(key, last) else { break };
            last = slot;
            self.run.push(slot);
        }
        let parent = (parent != NONE).then_some(parent);
        self.policy.insert(&self.run, parent, &self.resident);
    }

    /// The new block's slot; None if there is one of this key.
    fn add(&mut self, key: u64, parent: u32) -> Option<u32> {
        let Entry::Vacant(place) = self.slots.entry(key) else { return None };
        let block = Block { key, parent, children: 0, request: self.resident.request };
        let slot = self.free.pop().unwrap_or(self.resident.blocks.len() as u32);
        place.insert(slot);
        match self.resident.blocks.get_mut(slot as usize) {
            Some(place) => *place = block,
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
