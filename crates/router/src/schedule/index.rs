//! Which nodes have which prefixes, by the [marks](crate::body::marks) of the prompts that they were given.
//!
//! A table of fixed size, so that its memory is known from the start. A mark's hash names a set of eight entries; where all
//! eight are taken, the one that was not used for longest goes. An entry takes 16 bytes:
//!
//! ```text
//!   set = low half of the hash, scaled          entry: | print: high half | used: turn | nodes: a bit each |
//!                                                        4 bytes            4 bytes      8 bytes
//! ```
//!
//! Two marks that agree in print and set are one to the table. With a million marks that happens to one mark in five hundred
//! million; it costs a wrong guess of a hit and nothing else. More than 64 nodes take further tables, one for each 64.

use crate::body::Mark;

/// Entries of a set: two cache lines.
const WAYS: usize = 8;
/// Nodes that an entry has bits for.
const NODES_A_TABLE: usize = 64;

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    print: u32,
    /// The table's turn when it was last written.
    used: u32,
    /// Empty if there is none.
    nodes: u64,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Set([Entry; WAYS]);

#[derive(Debug)]
struct Table {
    sets: Box<[Set]>,
    turn: u32,
}

/// Prefixes by node. Nodes are numbered from 0.
#[derive(Debug)]
pub struct Index {
    tables: Vec<Table>,
    sets: usize,
}

impl Index {
    /// Room for about that many marks, for each 64 nodes.
    pub fn new(marks_max: usize) -> Self {
        Self { tables: Vec::new(), sets: marks_max.div_ceil(WAYS).clamp(1, u32::MAX as usize) }
    }

    /// Bytes of memory that it holds.
    pub fn bytes(&self) -> usize {
        self.tables.len() * self.sets * size_of::<Set>()
    }

    /// Marks that are there, counted. Slow.
    pub fn marks(&self) -> usize {
        let entries = self.tables.iter().flat_map(|table| &table.sets).flat_map(|set| &set.0);
        entries.filter(|entry| entry.nodes != 0).count()
    }

    /// Bytes of the prompt, from its beginning, that each node has: `matched[node]`. Marks are those of one prompt in order.
    pub fn matched(&self, marks: &[Mark], matched: &mut Vec<u32>) {
        matched.clear();
        matched.resize(self.tables.len() * NODES_A_TABLE, 0);
        for (table, matched) in self.tables.iter().zip(matched.chunks_mut(NODES_A_TABLE)) {
            table.matched(marks, matched);
        }
    }

    /// The node has this prompt from now on.
    pub fn insert(&mut self, marks: &[Mark], node: usize) {
        while self.tables.len() * NODES_A_TABLE <= node {
            let sets = vec![Set::default(); self.sets].into_boxed_slice();
            self.tables.push(Table { sets, turn: 0 });
        }
        let table = &mut self.tables[node / NODES_A_TABLE];
        table.turn = table.turn.wrapping_add(1);
        for mark in marks {
            table.insert(mark.hash, 1 << (node % NODES_A_TABLE));
        }
    }

    /// The node has nothing any more. Walks over its whole table.
    pub fn forget(&mut self, node: usize) {
        let Some(table) = self.tables.get_mut(node / NODES_A_TABLE) else { return };
        let others = !(1 << (node % NODES_A_TABLE));
        table.sets.iter_mut().flat_map(|set| &mut set.0).for_each(|entry| entry.nodes &= others);
    }
}

impl Table {
    fn set_of(&self, hash: u64) -> usize {
        let scaled = (hash & u64::from(u32::MAX)) * self.sets.len() as u64;
        (scaled >> 32) as usize
    }

    fn nodes_of(&self, hash: u64) -> u64 {
        let print = (hash >> 32) as u32;
        let set = &self.sets[self.set_of(hash)].0;
        // Without a branch for each entry: all eight are looked at anyhow, in two cache lines.
        set.iter().fold(0, |nodes, entry| nodes | if entry.print == print { entry.nodes } else { 0 })
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
        let (set, print, turn) = (self.set_of(hash), (hash >> 32) as u32, self.turn);
        let entries = &mut self.sets[set].0;
        let is_mark = |entry: &Entry| entry.nodes != 0 && entry.print == print;
        let place = entries.iter().position(is_mark).unwrap_or_else(|| {
            // An empty entry counts as the oldest.
            let age = |entry: &Entry| if entry.nodes == 0 { u32::MAX } else { turn.wrapping_sub(entry.used) };
            let oldest = (0..WAYS).max_by_key(|&way| age(&entries[way])).unwrap_or(0);
            entries[oldest] = Entry { print, used: turn, nodes: 0 };
            oldest
        });
        entries[place].used = turn;
        entries[place].nodes |= node;
    }
}

/// Notes for each node of the set how far its prefix went.
fn end_at(bytes: u32, mut nodes: u64, matched: &mut [u32]) {
    if bytes == 0 {
        return;
    }
    while nodes != 0 {
        matched[nodes.trailing_zeros() as usize] = bytes;
        nodes &= nodes - 1;
    }
}
