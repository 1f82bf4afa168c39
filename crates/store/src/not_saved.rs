//! Saves that failed within the last seconds. A lookup that begins to await such a block learns at once that it will not
//! come. Pure.
//!
//! ```text
//!   a shard's save is refused, aborted or cancelled --> noted --> forgotten: the shard is claimed after all, or after 5 s
//! ```
//! Notes are by shard, because each shard is saved by a worker of its own, at its own time. If another worker claims its
//! shard afterwards, this one is still missing.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::api::{OwnerId, ShardNumber};
use crate::entries::fingerprint;
use crate::watch::Key;

/// How long a note counts.
///
/// Long enough for the lookup: it begins when the saving engine has answered, some milliseconds after its last save began,
/// and may then wait in a queue. Not longer, because an engine that gets the same prompt again may save it this time. A
/// lookup after that answer and before the new claim is told wrongly that the block will not come. The cost is one prompt
/// computed again, and only if room has come within these seconds.
const KEPT: Duration = Duration::from_secs(5);
/// Most notes, some 70 bytes each; a shard that was noted twice has two. When the table grows, all of them are visited
/// under the store's lock.
const MOST: usize = 1 << 15;
/// Most expired notes that one call forgets.
const EXPIRED_A_CALL: usize = 1024;

struct Note {
    key: Key,
    owner: OwnerId,
    shard: ShardNumber,
    at: Instant,
}

/// The notes of failed saves, `most` at most: beyond that the oldest are forgotten.
pub(crate) struct NotSaved {
    most: usize,
    /// In order of time. Note number `n` lies at index `n - first`.
    notes: VecDeque<Note>,
    /// Number of the oldest note. Numbers are consecutive.
    first: u64,
    /// For each block, engine and shard the number of its latest note. A note that is not in here was superseded, or its
    /// shard was claimed after all.
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

    /// `owner` has requested to save this shard of a block, and does not. The store's own fetches are not noted, because no
    /// lookup awaits a save of theirs.
    pub(crate) fn note(&mut self, key: Key, owner: OwnerId, shard: ShardNumber, now: Instant) {
        if owner == OwnerId::FETCHER {
            return;
        }
        if self.notes.len() == self.most {
            self.forget_first();
        }
        let number = self.first + self.notes.len() as u64;
        self.notes.push_back(Note { key, owner, shard, at: now });
        let note = |number: &u64| &self.notes[(number - self.first) as usize];
        let is_it = |number: &u64| note(number).is(key, owner, shard);
        let rehash = |number: &u64| note(number).hash();
        match self.counts.entry(hash(key, owner, shard), is_it, rehash) {
            Entry::Occupied(mut former) => *former.get_mut() = number,
            Entry::Vacant(vacant) => drop(vacant.insert(number)),
        }
    }

    /// `owner` has claimed that shard after all.
    pub(crate) fn forget(&mut self, key: Key, owner: OwnerId, shard: ShardNumber) {
        if self.counts.is_empty() {
            return;
        }
        let is_it = |number: &u64| self.notes[(number - self.first) as usize].is(key, owner, shard);
        if let Ok(found) = self.counts.find_entry(hash(key, owner, shard), is_it) {
            found.remove();
        }
    }

    /// Whether a save of any of the block's `shards` by `owner` failed within [`KEPT`].
    pub(crate) fn has(&self, key: Key, owner: OwnerId, shards: usize, now: Instant) -> bool {
        if self.counts.is_empty() {
            return false;
        }
        let note = |number: &u64| &self.notes[(number - self.first) as usize];
        ShardNumber::all(shards).any(|shard| {
            let found =
                self.counts.find(hash(key, owner, shard), |number| note(number).is(key, owner, shard));
            found.is_some_and(|number| note(number).is_fresh(now))
        })
    }

    /// Forgets notes older than [`KEPT`], at most [`EXPIRED_A_CALL`] of them.
    pub(crate) fn expire(&mut self, now: Instant) {
        for _ in 0..EXPIRED_A_CALL {
            if self.notes.front().is_none_or(|note| note.is_fresh(now)) {
                return;
            }
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let Some(note) = self.notes.pop_front() else { return };
        if let Ok(found) = self.counts.find_entry(note.hash(), |number| *number == self.first) {
            found.remove();
        }
        self.first += 1;
    }
}

impl Note {
    fn is(&self, key: Key, owner: OwnerId, shard: ShardNumber) -> bool {
        self.key == key && self.owner == owner && self.shard == shard
    }

    fn hash(&self) -> u64 {
        hash(self.key, self.owner, self.shard)
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) <= KEPT
    }
}

fn hash((space, block): Key, owner: OwnerId, shard: ShardNumber) -> u64 {
    let saver = owner.0.rotate_left(32) ^ u64::from(shard.0);
    fingerprint(space, &block).wrapping_add(saver.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvlane_block::BlockHash;
    use proptest::prelude::*;

    use super::*;
    use crate::api::SpaceId;

    const P: OwnerId = OwnerId(1);
    const X: OwnerId = OwnerId(2);
    /// An engine whose notes only fill the table.
    const OTHER: OwnerId = OwnerId(3);

    fn key(block: u32) -> Key {
        (SpaceId(block % 2), BlockHash(u128::from(block / 2).to_le_bytes()))
    }

    fn add_others(of: &mut NotSaved, count: u32, now: Instant) {
        (0..count).for_each(|block| of.note(key(block), OTHER, ShardNumber(block % 3), now));
    }

    #[test]
    fn it_is_known_of_that_engine_for_a_while() {
        let (mut all, start) = (NotSaved::default(), Instant::now());
        all.note(key(1), P, ShardNumber(1), start);
        assert!(all.has(key(1), P, 2, start) && all.has(key(1), P, 2, start + KEPT));
        assert!(!all.has(key(1), P, 2, start + KEPT + Duration::from_nanos(1)));
        assert!(!all.has(key(0), P, 2, start) && !all.has(key(1), X, 2, start));
        // A second note counts from its own time.
        all.note(key(1), P, ShardNumber(1), start + KEPT);
        assert!(all.has(key(1), P, 2, start + 2 * KEPT));
        all.forget(key(1), X, ShardNumber(1));
        all.forget(key(1), P, ShardNumber(0));
        assert!(all.has(key(1), P, 2, start + KEPT), "another engine, and another shard");
        all.forget(key(1), P, ShardNumber(1));
        assert!(!all.has(key(1), P, 2, start + KEPT));
    }

    #[test]
    fn what_is_fetched_is_not_noted() {
        let (mut all, start) = (NotSaved::default(), Instant::now());
        all.note(key(1), OwnerId::FETCHER, ShardNumber(0), start);
        assert!(!all.has(key(1), OwnerId::FETCHER, 1, start) && all.notes.is_empty());
    }

    #[test]
    fn a_note_takes_some_70_bytes() {
        let (mut all, start) = (NotSaved::default(), Instant::now());
        add_others(&mut all, 3 * MOST as u32, start);
        let bytes = all.notes.capacity() * size_of::<Note>() + all.counts.allocation_size();
        assert!(all.notes.len() == MOST && bytes <= 70 * MOST, "{bytes} bytes");
    }

    #[test]
    fn the_oldest_leave_first_and_nothing_is_left_of_what_is_too_old() {
        const MOST: u32 = 3000;
        let (mut all, start) = (NotSaved::new(MOST as usize), Instant::now());
        all.note(key(1), P, ShardNumber(0), start);
        all.note(key(2), P, ShardNumber(0), start);
        add_others(&mut all, MOST - 2, start);
        assert!(all.has(key(1), P, 1, start) && all.has(key(2), P, 1, start));
        add_others(&mut all, 1, start);
        assert!(!all.has(key(1), P, 1, start) && all.has(key(2), P, 1, start));
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

    /// Most notes in the model test.
    const FEW: u32 = 16;

    #[derive(Clone, Debug)]
    enum Op {
        Note(u32, OwnerId, u32),
        Forget(u32, OwnerId, u32),
        Others(u32),
        Pass(u64),
        Expire,
    }

    fn op() -> impl Strategy<Value = Op> {
        let owner = prop_oneof![Just(P), Just(X)];
        prop_oneof![
            6 => (0..4u32, owner.clone(), 0..2u32).prop_map(|(block, owner, shard)| Op::Note(block, owner, shard)),
            2 => (0..4u32, owner, 0..2u32).prop_map(|(block, owner, shard)| Op::Forget(block, owner, shard)),
            1 => (1..FEW).prop_map(Op::Others),
            3 => (0..3_000u64).prop_map(Op::Pass),
            2 => Just(Op::Expire),
        ]
    }

    proptest! {
        /// The model: the last note of each block, engine and shard, and how many came after it.
        #[test]
        fn it_is_what_was_noted_last_unless_forgotten_too_old_or_pushed_out(ops in prop::collection::vec(op(), 1..80)) {
            let (mut all, mut now) = (NotSaved::new(FEW as usize), Instant::now());
            let mut model: HashMap<(u32, OwnerId, u32), (Instant, u32)> = HashMap::new();
            for op in ops {
                match op {
                    Op::Note(block, owner, shard) => {
                        model.values_mut().for_each(|(_, after)| *after += 1);
                        model.insert((block, owner, shard), (now, 0));
                        all.note(key(block), owner, ShardNumber(shard), now);
                    }
                    Op::Forget(block, owner, shard) => {
                        model.remove(&(block, owner, shard));
                        all.forget(key(block), owner, ShardNumber(shard));
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
                        let is_known = |shard| {
                            let note = model.get(&(block, owner, shard));
                            note.is_some_and(|(at, after)| *after < FEW && now - *at <= KEPT)
                        };
                        prop_assert_eq!(all.has(key(block), owner, 1, now), is_known(0));
                        prop_assert_eq!(all.has(key(block), owner, 2, now), is_known(0) || is_known(1));
                    }
                }
                prop_assert!(all.notes.len() <= FEW as usize && all.counts.len() <= all.notes.len());
            }
        }
    }
}
