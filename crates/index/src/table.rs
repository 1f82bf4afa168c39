//! One small hash table of words, open-addressed and in the order of tags.
//!
//! ```text
//!   word:    63                      12 11       0
//!           |           tag            |   slot   |      a word of 0 is an empty place
//!
//!   places:  . [a] . . [c][c][d] . [f] . .               a < c < d < f; two owners have c
//!                       ^ home of c and of d             home(tag) = tag * places / 2^52
//! ```
//! A word stands at its tag's home or behind it, with no empty place between. Homes rise with tags, so a search ends at
//! the first greater tag, and a table is rebuilt in one pass. Nothing wraps round: the last run may grow past the last
//! home, and the end of the vector counts as empty.
//!
//! A table fills at most five ninths of its places, because a change takes 60 ns there, and 95 ns at three quarters. Above
//! that, and below a third, it is rebuilt with two and a half places a word. So a word takes 14.4 to 20 bytes while the
//! table grows, and at most 24 while it shrinks.

use crate::slots::Slot;

/// Bits that a tag takes of a word.
pub(crate) const TAG_BITS: u32 = 64 - Slot::BITS;

const EMPTY: u64 = 0;
/// A table with words has at least this many homes.
const PLACES_MIN: usize = 8;
/// Words in a cache line. Most runs end in the line of their home or in the next.
const LINE: usize = 8;
/// Places behind the last home that are allocated with a table.
const TAIL: usize = 4;

/// Words of a tag and a slot. Several words may have one tag, each with its own slot.
#[derive(Debug, Default)]
pub(crate) struct Table {
    words: Vec<u64>,
    /// Homes of the words. 0 before the first insert.
    places: u32,
    len: u32,
}

impl Table {
    /// Words in the table.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Bytes that the places take.
    pub(crate) fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
    }

    /// Reads the place where a search for the tag begins. Independent reads overlap, so a caller that touches a batch
    /// before it searches waits for memory about once.
    pub(crate) fn touch(&self, tag: u64) -> u64 {
        let home = home(tag, self.places);
        let read = |at: usize| self.words.get(at).copied().unwrap_or(EMPTY);
        read(home) ^ read(home + LINE)
    }

    /// Slots of the words that have this tag.
    pub(crate) fn slots(&self, tag: u64) -> impl Iterator<Item = Slot> {
        let from = self.seek(tag).min(self.words.len());
        self.words[from..]
            .iter()
            .take_while(move |word| has_tag(**word, tag))
            .map(|word| Slot::of_word(*word))
    }

    /// Adds a word. The caller has checked that the table does not have it.
    pub(crate) fn insert(&mut self, tag: u64, slot: Slot) {
        if (self.len as usize + 1) * 9 > self.places as usize * 5 {
            self.rebuild(self.len as usize + 1, |_| true);
        }
        self.len += 1;
        let mut word = tag << Slot::BITS | slot.bits();
        let from = self.seek(tag);
        for place in &mut self.words[from..] {
            word = std::mem::replace(place, word);
            if word == EMPTY {
                return;
            }
        }
        self.words.reserve_exact(TAIL);
        self.words.push(word);
    }

    /// Gives the tag's word in slot `from` to slot `to`. False if there is none.
    pub(crate) fn replace(&mut self, tag: u64, from: Slot, to: Slot) -> bool {
        let Some(at) = self.find(tag, from) else { return false };
        self.words[at] = tag << Slot::BITS | to.bits();
        true
    }

    /// Removes the word. False if there is none.
    pub(crate) fn remove(&mut self, tag: u64, slot: Slot) -> bool {
        let Some(mut hole) = self.find(tag, slot) else { return false };
        while let Some(&next) = self.words.get(hole + 1)
            && next != EMPTY
            && home(next >> Slot::BITS, self.places) <= hole
        {
            self.words[hole] = next;
            hole += 1;
        }
        self.words[hole] = EMPTY;
        self.len -= 1;
        if self.len * 3 < self.places && self.places as usize > PLACES_MIN {
            self.rebuild(self.len as usize, |_| true);
        }
        true
    }

    /// Removes the words whose slot `is_closed`, and adds these slots to `removed`.
    pub(crate) fn sweep(&mut self, is_closed: impl Fn(Slot) -> bool, removed: &mut Vec<Slot>) {
        let slots = self.words.iter().filter(|word| **word != EMPTY).map(|word| Slot::of_word(*word));
        let before = removed.len();
        removed.extend(slots.filter(|slot| is_closed(*slot)));
        let left = self.len() - (removed.len() - before);
        if left < self.len() {
            self.rebuild(left, |slot| !is_closed(slot));
        }
    }

    /// Index of the first word with this tag or a greater one, or of the empty place before it.
    fn seek(&self, tag: u64) -> usize {
        let from = home(tag, self.places);
        let run = self.words.get(from..).unwrap_or_default();
        from + run.iter().take_while(|word| **word != EMPTY && **word >> Slot::BITS < tag).count()
    }

    fn find(&self, tag: u64, slot: Slot) -> Option<usize> {
        let word = tag << Slot::BITS | slot.bits();
        let from = self.seek(tag);
        let group = self.words.get(from..)?.iter().take_while(|other| has_tag(**other, tag));
        group.enumerate().find(|(_, other)| **other == word).map(|(nth, _)| from + nth)
    }

    /// Moves the words that `keep` accepts into two and a half places for each of `words`.
    fn rebuild(&mut self, words: usize, keep: impl Fn(Slot) -> bool) {
        let places = if words == 0 { 0 } else { (words * 5 / 2).max(PLACES_MIN) };
        let mut moved = Vec::with_capacity(if places == 0 { 0 } else { places + TAIL });
        moved.resize(places, EMPTY);
        let (mut next, mut len) = (0, 0);
        for &word in self.words.iter().filter(|word| **word != EMPTY) {
            if !keep(Slot::of_word(word)) {
                continue;
            }
            let at = home(word >> Slot::BITS, places as u32).max(next);
            match moved.get_mut(at) {
                Some(place) => *place = word,
                None => {
                    moved.reserve_exact(TAIL);
                    moved.push(word);
                }
            }
            next = at + 1;
            len += 1;
        }
        *self = Self { words: moved, places: places as u32, len };
    }
}

/// Tags are uniform, so their upper 32 bits spread them over up to 2^32 places.
fn home(tag: u64, places: u32) -> usize {
    (((tag >> (TAG_BITS - 32)) * u64::from(places)) >> 32) as usize
}

fn has_tag(word: u64, tag: u64) -> bool {
    word != EMPTY && word >> Slot::BITS == tag
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u16),
        Remove(u64, u16),
        Replace(u64, u16, u16),
        Sweep(u16),
    }

    /// Tags that crowd at both ends of the table, with many equal ones.
    fn tag() -> impl Strategy<Value = u64> {
        let last = (1u64 << TAG_BITS) - 1;
        prop_oneof![0..20u64, (last - 20)..=last, 0..=last]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (tag(), 1..6u16).prop_map(|(tag, slot)| Step::Insert(tag, slot)),
            6 => (tag(), 1..6u16).prop_map(|(tag, slot)| Step::Remove(tag, slot)),
            2 => (tag(), 1..6u16, 1..6u16).prop_map(|(tag, from, to)| Step::Replace(tag, from, to)),
            1 => (1..6u16).prop_map(Step::Sweep),
        ]
    }

    fn slot(number: u16) -> Slot {
        Slot::of_word(u64::from(number))
    }

    proptest! {
        #[test]
        fn it_holds_what_a_set_of_pairs_holds(steps in prop::collection::vec(step(), 1..400)) {
            let mut table = Table::default();
            let mut set: BTreeSet<(u64, u16)> = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Insert(tag, number) => {
                        if set.insert((tag, number)) {
                            table.insert(tag, slot(number));
                        }
                    }
                    Step::Remove(tag, number) => {
                        prop_assert_eq!(table.remove(tag, slot(number)), set.remove(&(tag, number)));
                    }
                    Step::Replace(tag, from, to) => {
                        if !set.contains(&(tag, to)) {
                            let had = set.remove(&(tag, from));
                            prop_assert_eq!(table.replace(tag, slot(from), slot(to)), had);
                            if had {
                                set.insert((tag, to));
                            }
                        }
                    }
                    Step::Sweep(dead) => {
                        let mut removed = Vec::new();
                        table.sweep(|each| each == slot(dead), &mut removed);
                        let before = set.len();
                        set.retain(|(_, number)| *number != dead);
                        prop_assert_eq!(removed, vec![slot(dead); before - set.len()]);
                    }
                }
                prop_assert_eq!(table.len(), set.len());
                // A run behind the last home takes places of its own.
                prop_assert!(table.bytes() <= (set.len() * 24).max(PLACES_MIN * 8) + 128 + set.len() * 8);
                for &(tag, _) in &set {
                    let mut found: Vec<u64> = table.slots(tag).map(Slot::bits).collect();
                    found.sort_unstable();
                    let held: Vec<u64> =
                        set.range((tag, 0)..=(tag, u16::MAX)).map(|(_, slot)| u64::from(*slot)).collect();
                    prop_assert_eq!(found, held);
                }
            }
        }
    }
}
