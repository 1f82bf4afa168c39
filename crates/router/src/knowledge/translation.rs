//! Translates an engine's hash of a block to ours.
//!
//! A hash always names the same block, so no entry ever becomes wrong or has to be removed. A full set drops its oldest entry.
//! Engines that hash alike share entries. A set of six is one cache line, 10.7 bytes an entry:
//!
//! ```text
//!   set = low half of a hash of the engine's:    | our hashes, 6 x 8 bytes | tags, 6 x 2 bytes | next to go |
//! ```
//! In one of ten thousand cases the table takes a missing hash for another one, and the router guesses a hit wrong.

use std::hint::black_box;

use kvlane_kv_events::ExternalHash;
use xxhash_rust::xxh3::xxh3_64;

const WAYS: usize = 6;
/// Leading bytes of a hash that count. kvlane cuts vLLM's hashes to these, so both forms name the same block.
const BYTES: usize = 16;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct TranslationSet {
    ours: [u64; WAYS],
    /// Zero: the entry is free.
    tags: [u16; WAYS],
    /// The entry to overwrite next.
    next: u8,
}

/// A table of fixed size.
#[derive(Debug)]
pub(super) struct Translation {
    /// Empty until the first entry.
    sets: Box<[TranslationSet]>,
    sets_max: usize,
}

impl Translation {
    /// Room for about `entries_max` entries. The first one allocates the memory.
    pub(super) fn new(entries_max: usize) -> Self {
        Self { sets: Box::default(), sets_max: (entries_max / WAYS).clamp(1, u32::MAX as usize) }
    }

    /// Memory of the table.
    pub(super) fn bytes(&self) -> usize {
        self.sets.len() * size_of::<TranslationSet>()
    }

    /// Our hash of the block that the engine names by this hash.
    pub(super) fn get(&self, engines: &ExternalHash) -> Option<u64> {
        let (at, tag) = self.set_of(engines);
        let set = self.sets.get(at)?;
        set.tags.iter().position(|&each| each == tag).map(|way| set.ours[way])
    }

    /// Records that both hashes name the same block.
    pub(super) fn put(&mut self, engines: &ExternalHash, ours: u64) {
        if self.sets.is_empty() {
            self.sets = vec![TranslationSet::default(); self.sets_max].into_boxed_slice();
        }
        let (at, tag) = self.set_of(engines);
        let set = &mut self.sets[at];
        let way = set.tags.iter().position(|&each| each == tag).unwrap_or_else(|| {
            let way = usize::from(set.next);
            set.next = ((way + 1) % WAYS) as u8;
            way
        });
        (set.tags[way], set.ours[way]) = (tag, ours);
    }

    /// Prefetches the sets of these hashes, as [`Index`](crate::schedule::Index) does.
    pub(super) fn fetch<'h>(&self, engines: impl Iterator<Item = &'h ExternalHash>) {
        let next = |engines| self.sets.get(self.set_of(engines).0).map_or(0, |set| set.next);
        black_box(engines.fold(0, |all, engines| all ^ next(engines)));
    }

    /// Number of the set, and the tag in it.
    fn set_of(&self, engines: &ExternalHash) -> (usize, u16) {
        let hash = match engines {
            ExternalHash::Number(number) => xxh3_64(&number.to_le_bytes()),
            ExternalHash::Short(short) => xxh3_64(short),
            ExternalHash::Long(long) => xxh3_64(&long[..BYTES]),
        };
        let at = ((hash & u64::from(u32::MAX)) * self.sets.len() as u64) >> 32;
        (at as usize, ((hash >> 48) as u16).max(1))
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
