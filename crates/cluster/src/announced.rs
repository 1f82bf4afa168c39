//! The digests of this pool's blocks that a replica of the index was told of, and their sum. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use kvlane_block::BlockHash;
use kvlane_index::{Changes as OfSpace, KeySet, SpaceDigests};
use kvlane_store::{Change, Changes, SpaceId};

/// The announced blocks.
#[derive(Default)]
pub(crate) struct Announced {
    digests: HashSet<u64, BuildHasherDefault<Same>>,
    keys: KeySet,
}

impl Announced {
    /// Count and digest of all announced blocks.
    pub(crate) fn keys(&self) -> KeySet {
        self.keys
    }

    /// Applies changes of the store, and returns what to tell: how each block that changed ended up. Blocks of spaces that stay
    /// on this host are left out.
    pub(crate) fn apply(&mut self, changes: &Changes) -> Vec<OfSpace> {
        let crossing = |id: &SpaceId| changes.spaces.get(id).filter(|space| space.crosses_hosts);
        let mut spaces: BTreeMap<SpaceId, (SpaceDigests, HashMap<BlockHash, bool>)> = BTreeMap::new();
        for entry in &changes.entries {
            let Some(description) = crossing(&entry.space) else { continue };
            let (digests, ended_up) = spaces
                .entry(entry.space)
                .or_insert_with(|| (SpaceDigests::new(&description.space), HashMap::new()));
            let is_there = entry.change == Change::Visible;
            if self.note(digests.of(&entry.hash), is_there) {
                ended_up.insert(entry.hash, is_there);
            }
        }
        let told = spaces.into_iter().filter_map(|(id, (_, ended_up))| {
            let (mut announced, mut withdrawn) = (Vec::new(), Vec::new());
            for (hash, is_there) in ended_up {
                if is_there { announced.push(hash) } else { withdrawn.push(hash) }
            }
            let space = crossing(&id)?.space;
            (!announced.is_empty() || !withdrawn.is_empty()).then_some(OfSpace {
                space,
                announced,
                withdrawn,
            })
        });
        told.collect()
    }

    /// True if that changes anything: the store also reports blocks as gone that were never visible.
    fn note(&mut self, digest: u64, is_there: bool) -> bool {
        let is_news = if is_there { self.digests.insert(digest) } else { self.digests.remove(&digest) };
        match (is_news, is_there) {
            (true, true) => self.keys.add_digest(digest),
            (true, false) => self.keys.remove_digest(digest),
            (false, _) => {}
        }
        is_news
    }
}

/// Hashes a digest to itself.
#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // `u64` writes itself by `write_u64`.
        self.0 = bytes.iter().fold(self.0, |all, byte| all << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, digest: u64) {
        self.0 = digest;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::collections::BTreeSet;
    use std::sync::{Arc, LazyLock};

    use kvlane_block::{CutDigest, Namespace, Space};
    use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
    use kvlane_store::{JournalEntry, SpaceDescription, Store, StoreOptions};
    use proptest::prelude::*;

    use super::*;

    fn space(number: u32) -> Space {
        Space { namespace: Namespace([number as u8; 16]), cut: CutDigest([9; 16]) }
    }

    /// Only a store makes these.
    static IDS: LazyLock<[SpaceId; 3]> = LazyLock::new(|| {
        let options =
            ArenaOptions { bytes: PAGE_BYTES, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let store = Store::new(Arc::new(Arena::create(&options, &|_| {}).unwrap()), StoreOptions::default());
        [0, 1, 2].map(|number| {
            let Space { namespace, cut } = space(number);
            store.space(namespace, "a model", cut, &[PAGE_BYTES])
        })
    });

    /// Space 2 stays on its host.
    fn changes(entries: &[(u32, u8, bool)]) -> Changes {
        let entry = |&(space, hash, is_there): &(u32, u8, bool)| JournalEntry {
            change: if is_there { Change::Visible } else { Change::Gone },
            space: IDS[space as usize],
            hash: BlockHash([hash; 16]),
        };
        let description = |number: u32| SpaceDescription {
            space: space(number),
            shard_bytes: vec![1].into(),
            crosses_hosts: number < 2,
        };
        Changes {
            entries: entries.iter().map(entry).collect(),
            spaces: (0..3).map(|number| (IDS[number as usize], description(number))).collect(),
        }
    }

    proptest! {
        #[test]
        fn a_reader_of_what_is_told_has_what_is_visible(
            batches in prop::collection::vec(prop::collection::vec((0..3u32, 0..6u8, any::<bool>()), 0..12), 0..20)
        ) {
            let (mut announced, mut visible, mut read) = (Announced::default(), BTreeSet::new(), BTreeSet::new());
            for batch in batches {
                let told = announced.apply(&changes(&batch));
                let keys: usize = told.iter().map(|of| of.announced.len() + of.withdrawn.len()).sum();
                prop_assert!(keys <= batch.len(), "not more keys than changes");
                for of in told {
                    read.extend(of.announced.iter().map(|hash| (of.space, *hash)));
                    for hash in of.withdrawn {
                        read.remove(&(of.space, hash));
                    }
                }
                for (number, hash, is_there) in batch {
                    let key = (space(number), BlockHash([hash; 16]));
                    if number < 2 && is_there {
                        visible.insert(key);
                    } else {
                        visible.remove(&key);
                    }
                }
                prop_assert_eq!(&read, &visible);
                let mut keys = KeySet::default();
                visible.iter().for_each(|(space, hash)| keys.add(space, hash));
                prop_assert_eq!(announced.keys(), keys);
            }
        }
    }
}
