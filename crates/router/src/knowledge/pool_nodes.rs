//! The nodes of each pool, gathered for one look-up of a prompt.

use std::collections::BTreeMap;

use crate::schedule::NODES_A_TABLE;

/// Nodes by the slot of their pool.
#[derive(Debug, Default)]
pub(super) struct PoolNodes(BTreeMap<usize, Nodes>);

#[derive(Debug)]
struct Nodes {
    /// Tokens of a block. None if the nodes differ, or if one publishes no events: it may hold more blocks than the others
    /// report.
    block_size: Option<u32>,
    /// Bit sets of 64 nodes each.
    tables: Vec<(usize, u64)>,
}

impl PoolNodes {
    /// Adds a node of this pool, with the size of its blocks if its events report all of them.
    pub(super) fn add(&mut self, pool: usize, slot: usize, block_size: Option<u32>) {
        let nodes = self.0.entry(pool).or_insert_with(|| Nodes { block_size, tables: Vec::new() });
        if nodes.block_size != block_size {
            nodes.block_size = None;
        }
        let (table, bit) = (slot / NODES_A_TABLE, 1 << (slot % NODES_A_TABLE));
        match nodes.tables.iter_mut().find(|(known, _)| *known == table) {
            Some((_, bits)) => *bits |= bit,
            None => nodes.tables.push((table, bit)),
        }
    }

    /// Pools all of whose nodes publish events: slot, size of blocks, nodes.
    pub(super) fn known(&self) -> impl Iterator<Item = (usize, u32, &[(usize, u64)])> {
        self.0.iter().filter_map(|(pool, nodes)| Some((*pool, nodes.block_size?, &*nodes.tables)))
    }
}
