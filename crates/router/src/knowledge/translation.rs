//! From an engine's hash of a block to ours.
//!
//! What a hash names never changes, so no entry is ever wrong, and none has to be taken out: where a set is full, the one
//! that was put in first goes. Engines that hash alike share entries. A set of six is a cache line, 10.7 bytes an entry:
//!
//! ```text
//!   set = low half of a hash of the engine's:    | our hashes, 6 x 8 bytes | tags, 6 x 2 bytes | next to go |
//! ```
//! A hash that is not there is taken for another one in one of ten thousand cases: a guess of a hit is wrong then.

use std::hint::black_box;

use kvlane_kv_events::ExternalHash;
use xxhash_rust::xxh3::xxh3_64;

const WAYS: usize = 6;
/// Bytes of a hash that count. kvlane cuts vLLM's to these, so that both name the same block.
const BYTES: usize = 16;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Set {
    ours: [u64; WAYS],
    /// Zero where there is nothing.
    tags: [u16; WAYS],
    next: u8,
}

/// A table of fixed size.
#[derive(Debug)]
pub(super) struct Translation {
    sets: Box<[Set]>,
    most: usize,
}

impl Translation {
    /// Room for about that many; memory is taken with the first.
    pub(super) fn new(entries_max: usize) -> Self {
        Self { sets: Box::default(), most: (entries_max / WAYS).clamp(1, u32::MAX as usize) }
    }

    /// Bytes of memory that it holds.
    pub(super) fn bytes(&self) -> usize {
        self.sets.len() * size_of::<Set>()
    }

    /// Our hash of what the engine names so.
    pub(super) fn get(&self, engines: &ExternalHash) -> Option<u64> {
        let (place, tag) = self.place_of(engines);
        let set = self.sets.get(place)?;
        set.tags.iter().position(|&each| each == tag).map(|way| set.ours[way])
    }

    /// The engine's hash names the same as ours.
    pub(super) fn put(&mut self, engines: &ExternalHash, ours: u64) {
        if self.sets.is_empty() {
            self.sets = vec![Set::default(); self.most].into_boxed_slice();
        }
        let (place, tag) = self.place_of(engines);
        let set = &mut self.sets[place];
        let way = set.tags.iter().position(|&each| each == tag).unwrap_or_else(|| {
            let way = usize::from(set.next);
            set.next = ((way + 1) % WAYS) as u8;
            way
        });
        (set.tags[way], set.ours[way]) = (tag, ours);
    }

    /// Reads the sets of these hashes, as [`Index::fetch`](crate::schedule::Index) does.
    pub(super) fn fetch<'h>(&self, engines: impl Iterator<Item = &'h ExternalHash>) {
        let next = |engines| self.sets.get(self.place_of(engines).0).map_or(0, |set| set.next);
        black_box(engines.fold(0, |all, engines| all ^ next(engines)));
    }

    fn place_of(&self, engines: &ExternalHash) -> (usize, u16) {
        let hash = match engines {
            ExternalHash::Number(number) => xxh3_64(&number.to_le_bytes()),
            ExternalHash::Short(short) => xxh3_64(short),
            ExternalHash::Long(long) => xxh3_64(&long[..BYTES]),
        };
        let place = ((hash & u64::from(u32::MAX)) * self.sets.len() as u64) >> 32;
        (place as usize, ((hash >> 48) as u16).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_answers_what_was_put_in_and_stays_small() {
        let mut table = Translation::new(6_000);
        assert_eq!((table.get(&ExternalHash::Number(1)), table.bytes()), (None, 0));
        for number in 0..600 {
            table.put(&ExternalHash::Number(number), number * 7);
        }
        for number in 0..600 {
            assert_eq!(table.get(&ExternalHash::Number(number)), Some(number * 7));
        }
        for number in 0..100_000 {
            table.put(&ExternalHash::Number(number), number * 7);
        }
        assert_eq!(table.bytes(), 64_000);
        assert_eq!(table.get(&ExternalHash::Number(99_999)), Some(99_999 * 7));
    }

    /// The connector of kvlane publishes the first 16 bytes of what vLLM publishes.
    #[test]
    fn a_hash_and_its_first_half_are_one() {
        let mut table = Translation::new(64);
        let mut long = [3; 32];
        long[20] = 4;
        table.put(&ExternalHash::Long(long), 5);
        assert_eq!(table.get(&ExternalHash::Short([3; 16])), Some(5));
        assert_eq!(table.get(&ExternalHash::Short([4; 16])), None);
    }
}
