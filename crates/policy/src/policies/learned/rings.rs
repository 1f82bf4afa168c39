//! [`Rings`]: the leaves, grouped into cohorts. A cohort holds the leaves of one class that were last requested in one
//! span of time. They count as equally dense, so a search for a victim compares cohorts instead of blocks.
//!
//! Spans grow with their age: at most four of each length stand side by side, and one more merges the two oldest into
//! one of the next length. So 60 rows of cohorts are enough for any time. Merging two spans appends each cohort of one
//! to that of the other without a look at their slots, because a cohort is a circular list that begins and ends in a
//! node of its own.

use super::classes::{CLASSES, Class};

/// Limit of spans; each has a row of cohorts, one for each class.
const ROWS: usize = 60;
/// Number of cohorts.
pub(super) const RINGS: usize = ROWS * CLASSES;
/// Limit of spans of one length. When one more begins, the two oldest of them are merged.
const SIDE_BY_SIDE: usize = 4;
/// Words of a bitmap with a bit for each class.
const WORDS: usize = CLASSES.div_ceil(64);
/// In `Node::older`: the slot is in no cohort.
const OUT: u32 = u32::MAX;

/// A link of a circular list; numbers are indices into `Rings::nodes`.
#[derive(Clone, Copy)]
struct Node {
    older: u32,
    newer: u32,
}

/// A span of time, in references. The length of an old one is about a quarter of its age.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// When the span began; it ends where the next one begins.
    pub(super) start: u64,
    row: u8,
    /// Base-2 logarithm of the number of spans that were merged into this one.
    level: u8,
}

/// The number of a cohort: its row times the number of classes, plus its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ring(pub(super) u16);

impl Ring {
    fn of(span: Span, class: Class) -> Self {
        Self((usize::from(span.row) * CLASSES + class.index()) as u16)
    }

    fn node(self) -> u32 {
        self.0.into()
    }

    fn row(self) -> usize {
        usize::from(self.0) / CLASSES
    }

    pub(super) fn class(self) -> Class {
        Class::from_index(usize::from(self.0) % CLASSES)
    }
}

/// All cohorts. Each is a circular list with a node of its own, so a slot leaves without knowing its cohort, and two
/// cohorts are merged without a look at their slots.
pub(super) struct Rings {
    /// The cohorts' own nodes, then those of the slots.
    nodes: Vec<Node>,
    /// Oldest first.
    spans: Vec<Span>,
    free_rows: Vec<u8>,
    /// When the span of each row began.
    starts: [u64; ROWS],
    /// For each row a bit for each class whose cohort may have slots. Never clear for a cohort that has some.
    marked: [[u64; WORDS]; ROWS],
}

impl Rings {
    pub(super) fn new() -> Self {
        let nodes = (0..RINGS as u32).map(|node| Node { older: node, newer: node }).collect();
        let mut rings = Self {
            nodes,
            spans: Vec::with_capacity(ROWS),
            free_rows: (0..ROWS as u8).rev().collect(),
            starts: [0; ROWS],
            marked: [[0; WORDS]; ROWS],
        };
        rings.begin_span(0);
        rings
    }

    pub(super) fn newest(&self) -> Span {
        self.spans[self.spans.len() - 1]
    }

    /// The span that contains a time. A time before the first span belongs to the first.
    pub(super) fn span_at(&self, time: u64) -> Span {
        let newest = self.newest();
        if newest.start <= time {
            return newest;
        }
        let next = self.spans.partition_point(|span| span.start <= time);
        self.spans[next.saturating_sub(1)]
    }

    /// Begins a new span, and merges older ones so that there is a row for it.
    pub(super) fn begin_span(&mut self, start: u64) {
        let mut end = self.spans.len();
        for level in 0.. {
            let first = self.spans[..end].partition_point(|span| span.level > level);
            if end - first < SIDE_BY_SIDE {
                break;
            }
            self.join(first);
            end = first + 1;
        }
        if self.spans.len() == ROWS {
            self.join(0);
        }
        if let Some(row) = self.free_rows.pop() {
            self.starts[usize::from(row)] = start;
            self.spans.push(Span { start, row, level: 0 });
        }
    }

    /// Merges the span at index `at` with the next one, and their cohorts.
    fn join(&mut self, at: usize) {
        let next = self.spans.remove(at + 1);
        let span = &mut self.spans[at];
        span.level = span.level.saturating_add(1);
        let span = *span;
        for word in 0..WORDS {
            let marks = std::mem::take(&mut self.marked[usize::from(next.row)][word]);
            self.marked[usize::from(span.row)][word] |= marks;
            for class in classes(word, marks) {
                self.append(Ring::of(span, class), Ring::of(next, class));
            }
        }
        self.free_rows.push(next.row);
    }

    fn append(&mut self, to: Ring, from: Ring) {
        let Node { older: newest, newer: oldest } = self.nodes[from.0 as usize];
        if oldest == from.node() {
            return;
        }
        let before = self.nodes[to.0 as usize].older;
        self.nodes[before as usize].newer = oldest;
        self.nodes[oldest as usize].older = before;
        self.nodes[newest as usize].newer = to.node();
        self.nodes[to.0 as usize].older = newest;
        self.nodes[from.0 as usize] = Node { older: from.node(), newer: from.node() };
    }

    pub(super) fn contains(&self, slot: u32) -> bool {
        self.nodes.get(RINGS + slot as usize).is_some_and(|node| node.older != OUT)
    }

    /// Adds `slot`, which is in no cohort, at the new or the old end of a cohort. Returns the cohort if it was not
    /// marked before: the caller then has to rank it.
    pub(super) fn add(&mut self, slot: u32, span: Span, class: Class, as_newest: bool) -> Option<Ring> {
        let ring = Ring::of(span, class);
        let Node { older: newest, newer: oldest } = self.nodes[ring.0 as usize];
        let (older, newer) = if as_newest { (newest, ring.node()) } else { (ring.node(), oldest) };
        self.link(slot, older, newer);
        let (word, mark) = mark(class);
        let word = &mut self.marked[usize::from(span.row)][word];
        let is_new = *word & mark == 0;
        *word |= mark;
        is_new.then_some(ring)
    }

    /// Adds `slot`, which is in no cohort, at the old end of a cohort that is marked.
    pub(super) fn add_as_oldest(&mut self, slot: u32, ring: Ring) {
        let oldest = self.nodes[ring.0 as usize].newer;
        self.link(slot, ring.node(), oldest);
    }

    fn link(&mut self, slot: u32, older: u32, newer: u32) {
        let node = RINGS + slot as usize;
        if self.nodes.len() <= node {
            self.nodes.resize(node + 1, Node { older: OUT, newer: OUT });
        }
        self.nodes[node] = Node { older, newer };
        self.nodes[older as usize].newer = node as u32;
        self.nodes[newer as usize].older = node as u32;
    }

    /// Removes `slot` from its cohort; false if it was in none.
    pub(super) fn remove(&mut self, slot: u32) -> bool {
        if !self.contains(slot) {
            return false;
        }
        let node = RINGS + slot as usize;
        let Node { older, newer } = self.nodes[node];
        self.nodes[older as usize].newer = newer;
        self.nodes[newer as usize].older = older;
        self.nodes[node].older = OUT;
        true
    }

    /// The slots of a cohort, oldest first.
    pub(super) fn slots(&self, ring: Ring) -> impl Iterator<Item = u32> + '_ {
        let next = move |node: u32| {
            let next = self.nodes[node as usize].newer;
            (next != ring.node()).then_some(next)
        };
        std::iter::successors(next(ring.node()), move |&node| next(node)).map(|node| node - RINGS as u32)
    }

    /// Clears the mark of a cohort that is empty.
    pub(super) fn unmark(&mut self, ring: Ring) {
        let (word, mark) = mark(ring.class());
        self.marked[ring.row()][word] &= !mark;
    }

    /// Calls `found` with each cohort that has slots and the start of its span, the oldest span first. Clears the marks
    /// of the empty ones.
    pub(super) fn filled(&mut self, mut found: impl FnMut(Ring, u64)) {
        for at in 0..self.spans.len() {
            let span = self.spans[at];
            for word in 0..WORDS {
                for class in classes(word, self.marked[usize::from(span.row)][word]) {
                    let ring = Ring::of(span, class);
                    if self.nodes[ring.0 as usize].newer == ring.node() {
                        self.unmark(ring);
                    } else {
                        found(ring, span.start);
                    }
                }
            }
        }
    }

    /// Sort key of cohorts of the same rank: the older span comes first.
    pub(super) fn order(&self, ring: Ring) -> (u64, Ring) {
        (self.starts[ring.row()], ring)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.spans.capacity() * size_of::<Span>() + ROWS
    }
}

/// Word and bit of a class in a row's bitmap.
fn mark(class: Class) -> (usize, u64) {
    (class.index() / 64, 1 << (class.index() % 64))
}

/// The classes whose bits are set in word number `word` of a bitmap.
fn classes(word: usize, mut marks: u64) -> impl Iterator<Item = Class> {
    std::iter::from_fn(move || {
        let class = (marks != 0).then(|| Class::from_index(word * 64 + marks.trailing_zeros() as usize));
        marks &= marks.wrapping_sub(1);
        class
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn spans_are_as_long_as_befits_their_age_and_never_too_many() {
        let mut rings = Rings::new();
        let mut most = 0;
        for now in 1..100_000u64 {
            rings.begin_span(now);
            most = most.max(rings.spans.len());
            if now % 1000 == 0 {
                for (span, next) in rings.spans.iter().zip(&rings.spans[1..]) {
                    let (length, age) = (next.start - span.start, now - span.start);
                    assert!(length <= 1 + age / 2, "{length} at {age}");
                }
            }
        }
        assert!(most <= ROWS, "{most}");
        // Time that jumps by itself makes no difference: spans are counted.
        for jump in 0..200 {
            rings.begin_span(1 << 40 | jump << 20);
        }
        assert!(rings.spans.len() <= ROWS && rings.spans.is_sorted_by_key(|span| span.start));
    }

    #[test]
    fn slots_stay_in_order_through_all_joins() {
        let mut rings = Rings::new();
        let classes: Vec<Class> = Class::all().collect();
        let mut asked_at = BTreeMap::new();
        for now in 1..3000u64 {
            rings.begin_span(now);
            let slot = now as u32;
            rings.add(slot, rings.newest(), classes[slot as usize * 7 % CLASSES], true);
            asked_at.insert(slot, now);
            if now % 3 == 0 {
                let gone = (now * 7 % now) as u32;
                assert_eq!(rings.remove(gone), asked_at.remove(&gone).is_some());
            }
        }
        let mut seen = Vec::new();
        let mut all = Vec::new();
        rings.filled(|ring, start| all.push((ring, start)));
        for (ring, start) in all {
            let slots: Vec<u32> = rings.slots(ring).collect();
            assert!(slots.is_sorted() && !slots.is_empty());
            for slot in slots {
                assert_eq!(ring.class(), classes[slot as usize * 7 % CLASSES]);
                assert_eq!(rings.span_at(asked_at[&slot]).start, start);
                seen.push(slot);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, asked_at.into_keys().collect::<Vec<_>>());
    }
}
