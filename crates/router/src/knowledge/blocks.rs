//! Which nodes hold which blocks, by what their engines tell of it. Pure.
//!
//! A block counts as held while any medium holds it: GPU memory, or what an engine can load from, as kvlane's pool. What
//! follows a block that is not known is not attached anywhere: at the root it would be another prompt's beginning.

use std::time::Instant;

use kvlane_kv_events::{BlockRemoved, BlockStored, ExternalHash, ExtraKey};

use super::{
    chain::{block, seed},
    promises::Promises,
    translation::Translation,
};
use crate::schedule::{FETCHED_AT_ONCE, Index, NODES_A_TABLE};

/// Longest block that is believed, in tokens. Hybrid models have blocks of many hundreds.
const BLOCK_SIZE_MAX: u32 = 1 << 16;
/// Blocks of an event that are taken in at a time, so that nobody waits long for the lock around this.
pub const BLOCKS_A_STEP: usize = 256;
/// Stands for a key beside the tokens that is no text: no prompt of a client has it.
const NO_TEXT: &str = "\u{0}no text";

/// What is known of a node's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    /// Tokens of a block, once the engine has said it.
    pub block_size: Option<u32>,
    /// Blocks that the engine said it has stored, in all.
    pub stored: u64,
    /// Blocks that it said are gone.
    pub removed: u64,
    /// Stored blocks that were not taken in: what comes before them is not known, or the event does not fit together.
    pub unattached: u64,
}

/// Blocks by node. Nodes are numbered from 0.
#[derive(Debug)]
pub struct Blocks {
    device: Index,
    other: Index,
    promises: Promises,
    translation: Translation,
    told: Vec<Told>,
}

/// What comes before the blocks of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// What the event says.
    AsTold,
    /// This block of ours: an earlier part of the same event.
    Ours(u64),
}

impl Blocks {
    /// Room for about that many different blocks, on each medium and for each 64 nodes. Memory is taken when the first event comes.
    pub fn new(blocks_max: usize) -> Self {
        Self {
            device: Index::new(blocks_max),
            other: Index::new(blocks_max),
            promises: Promises::new(blocks_max / 16),
            translation: Translation::new(blocks_max),
            told: Vec::new(),
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.device.bytes() + self.other.bytes() + self.promises.bytes() + self.translation.bytes()
    }

    /// What a node's engine told so far.
    pub fn told(&self, node: usize) -> Told {
        self.told.get(node).copied().unwrap_or_default()
    }

    /// Takes in the blocks `from..` of an event, at most [`BLOCKS_A_STEP`]. Answers the last of them, and how far it came; None
    /// where nothing of the event is left to do.
    pub fn stored(
        &mut self,
        node: usize,
        event: &BlockStored,
        from: usize,
        before: Before,
    ) -> Option<(usize, Before)> {
        let to = event.hashes.len().min(from + BLOCKS_A_STEP);
        let hashes = event.hashes.get(from..to).filter(|hashes| !hashes.is_empty())?;
        if !is_ours_to_know(event.group) {
            return None;
        }
        self.told_mut(node).stored += hashes.len() as u64;
        if event.tokens.is_empty() {
            // An offloading connector names blocks that were on the GPU, without their tokens.
            self.stored_elsewhere(node, hashes, event.medium.as_deref());
            return Some((to, Before::AsTold));
        }
        let size = event.block_size;
        let fits = (1..=BLOCK_SIZE_MAX).contains(&size)
            && event.tokens.len() == event.hashes.len().saturating_mul(size as usize);
        let adapter = adapter_of(event);
        let parent = match (before, &event.parent) {
            (Before::Ours(ours), _) => Some(ours),
            (Before::AsTold, Some(parent)) => self.translation.get(parent),
            (Before::AsTold, None) => Some(seed(size, adapter.as_deref())),
        };
        let Some(mut ours) = parent.filter(|_| fits) else {
            self.told_mut(node).unattached += event.hashes.len().saturating_sub(from) as u64;
            return None;
        };
        self.told_mut(node).block_size = Some(size);
        let mut places = (from..).zip(hashes);
        loop {
            let part: Vec<(&ExternalHash, u64)> = places
                .by_ref()
                .take(FETCHED_AT_ONCE)
                .map(|(place, engines)| {
                    let tokens = &event.tokens[place * size as usize..(place + 1) * size as usize];
                    ours = block(ours, tokens, beside(event, place));
                    (engines, ours)
                })
                .collect();
            if part.is_empty() {
                return Some((to, Before::Ours(ours)));
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

    fn stored_elsewhere(&mut self, node: usize, hashes: &[ExternalHash], medium: Option<&str>) {
        for engines in hashes {
            match self.translation.get(engines) {
                Some(ours) => self.medium_mut(medium).insert_one(ours, node),
                None => self.told_mut(node).unattached += 1,
            }
        }
    }

    /// Blocks are gone from one medium.
    pub fn removed(&mut self, node: usize, event: &BlockRemoved) {
        if !is_ours_to_know(event.group) {
            return;
        }
        for engines in &event.hashes {
            if let Some(ours) = self.translation.get(engines) {
                self.medium_mut(event.medium.as_deref()).remove_one(ours, node);
            }
        }
        self.told_mut(node).removed += event.hashes.len() as u64;
    }

    /// The node has nothing any more. What an engine said of its blocks' size holds until it says another one.
    pub fn cleared(&mut self, node: usize) {
        self.device.forget(node);
        self.other.forget(node);
        self.promises.forget(node);
    }

    /// Another engine is there now, of which nothing is known.
    pub fn forget(&mut self, node: usize) {
        self.cleared(node);
        *self.told_mut(node) = Told::default();
    }

    /// The node was given a prompt of these blocks, and will have them.
    pub fn promise(&mut self, blocks: &[u64], node: usize, now: Instant) {
        self.promises.add(blocks, node, now);
    }

    /// Blocks of the chain, from its beginning, that each of the nodes has; a bit each in `of`, for 64 nodes. `found` is called
    /// once for each node.
    pub fn matched(&mut self, chain: &[u64], of: &[u64], now: Instant, mut found: impl FnMut(usize, usize)) {
        self.promises.age(now);
        for (table, &nodes) in of.iter().enumerate() {
            let mut end = |count: usize, mut nodes: u64| {
                while nodes != 0 {
                    found(table * NODES_A_TABLE + nodes.trailing_zeros() as usize, count);
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
        }
    }

    /// Leading blocks of the chain that one of these nodes can load from its pool, because a medium other than its device holds
    /// them. Each table has 64 nodes, with a bit each.
    pub fn pooled(&self, chain: &[u64], of: &[(usize, u64)]) -> usize {
        let is_held =
            |block: &&u64| of.iter().any(|(table, nodes)| self.other.nodes_of(**block, *table) & nodes != 0);
        chain.iter().take_while(is_held).count()
    }

    fn medium_mut(&mut self, medium: Option<&str>) -> &mut Index {
        if is_device(medium) { &mut self.device } else { &mut self.other }
    }

    fn told_mut(&mut self, node: usize) -> &mut Told {
        if self.told.len() <= node {
            self.told.resize(node + 1, Told::default());
        }
        &mut self.told[node]
    }
}

fn is_device(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case("gpu"))
}

/// Hybrid models have groups of layers, each with blocks of its own; the first group's tell of prefixes.
fn is_ours_to_know(group: Option<u32>) -> bool {
    group.is_none_or(|group| group == 0)
}

/// Engines before the adapter's name told a number only, which no request names.
fn adapter_of(event: &BlockStored) -> Option<String> {
    event.lora_name.clone().or_else(|| event.lora_id.map(|id| format!("\u{0}number {id}")))
}

/// What decides a block's content beside its tokens; the adapter, which vLLM lists there, is in the seed already.
fn beside(event: &BlockStored, place: usize) -> impl Iterator<Item = &str> {
    let keys = event.extra_keys.get(place).into_iter().flatten();
    keys.filter_map(|key| match key {
        ExtraKey::Text(text) if Some(text) == event.lora_name.as_ref() => None,
        ExtraKey::Text(text) => Some(text.as_str()),
        ExtraKey::Other => Some(NO_TEXT),
    })
}
