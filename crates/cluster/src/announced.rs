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
