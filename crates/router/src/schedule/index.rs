//! The index of prefixes: which nodes have which prompts, by the [marks](crate::body::marks) of the prompts that they got.
//!
//! A table of fixed size, so that its memory is known from the start. A mark's hash selects a set of five entries. If all five
//! are taken, a new mark evicts the least recently used one. A set is one cache line, so a mark takes 12.8 bytes:
//!
//! ```text
//!   set = low half of the hash, scaled:   | prints: high halves of 5 hashes | order of use | nodes: a bit each, 5 times |
//!                                          5 x 4 bytes                       4 bytes        5 x 8 bytes
//! ```
//!
//! The table cannot tell two marks with the same print and set apart. With a million marks that happens to one in five hundred
//! million, and costs no more than a hit that is guessed wrong. More than 64 nodes take further tables, one for each 64.

use std::hint::black_box;

use crate::body::Mark;

/// Sets that are fetched together. They fit into a processor's L1 cache beside other data.
pub(crate) const FETCHED_AT_ONCE: usize = 64;
/// Entries in a set.
const WAYS: usize = 5;
/// Bits of an entry, one a node.
pub(crate) const NODES_A_TABLE: usize = 64;
/// The order of use of a new set: an entry's number in four bits each, the most recently used one lowest.
const ORDER: u32 = 0x4_3210;

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Set {
    prints: [u32; WAYS],
    order: u32,
    /// Zero: the entry is free.
    nodes: [u64; WAYS],
}

impl Default for Set {
    fn default() -> Self {
        Self { prints: [0; WAYS], order: ORDER, nodes: [0; WAYS] }
    }
}

impl Set {
    /// Branch-free, because all entries are in one cache line and are read anyway.
    fn nodes_of(&self, print: u32) -> u64 {
        let each = self.prints.iter().zip(&self.nodes);
        each.fold(0, |all, (&of, &nodes)| all | if of == print { nodes } else { 0 })
    }

    fn way_of(&self, print: u32) -> Option<usize> {
        (0..WAYS).find(|&way| self.nodes[way] != 0 && self.prints[way] == print)
    }

    /// A free entry, or the least recently used one.
    fn way_for_new(&self) -> usize {
        let oldest = (self.order >> (4 * (WAYS - 1))) as usize;
        (0..WAYS).find(|&way| self.nodes[way] == 0).unwrap_or(oldest)
    }

    /// Makes an entry the most recently used one.
    fn touch(&mut self, way: usize) {
        let is_there = |rank: &u32| (self.order >> (4 * rank)) & 0xf == way as u32;
        let rank = (0..WAYS as u32).find(is_there).unwrap_or(0);
        let below = (1 << (4 * rank)) - 1;
        let above = !(below << 4 | 0xf);
        self.order = self.order & above | (self.order & below) << 4 | way as u32;
    }
}

#[derive(Debug)]
struct Table {
    sets: Box<[Set]>,
}

/// Prefixes by node. Nodes are numbered from 0: the scheduler's slots.
#[derive(Debug)]
pub struct Index {
    tables: Vec<Table>,
    sets: usize,
}

impl Index {
    /// Room for about `marks_max` marks, for each 64 nodes. A table is allocated with its first mark.
    pub fn new(marks_max: usize) -> Self {
        Self { tables: Vec::new(), sets: (marks_max / WAYS).clamp(1, u32::MAX as usize) }
    }

    /// Memory of all tables.
    pub fn bytes(&self) -> usize {
        self.tables.len() * self.sets * size_of::<Set>()
    }

    /// Number of marks. Slow: walks over all tables.
    pub fn marks(&self) -> usize {
        let nodes = self.tables.iter().flat_map(|table| &table.sets).flat_map(|set| &set.nodes);
        nodes.filter(|nodes| **nodes != 0).count()
    }

    /// Sets `matched[node]` to the leading bytes of the prompt that a node has. `marks` are those of one prompt, in order.
    pub fn matched(&self, marks: &[Mark], matched: &mut Vec<u32>) {
        matched.clear();
        matched.resize(self.tables.len() * NODES_A_TABLE, 0);
        for (table, matched) in self.tables.iter().zip(matched.chunks_mut(NODES_A_TABLE)) {
            table.matched(marks, matched);
        }
    }

    /// Records that the node has this prompt.
    pub fn insert(&mut self, marks: &[Mark], node: usize) {
        for part in marks.rchunks(FETCHED_AT_ONCE) {
            self.fetch(part.iter().map(|mark| mark.hash), node);
            // Backwards, so that a prefix is used more recently than its continuation, because more prompts share it.
            for mark in part.iter().rev() {
                self.insert_one(mark.hash, node);
            }
        }
    }

    /// Prefetches the sets of these hashes. Each lies elsewhere in memory, and the processor fetches many at once if no other
    /// work comes between. Inserts afterwards take half the time.
    pub(crate) fn fetch(&self, hashes: impl Iterator<Item = u64>, node: usize) {
        if let Some(table) = self.tables.get(node / NODES_A_TABLE) {
            black_box(hashes.fold(0, |all, hash| all ^ table.sets[table.set_of(hash)].order));
        }
    }

    /// Records that the node has the prefix with this hash.
    pub fn insert_one(&mut self, hash: u64, node: usize) {
        while self.tables.len() * NODES_A_TABLE <= node {
            self.tables.push(Table { sets: vec![Set::default(); self.sets].into_boxed_slice() });
        }
        self.tables[node / NODES_A_TABLE].insert(hash, 1 << (node % NODES_A_TABLE));
    }

    /// Records that the node no longer has the prefix with this hash.
    pub fn remove_one(&mut self, hash: u64, node: usize) {
        if let Some(table) = self.tables.get_mut(node / NODES_A_TABLE) {
            table.remove(hash, 1 << (node % NODES_A_TABLE));
        }
    }

    /// The nodes of a table that have the prefix with this hash: bit `i` is node `64 * table + i`.
    pub fn nodes_of(&self, hash: u64, table: usize) -> u64 {
        self.tables.get(table).map_or(0, |table| table.nodes_of(hash))
    }

    /// Drops all prefixes of a node. Walks over its whole table.
    pub fn forget(&mut self, node: usize) {
        let Some(table) = self.tables.get_mut(node / NODES_A_TABLE) else { return };
        let others = !(1 << (node % NODES_A_TABLE));
        table.sets.iter_mut().flat_map(|set| &mut set.nodes).for_each(|nodes| *nodes &= others);
    }

    /// Drops all prefixes of all nodes. The memory stays allocated.
    pub fn clear(&mut self) {
        self.tables.iter_mut().for_each(|table| table.sets.fill(Set::default()));
    }
}

impl Table {
    fn set_of(&self, hash: u64) -> usize {
        let scaled = (hash & u64::from(u32::MAX)) * self.sets.len() as u64;
        (scaled >> 32) as usize
    }

    fn nodes_of(&self, hash: u64) -> u64 {
        self.sets[self.set_of(hash)].nodes_of(print_of(hash))
    }

    fn matched(&self, marks: &[Mark], matched: &mut [u32]) {
        let (mut still, mut bytes) = (u64::MAX, 0);
        for mark in marks {
            let gone = still & !self.nodes_of(mark.hash);
            end_at(bytes, gone, matched);
            still &= !gone;
            if still == 0 {
                return;
            }
            bytes = mark.bytes;
        }
        end_at(bytes, still, matched);
    }

    fn insert(&mut self, hash: u64, node: u64) {
        let at = self.set_of(hash);
        let (set, print) = (&mut self.sets[at], print_of(hash));
        let way = set.way_of(print).unwrap_or_else(|| {
            let way = set.way_for_new();
            (set.prints[way], set.nodes[way]) = (print, 0);
            way
        });
        set.nodes[way] |= node;
        set.touch(way);
    }

    fn remove(&mut self, hash: u64, node: u64) {
        let at = self.set_of(hash);
        let set = &mut self.sets[at];
        if let Some(way) = set.way_of(print_of(hash)) {
            set.nodes[way] &= !node;
        }
    }
}

fn print_of(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// Sets the matched bytes of each node in the bit set `nodes`.
fn end_at(bytes: u32, mut nodes: u64, matched: &mut [u32]) {
    if bytes == 0 {
        return;
    }
    while nodes != 0 {
        matched[nodes.trailing_zeros() as usize] = bytes;
        nodes &= nodes - 1;
    }
}
