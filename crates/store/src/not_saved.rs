//! Blocks that an engine was to save and that did not come, for those who ask for them soon after. Pure.
//!
//! ```text
//!   its save is refused, aborted, cancelled --> noted --> the engine claims it after all, 5 s are over: forgotten
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::api::OwnerId;
use crate::entries::fingerprint;
use crate::watch::Key;

/// How long it is known of a block. Who asks for what an engine saves does so when that engine has answered, some
/// milliseconds after the last of its saves began; that request may then stand in a queue. The shorter the better: an engine
/// that gets the same prompt again may save it this time, and who asks after its answer and before its claim is told that
/// the block does not come. That is one prompt computed again, and takes room that came within these seconds.
const KEPT: Duration = Duration::from_secs(5);
/// Most that is known, each as often as it was noted: some 60 bytes each.
const MOST: usize = 1 << 16;
/// Of what is too old, how many are forgotten at once.
const EXPIRED_A_CALL: usize = 1024;

struct Note {
    key: Key,
    owner: OwnerId,
    at: Instant,
}

/// What engines did not save of late.
pub(crate) struct NotSaved {
    most: usize,
    /// In the order in which they came.
    notes: VecDeque<Note>,
    /// The number of the first of them; each has the number after the one before it.
    first: u64,
    /// For each block and engine the number of the note that counts. The others were forgotten, or came again later.
    counts: HashTable<u64>,
}

impl Default for NotSaved {
    fn default() -> Self {
        Self::new(MOST)
    }
}

impl NotSaved {
    fn new(most: usize) -> Self {
        Self { most, notes: VecDeque::new(), first: 0, counts: HashTable::new() }
    }

    /// `owner` does not save this block, although it has asked to.
    pub(crate) fn note(&mut self, key: Key, owner: OwnerId, now: Instant) {
        if self.notes.len() == self.most {
            self.forget_first();
        }
        let number = self.first + self.notes.len() as u64;
        self.notes.push_back(Note { key, owner, at: now });
        let note = |number: &u64| &self.notes[(number - self.first) as usize];
        let is_it = |number: &u64| note(number).is(key, owner);
        let rehash = |number: &u64| hash(note(number).key, note(number).owner);
        match self.counts.entry(hash(key, owner), is_it, rehash) {
            Entry::Occupied(mut former) => *former.get_mut() = number,
            Entry::Vacant(place) => drop(place.insert(number)),
        }
    }

    /// `owner` saves it now.
    pub(crate) fn forget(&mut self, key: Key, owner: OwnerId) {
        if self.counts.is_empty() {
            return;
        }
        let is_it = |number: &u64| self.notes[(number - self.first) as usize].is(key, owner);
        if let Ok(found) = self.counts.find_entry(hash(key, owner), is_it) {
            found.remove();
        }
    }

    /// Whether `owner` has tried to save it a short while ago, in vain.
    pub(crate) fn has(&self, key: Key, owner: OwnerId, now: Instant) -> bool {
        if self.counts.is_empty() {
            return false;
        }
        let note = |number: &u64| &self.notes[(number - self.first) as usize];
        let found = self.counts.find(hash(key, owner), |number| note(number).is(key, owner));
        found.is_some_and(|number| note(number).is_fresh(now))
    }

    /// Forgets what is too old, some of it if it is much.
    pub(crate) fn expire(&mut self, now: Instant) {
        for _ in 0..EXPIRED_A_CALL {
            if self.notes.front().is_none_or(|note| note.is_fresh(now)) {
                return;
            }
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let Some(Note { key, owner, .. }) = self.notes.pop_front() else { return };
        if let Ok(found) = self.counts.find_entry(hash(key, owner), |number| *number == self.first) {
            found.remove();
        }
        self.first += 1;
    }
}

impl Note {
    fn is(&self, key: Key, owner: OwnerId) -> bool {
        self.key == key && self.owner == owner
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) <= KEPT
    }
}

fn hash((space, block): Key, owner: OwnerId) -> u64 {
    fingerprint(space, &block).wrapping_add(owner.0.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvlane_block::BlockHash;
    use proptest::prelude::*;

    use super::*;

    const P: OwnerId = OwnerId(1);
    const X: OwnerId = OwnerId(2);
    /// Who asks for what the tests do not look at.
    const OTHER: OwnerId = OwnerId(3);

    fn key(block: u32) -> Key {
        (block % 2, BlockHash(u128::from(block / 2).to_le_bytes()))
    }

    fn add_others(of: &mut NotSaved, count: u32, now: Instant) {
        (0..count).for_each(|block| of.note(key(block), OTHER, now));
    }

    #[test]
    fn it_is_known_of_that_engine_for_a_while() {
        let (mut all, start) = (NotSaved::default(), Instant::now());
        all.note(key(1), P, start);
        assert!(all.has(key(1), P, start) && all.has(key(1), P, start + KEPT));
        assert!(!all.has(key(1), P, start + KEPT + Duration::from_nanos(1)));
        assert!(!all.has(key(0), P, start) && !all.has(key(1), X, start));
        // Once more: from then on.
        all.note(key(1), P, start + KEPT);
        assert!(all.has(key(1), P, start + 2 * KEPT));
        all.forget(key(1), X);
        assert!(all.has(key(1), P, start + KEPT));
        all.forget(key(1), P);
        assert!(!all.has(key(1), P, start + KEPT));
    }

    #[test]
    fn the_oldest_leave_first_and_nothing_is_left_of_what_is_too_old() {
        const MOST: u32 = 3000;
        let (mut all, start) = (NotSaved::new(MOST as usize), Instant::now());
        all.note(key(1), P, start);
        all.note(key(2), P, start);
        add_others(&mut all, MOST - 2, start);
        assert!(all.has(key(1), P, start) && all.has(key(2), P, start));
        add_others(&mut all, 1, start);
        assert!(!all.has(key(1), P, start) && all.has(key(2), P, start));
        for _ in 0..3 {
            add_others(&mut all, MOST, start);
            assert_eq!((all.counts.len(), all.notes.len()), (3000, 3000));
        }
        all.expire(start + KEPT);
        assert_eq!(all.counts.len(), 3000, "that is not too old");
        let late = start + KEPT + Duration::from_nanos(1);
        for left in [3000 - EXPIRED_A_CALL, 3000 - 2 * EXPIRED_A_CALL, 0, 0] {
            all.expire(late);
            assert_eq!((all.counts.len(), all.notes.len()), (left, left));
        }
    }

    /// Most that the model's is to know.
    const FEW: u32 = 16;

    #[derive(Clone, Debug)]
    enum Op {
        Note(u32, OwnerId),
        Forget(u32, OwnerId),
        Others(u32),
        Pass(u64),
        Expire,
    }

    fn op() -> impl Strategy<Value = Op> {
        let owner = prop_oneof![Just(P), Just(X)];
        prop_oneof![
            6 => (0..4u32, owner.clone()).prop_map(|(block, owner)| Op::Note(block, owner)),
            2 => (0..4u32, owner).prop_map(|(block, owner)| Op::Forget(block, owner)),
            1 => (1..FEW).prop_map(Op::Others),
            3 => (0..3_000u64).prop_map(Op::Pass),
            2 => Just(Op::Expire),
        ]
    }

    proptest! {
        /// The model: the last note of each block and engine, and how many came after it.
        #[test]
        fn it_is_what_was_noted_last_unless_forgotten_too_old_or_pushed_out(ops in prop::collection::vec(op(), 1..80)) {
            let (mut all, mut now) = (NotSaved::new(FEW as usize), Instant::now());
            let mut model: HashMap<(u32, OwnerId), (Instant, u32)> = HashMap::new();
            for op in ops {
                match op {
                    Op::Note(block, owner) => {
                        model.values_mut().for_each(|(_, after)| *after += 1);
                        model.insert((block, owner), (now, 0));
                        all.note(key(block), owner, now);
                    }
                    Op::Forget(block, owner) => {
                        model.remove(&(block, owner));
                        all.forget(key(block), owner);
                    }
                    Op::Others(count) => {
                        model.values_mut().for_each(|(_, after)| *after += count);
                        add_others(&mut all, count, now);
                    }
                    Op::Pass(ms) => now += Duration::from_millis(ms),
                    Op::Expire => all.expire(now),
                }
                for block in 0..4 {
                    for owner in [P, X] {
                        let expected = model
                            .get(&(block, owner))
                            .is_some_and(|(at, after)| *after < FEW && now - *at <= KEPT);
                        prop_assert_eq!(all.has(key(block), owner, now), expected);
                    }
                }
                prop_assert!(all.notes.len() <= FEW as usize && all.counts.len() <= all.notes.len());
            }
        }
    }
}
