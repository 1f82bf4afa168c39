//! A set of keys in 16 bytes: how many there are, and a digest that is independent of their order.
//!
//! Owner and index each keep one, and compare them where both have made the same changes. The digest detects lost and
//! doubled changes. It does not withstand an owner that chooses its hashes to deceive; such an owner harms only itself.

use kvlane_block::{BlockHash, Space};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Count and digest of a set of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeySet {
    /// Keys in the set.
    pub count: u64,
    /// Sum, modulo 2^64, of the keys' digests. A key's digest is XXH3-64 of its hash, with XXH3-64 of namespace and cut
    /// as seed.
    pub digest: u64,
}

impl KeySet {
    /// Adds a key that is not in the set.
    pub fn add(&mut self, space: &Space, hash: &BlockHash) {
        self.add_digest(digest(space_seed(space), hash));
    }

    /// Removes a key that is in the set.
    pub fn remove(&mut self, space: &Space, hash: &BlockHash) {
        self.remove_digest(digest(space_seed(space), hash));
    }

    /// Adds a key that is not in the set, by its digest.
    pub fn add_digest(&mut self, digest: u64) {
        self.count = self.count.wrapping_add(1);
        self.digest = self.digest.wrapping_add(digest);
    }

    /// Removes a key that is in the set, by its digest.
    pub fn remove_digest(&mut self, digest: u64) {
        self.count = self.count.wrapping_sub(1);
        self.digest = self.digest.wrapping_sub(digest);
    }
}

/// Makes the digests of one space's keys.
#[derive(Clone, Copy, Debug)]
pub struct SpaceDigests(u64);

impl SpaceDigests {
    /// Makes digests for this space.
    pub fn new(space: &Space) -> Self {
        Self(space_seed(space))
    }

    /// The digest of one key, as in [`KeySet::digest`].
    pub fn of(self, hash: &BlockHash) -> u64 {
        digest(self.0, hash)
    }
}

/// The seed of the digests of a space's keys.
pub(crate) fn space_seed(Space { namespace, cut }: &Space) -> u64 {
    let mut name = [0; 32];
    name[..16].copy_from_slice(namespace.as_bytes());
    name[16..].copy_from_slice(cut.as_bytes());
    xxh3_64(&name)
}

/// The digest of one key.
pub(crate) fn digest(seed: u64, hash: &BlockHash) -> u64 {
    xxh3_64_with_seed(hash.as_bytes(), seed)
}
