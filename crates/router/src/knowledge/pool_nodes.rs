//! The nodes of each pool, for one look at a prompt.

use std::collections::BTreeMap;

use crate::schedule::NODES_A_TABLE;

/// By the pool's slot.
#[derive(Debug, Default)]
pub(super) struct PoolNodes(BTreeMap<usize, Nodes>);

#[derive(Debug)]
struct Nodes {
    /// Tokens of a block. None if nodes differ, or one of them tells nothing: it may hold more than is told.
    block_size: Option<u32>,
    /// Tables of 64 nodes, with a bit each.
    tables: Vec<(usize, u64)>,
}

impl PoolNodes {
    /// A node of this pool, and the size of its blocks if its events tell of all of them.
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

    /// Pools of which all nodes tell: slot, size of blocks, nodes.
    pub(super) fn known(&self) -> impl Iterator<Item = (usize, u32, &[(usize, u64)])> {
        self.0.iter().filter_map(|(pool, nodes)| Some((*pool, nodes.block_size?, &*nodes.tables)))
    }
}
