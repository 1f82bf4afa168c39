//! [`Cohorts`]: the leaves, grouped into cohorts. A cohort holds the leaves of one class that were last requested in one
//! span of time. They count as equally dense, so a search for a victim compares cohorts instead of blocks.
//!
//! Spans grow with their age. There are at most four of each length; one more merges the two oldest into one of the
//! next length. So 60 rows of cohorts are enough for any time. A cohort is a circular list that begins and ends in a
//! node of its own. So merging two spans appends each cohort of one to that of the other without reading their slots.

use super::classes::{CLASSES, Class};

/// Limit of spans; each has a row of cohorts, one for each class.
const ROWS: usize = 60;
/// Number of cohorts.
pub(super) const COHORTS: usize = ROWS * CLASSES;
/// Limit of spans of one length. When one more begins, the two oldest of them are merged.
const SPANS_OF_A_LENGTH: usize = 4;
/// Words of a bitmap with a bit for each class.
const WORDS: usize = CLASSES.div_ceil(64);
/// In `Node::older`: the slot is in no cohort.
const OUT: u32 = u32::MAX;

/// A link of a circular list; numbers are indices into `Cohorts::nodes`.
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
pub(super) struct Cohort(pub(super) u16);

impl Cohort {
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

/// All cohorts. Each is a circular list with a node of its own, so a slot leaves without knowing its cohort.
pub(super) struct Cohorts {
    /// The cohorts' own nodes, then those of the slots.
    nodes: Vec<Node>,
    /// All spans, oldest first.
    spans: Vec<Span>,
    free_rows: Vec<u8>,
    /// When the span of each row began.
    starts: [u64; ROWS],
    /// For each row a bit for each class whose cohort may have slots. Never clear for a cohort that has some.
    marked: [[u64; WORDS]; ROWS],
}

impl Cohorts {
    pub(super) fn new() -> Self {
        let nodes = (0..COHORTS as u32).map(|node| Node { older: node, newer: node }).collect();
        let mut cohorts = Self {
            nodes,
            spans: Vec::with_capacity(ROWS),
            free_rows: (0..ROWS as u8).rev().collect(),
            starts: [0; ROWS],
            marked: [[0; WORDS]; ROWS],
        };
        cohorts.begin_span(0);
        cohorts
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
            if end - first < SPANS_OF_A_LENGTH {
                break;
            }
            self.merge(first);
            end = first + 1;
        }
        if self.spans.len() == ROWS {
            self.merge(0);
        }
        if let Some(row) = self.free_rows.pop() {
            self.starts[usize::from(row)] = start;
            self.spans.push(Span { start, row, level: 0 });
        }
    }

    /// Merges the span at index `at` with the next one, and their cohorts.
    fn merge(&mut self, at: usize) {
        let next = self.spans.remove(at + 1);
        let span = &mut self.spans[at];
        span.level = span.level.saturating_add(1);
        let span = *span;
        for word in 0..WORDS {
            let marks = std::mem::take(&mut self.marked[usize::from(next.row)][word]);
            self.marked[usize::from(span.row)][word] |= marks;
            for class in classes(word, marks) {
                self.append(Cohort::of(span, class), Cohort::of(next, class));
            }
        }
        self.free_rows.push(next.row);
    }

    fn append(&mut self, to: Cohort, from: Cohort) {
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
        self.nodes.get(COHORTS + slot as usize).is_some_and(|node| node.older != OUT)
    }

    /// Adds `slot`, which is in no cohort, at the new or the old end of a cohort. Returns the cohort if it was not
    /// marked before: the caller then has to rank it.
    pub(super) fn add(&mut self, slot: u32, span: Span, class: Class, as_newest: bool) -> Option<Cohort> {
        let cohort = Cohort::of(span, class);
        let Node { older: newest, newer: oldest } = self.nodes[cohort.0 as usize];
        let (older, newer) = if as_newest { (newest, cohort.node()) } else { (cohort.node(), oldest) };
        self.link(slot, older, newer);
        let (word, mark) = mark(class);
        let word = &mut self.marked[usize::from(span.row)][word];
        let is_new = *word & mark == 0;
        *word |= mark;
        is_new.then_some(cohort)
    }

    /// Adds `slot`, which is in no cohort, at the old end of a cohort that is marked.
    pub(super) fn add_as_oldest(&mut self, slot: u32, cohort: Cohort) {
        let oldest = self.nodes[cohort.0 as usize].newer;
        self.link(slot, cohort.node(), oldest);
    }

    fn link(&mut self, slot: u32, older: u32, newer: u32) {
        let node = COHORTS + slot as usize;
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
        let node = COHORTS + slot as usize;
        let Node { older, newer } = self.nodes[node];
        self.nodes[older as usize].newer = newer;
        self.nodes[newer as usize].older = older;
        self.nodes[node].older = OUT;
        true
    }

    /// The slots of a cohort, oldest first.
    pub(super) fn slots(&self, cohort: Cohort) -> impl Iterator<Item = u32> + '_ {
        let next = move |node: u32| {
            let next = self.nodes[node as usize].newer;
            (next != cohort.node()).then_some(next)
        };
        std::iter::successors(next(cohort.node()), move |&node| next(node)).map(|node| node - COHORTS as u32)
    }

    /// Clears the mark of a cohort that is empty.
    pub(super) fn unmark(&mut self, cohort: Cohort) {
        let (word, mark) = mark(cohort.class());
        self.marked[cohort.row()][word] &= !mark;
    }

    /// Calls `found` with each cohort that has slots and the start of its span, the oldest span first. Clears the marks
    /// of the empty ones.
    pub(super) fn visit_filled(&mut self, mut found: impl FnMut(Cohort, u64)) {
        for at in 0..self.spans.len() {
            let span = self.spans[at];
            for word in 0..WORDS {
                for class in classes(word, self.marked[usize::from(span.row)][word]) {
                    let cohort = Cohort::of(span, class);
                    if self.nodes[cohort.0 as usize].newer == cohort.node() {
                        self.unmark(cohort);
                    } else {
                        found(cohort, span.start);
                    }
                }
            }
        }
    }

    /// Sort key of cohorts of the same rank: the older span comes first.
    pub(super) fn order(&self, cohort: Cohort) -> (u64, Cohort) {
        (self.starts[cohort.row()], cohort)
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
        let mut cohorts = Cohorts::new();
        let mut most = 0;
        for now in 1..100_000u64 {
            cohorts.begin_span(now);
            most = most.max(cohorts.spans.len());
            if now % 1000 == 0 {
                for (span, next) in cohorts.spans.iter().zip(&cohorts.spans[1..]) {
                    let (length, age) = (next.start - span.start, now - span.start);
                    assert!(length <= 1 + age / 2, "{length} at {age}");
                }
            }
        }
        assert!(most <= ROWS, "{most}");
        // Time that jumps by itself makes no difference: spans are counted.
        for jump in 0..200 {
            cohorts.begin_span(1 << 40 | jump << 20);
        }
        assert!(cohorts.spans.len() <= ROWS && cohorts.spans.is_sorted_by_key(|span| span.start));
    }

    #[test]
    fn slots_stay_in_order_through_all_joins() {
        let mut cohorts = Cohorts::new();
        let classes: Vec<Class> = Class::all().collect();
        let mut requested_at = BTreeMap::new();
        for now in 1..3000u64 {
            cohorts.begin_span(now);
            let slot = now as u32;
            cohorts.add(slot, cohorts.newest(), classes[slot as usize * 7 % CLASSES], true);
            requested_at.insert(slot, now);
            if now % 3 == 0 {
                let gone = (now * 7 % now) as u32;
                assert_eq!(cohorts.remove(gone), requested_at.remove(&gone).is_some());
            }
        }
        let mut seen = Vec::new();
        let mut all = Vec::new();
        cohorts.visit_filled(|cohort, start| all.push((cohort, start)));
        for (cohort, start) in all {
            let slots: Vec<u32> = cohorts.slots(cohort).collect();
            assert!(slots.is_sorted() && !slots.is_empty());
            for slot in slots {
                assert_eq!(cohort.class(), classes[slot as usize * 7 % CLASSES]);
                assert_eq!(cohorts.span_at(requested_at[&slot]).start, start);
                seen.push(slot);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, requested_at.into_keys().collect::<Vec<_>>());
    }
}
