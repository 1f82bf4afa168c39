//! The nodes of each pool, collected for one look-up of a prompt.

use std::collections::BTreeMap;

use crate::schedule::NODES_A_TABLE;

/// Nodes by the slot of their pool.
#[derive(Debug, Default)]
pub(super) struct PoolNodes(BTreeMap<usize, Pool>);

#[derive(Debug)]
struct Pool {
    /// Tokens of a block. None if the nodes differ, or if one publishes no events, because it may hold more blocks than the
    /// others report.
    block_size: Option<u32>,
    /// Numbers of index tables, each with a bit set of its 64 nodes.
    tables: Vec<(usize, u64)>,
}

impl PoolNodes {
    /// Adds a node of this pool, with the size of its blocks if its events report all of them.
    pub(super) fn add(&mut self, pool: usize, slot: usize, block_size: Option<u32>) {
        let pool = self.0.entry(pool).or_insert_with(|| Pool { block_size, tables: Vec::new() });
        if pool.block_size != block_size {
            pool.block_size = None;
        }
        let (table, bit) = (slot / NODES_A_TABLE, 1 << (slot % NODES_A_TABLE));
        match pool.tables.iter_mut().find(|(number, _)| *number == table) {
            Some((_, bits)) => *bits |= bit,
            None => pool.tables.push((table, bit)),
        }
    }

    /// The pools whose nodes all publish events: slot, size of blocks, nodes.
    pub(super) fn reported(&self) -> impl Iterator<Item = (usize, u32, &[(usize, u64)])> {
        self.0.iter().filter_map(|(slot, pool)| Some((*slot, pool.block_size?, &*pool.tables)))
    }
}
