//! Which nodes hold which blocks, by their engines' KV events. Pure.
//!
//! A node holds a block while any medium of it does: GPU memory, or a medium that the engine can load from, such as kvlane's
//! pool. Where a model has several KV cache groups, a hit needs blocks of each ([`groups`](super::groups)). Blocks with an
//! unknown parent are counted and dropped, because as first blocks they would be another prompt's beginning.

use std::{collections::HashMap, time::Instant};

use kvlane_kv_events::{BlockRemoved, BlockStored, ExternalHash, ExtraKey};

use super::{
    chain::{block, seed},
    groups::{Groups, LOOKS_MAX, of_group},
    promises::Promises,
    translation::Translation,
};
use crate::schedule::{FETCHED_AT_ONCE, Index, NODES_A_TABLE};

/// Longest block that is accepted, in tokens. Hybrid models have blocks of many hundreds.
const BLOCK_SIZE_MAX: u32 = 1 << 16;
/// Blocks of an event that are applied at a time, so that no thread waits long for the lock around this.
pub const BLOCKS_A_STEP: usize = 256;
/// Stands for an extra key that is no text. No client's prompt can have it.
const NO_TEXT: &str = "\u{0}no text";

/// Counts of a node's events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockStats {
    /// Tokens of a block. None until the engine's first stored block.
    pub block_size: Option<u32>,
    /// Blocks that the engine reported as stored.
    pub stored: u64,
    /// Blocks that it reported as removed.
    pub removed: u64,
    /// Stored blocks that were dropped, because their parent is unknown or the event is inconsistent.
    pub unattached: u64,
}

/// The nodes that hold each block. Nodes are numbered from 0: the scheduler's slots.
#[derive(Debug)]
pub struct Blocks {
    /// Blocks in GPU memory.
    device: Index,
    /// Blocks on other media.
    other: Index,
    promises: Promises,
    translation: Translation,
    stats: Vec<BlockStats>,
    /// Those of each node's model.
    groups: Vec<Groups>,
}

/// The block before the next blocks of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// The parent that the event names.
    OfEvent,
    /// Our hash of the last block that was applied, of the same event.
    Ours(u64),
}

impl Blocks {
    /// Room for about `blocks_max` different blocks, on each medium and for each 64 nodes. The first event allocates the
    /// memory.
    pub fn new(blocks_max: usize) -> Self {
        Self {
            device: Index::new(blocks_max),
            other: Index::new(blocks_max),
            promises: Promises::new(blocks_max / 16),
            translation: Translation::new(blocks_max),
            stats: Vec::new(),
            groups: Vec::new(),
        }
    }

    /// Memory of all tables.
    pub fn bytes(&self) -> usize {
        self.device.bytes() + self.other.bytes() + self.promises.bytes() + self.translation.bytes()
    }

    /// Counts of a node's events so far.
    pub fn stats(&self, node: usize) -> BlockStats {
        self.stats.get(node).copied().unwrap_or_default()
    }

    /// Takes note of the groups of a node's model. Events have to be told here before any of their batch is applied.
    pub fn learn(&mut self, node: usize, event: &BlockStored) {
        if self.groups.len() <= node {
            self.groups.resize(node + 1, Groups::default());
        }
        self.groups[node].learn(event);
    }

    /// Whether blocks of this group of a node make up a prompt's beginning. They have to be applied before those of other
    /// groups, which are known by the hashes of these.
    pub fn are_of_a_beginning(&self, node: usize, group: Option<u32>) -> bool {
        self.groups.get(node).map_or_else(|| Groups::default().is_full(group), |groups| groups.is_full(group))
    }

    /// Applies the blocks of an event from index `from` on, at most [`BLOCKS_A_STEP`]. Returns the next `from` and parent;
    /// None once nothing of the event is left.
    pub fn stored(
        &mut self,
        node: usize,
        event: &BlockStored,
        from: usize,
        parent: Parent,
    ) -> Option<(usize, Parent)> {
        let to = event.hashes.len().min(from + BLOCKS_A_STEP);
        let hashes = event.hashes.get(from..to).filter(|hashes| !hashes.is_empty())?;
        if !self.are_of_a_beginning(node, event.group) {
            self.stored_of_other(node, hashes, event.group, event.medium.as_deref());
            return Some((to, Parent::OfEvent));
        }
        self.stats_mut(node).stored += hashes.len() as u64;
        if event.tokens.is_empty() {
            // An offloading connector names blocks by hash only, without tokens, because they were on the GPU before.
            self.stored_by_hash(node, hashes, event.medium.as_deref());
            return Some((to, Parent::OfEvent));
        }
        let size = event.block_size;
        let fits = (1..=BLOCK_SIZE_MAX).contains(&size)
            && event.tokens.len() == event.hashes.len().saturating_mul(size as usize);
        let adapter = adapter_of(event);
        let parent = match (parent, &event.parent) {
            (Parent::Ours(ours), _) => Some(ours),
            (Parent::OfEvent, Some(parent)) => self.translation.get(parent),
            (Parent::OfEvent, None) => Some(seed(size, adapter.as_deref())),
        };
        let Some(mut ours) = parent.filter(|_| fits) else {
            self.stats_mut(node).unattached += event.hashes.len().saturating_sub(from) as u64;
            return None;
        };
        let is_inside = |known: u32| known > size && known.is_multiple_of(size);
        if event.group.is_some() && self.stats(node).block_size.is_some_and(is_inside) {
            // The end of a prompt inside a block, which vLLM names in smaller units.
            return None;
        }
        self.stats_mut(node).block_size = Some(size);
        let mut numbered = (from..).zip(hashes);
        loop {
            let part: Vec<(&ExternalHash, u64)> = numbered
                .by_ref()
                .take(FETCHED_AT_ONCE)
                .map(|(number, engines)| {
                    let tokens = &event.tokens[number * size as usize..(number + 1) * size as usize];
                    ours = block(ours, tokens, extra_keys(event, number));
                    (engines, ours)
                })
                .collect();
            if part.is_empty() {
                return Some((to, Parent::Ours(ours)));
            }
            self.translation.fetch(part.iter().map(|(engines, _)| *engines));
            let index = if is_device(event.medium.as_deref()) { &mut self.device } else { &mut self.other };
            index.fetch(part.iter().map(|(_, ours)| *ours), node);
            for (engines, ours) in part {
                self.translation.put(engines, ours);
                index.insert_one(ours, node);
            }
        }
    }

    fn stored_of_other(
        &mut self,
        node: usize,
        hashes: &[ExternalHash],
        group: Option<u32>,
        medium: Option<&str>,
    ) {
        let Some(group) = self.decisive(node, group) else { return };
        for engines in hashes {
            if let Some(ours) = self.translation.get(engines) {
                self.medium_mut(medium).insert_one(of_group(ours, group), node);
            }
        }
    }

    /// The group, if its blocks decide where a node's hits end.
    fn decisive(&self, node: usize, group: Option<u32>) -> Option<u32> {
        group.filter(|_| self.groups.get(node).is_some_and(|groups| groups.is_other(group)))
    }

    fn stored_by_hash(&mut self, node: usize, hashes: &[ExternalHash], medium: Option<&str>) {
        for engines in hashes {
            match self.translation.get(engines) {
                Some(ours) => self.medium_mut(medium).insert_one(ours, node),
                None => self.stats_mut(node).unattached += 1,
            }
        }
    }

    /// Applies the removal of blocks from one medium.
    pub fn removed(&mut self, node: usize, event: &BlockRemoved) {
        let other = self.decisive(node, event.group);
        if other.is_none() && !self.are_of_a_beginning(node, event.group) {
            return;
        }
        for engines in &event.hashes {
            if let Some(ours) = self.translation.get(engines) {
                let key = other.map_or(ours, |group| of_group(ours, group));
                self.medium_mut(event.medium.as_deref()).remove_one(key, node);
            }
        }
        if other.is_some() {
            return;
        }
        self.stats_mut(node).removed += event.hashes.len() as u64;
    }

    /// Drops all blocks of a node. The size of its blocks still holds, until its engine reports another one.
    pub fn cleared(&mut self, node: usize) {
        self.device.forget(node);
        self.other.forget(node);
        self.promises.forget(node);
    }

    /// Drops all that is known of a node, because another engine runs there now.
    pub fn forget(&mut self, node: usize) {
        self.cleared(node);
        *self.stats_mut(node) = BlockStats::default();
        if let Some(groups) = self.groups.get_mut(node) {
            *groups = Groups::default();
        }
    }

    /// Records that the node will have these blocks, because it was given a prompt of them.
    pub fn promise(&mut self, blocks: &[u64], node: usize, now: Instant) {
        self.promises.add(blocks, node, now);
    }

    /// Finds the number of leading blocks of the chain that are a hit in each of these nodes. `of` has a bit for each node, 64
    /// in a word. Calls `found(node, blocks)` once for each.
    pub fn matched(&mut self, chain: &[u64], of: &[u64], now: Instant, mut found: impl FnMut(usize, usize)) {
        self.promises.expire(now);
        let mut looks = LOOKS_MAX;
        for (table, &nodes) in of.iter().enumerate() {
            let mut of_several = Vec::new();
            let mut end = |count: usize, mut nodes: u64| {
                while nodes != 0 {
                    let node = table * NODES_A_TABLE + nodes.trailing_zeros() as usize;
                    match self.groups.get(node).filter(|groups| !groups.are_one()) {
                        Some(groups) => of_several.push((node, groups, count)),
                        None => found(node, count),
                    }
                    nodes &= nodes - 1;
                }
            };
            let mut still = nodes;
            for (count, &block) in chain.iter().enumerate() {
                if still == 0 {
                    break;
                }
                if count % FETCHED_AT_ONCE == 0 {
                    let part = &chain[count..chain.len().min(count + FETCHED_AT_ONCE)];
                    for index in [&self.device, &self.other] {
                        index.fetch(part.iter().copied(), table * NODES_A_TABLE);
                    }
                }
                let held = self.device.nodes_of(block, table)
                    | self.other.nodes_of(block, table)
                    | self.promises.nodes_of(block, table);
                end(count, still & !held);
                still &= held;
            }
            end(chain.len(), still);
            // All nodes of the table share a look at a block: by group, each block's nodes.
            let mut seen: HashMap<u32, Vec<Option<u64>>> = HashMap::new();
            for (node, groups, count) in of_several {
                let size = self.stats(node).block_size.unwrap_or(1);
                let hit = groups.hit(size, count, &mut looks, |group, block| {
                    let of_blocks = seen.entry(group).or_insert_with(|| vec![None; chain.len()]);
                    let held = of_blocks[block].get_or_insert_with(|| {
                        let key = of_group(chain[block], group);
                        self.device.nodes_of(key, table)
                            | self.other.nodes_of(key, table)
                            | self.promises.nodes_of(chain[block], table)
                    });
                    *held & 1 << (node % NODES_A_TABLE) != 0
                });
                found(node, hit);
            }
        }
    }

    /// Number of leading blocks of the chain that these nodes can load from their pool: each is on another medium than GPU
    /// memory of one of them. `of` has tables and their bit sets of 64 nodes. Where a hit needs more than a beginning, it has
    /// at most `most` blocks.
    pub fn pooled(&self, chain: &[u64], most: usize, of: &[(usize, u64)]) -> usize {
        let is_held =
            |block: &&u64| of.iter().any(|(table, nodes)| self.other.nodes_of(**block, *table) & nodes != 0);
        let count = chain.iter().take_while(is_held).count();
        let mut groups = of.iter().flat_map(|(table, nodes)| {
            let nodes = (0..NODES_A_TABLE).filter(move |bit| nodes >> bit & 1 != 0);
            nodes.map(move |bit| table * NODES_A_TABLE + bit)
        });
        // Engines of a pool have the same groups.
        let Some((node, groups)) = groups.find_map(|node| {
            self.groups.get(node).filter(|groups| !groups.are_one()).map(|groups| (node, groups))
        }) else {
            return count;
        };
        let size = self.stats(node).block_size.unwrap_or(1);
        let mut looks = LOOKS_MAX;
        groups.hit(size, count.min(most), &mut looks, |group, block| is_held(&&of_group(chain[block], group)))
    }

    fn medium_mut(&mut self, medium: Option<&str>) -> &mut Index {
        if is_device(medium) { &mut self.device } else { &mut self.other }
    }

    fn stats_mut(&mut self, node: usize) -> &mut BlockStats {
        if self.stats.len() <= node {
            self.stats.resize(node + 1, BlockStats::default());
        }
        &mut self.stats[node]
    }
}

fn is_device(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case("gpu"))
}

/// Older engines report an adapter's number only, which no request names, so their blocks match no prompt.
fn adapter_of(event: &BlockStored) -> Option<String> {
    event.lora_name.clone().or_else(|| event.lora_id.map(|id| format!("\u{0}number {id}")))
}

/// The keys that decide a block's content beside its tokens. vLLM lists the adapter there too, which the seed already has.
fn extra_keys(event: &BlockStored, number: usize) -> impl Iterator<Item = &str> {
    let keys = event.extra_keys.get(number).into_iter().flatten();
    keys.filter_map(|key| match key {
        ExtraKey::Text(text) if Some(text) == event.lora_name.as_ref() => None,
        ExtraKey::Text(text) => Some(text.as_str()),
        ExtraKey::Other => Some(NO_TEXT),
    })
}
