//! A key in 64 bits, by SipHash with a secret seed.
//!
//! The index keeps no more of a key. Two keys of one fingerprint share their entries, and then a reader asks an owner for
//! a block that it does not have: a miss, never wrong bytes. Such keys cannot be chosen without the seed.

use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use kvlane_block::{BlockHash, Space};

/// Makes the fingerprints of one index.
pub(crate) struct Fingerprints {
    seeded: DefaultHasher,
}

/// Shows nothing, because the seed is secret.
impl fmt::Debug for Fingerprints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fingerprints").finish_non_exhaustive()
    }
}

impl Fingerprints {
    pub(crate) fn new(seed: [u64; 2]) -> Self {
        let mut seeded = DefaultHasher::new();
        seed.iter().for_each(|half| seeded.write_u64(*half));
        Self { seeded }
    }

    /// A number that tells nothing about the seed.
    pub(crate) fn public_number(&self) -> u64 {
        self.seeded.finish()
    }

    /// Makes the fingerprints of one space.
    pub(crate) fn of_space(&self, space: &Space) -> SpaceFingerprints {
        let mut seeded = self.seeded.clone();
        seeded.write(space.namespace.as_bytes());
        seeded.write(space.cut.as_bytes());
        SpaceFingerprints { seeded }
    }
}

/// Makes the fingerprints of one space's keys.
pub(crate) struct SpaceFingerprints {
    seeded: DefaultHasher,
}

impl SpaceFingerprints {
    /// Writes the fingerprint of each hash to `out`, which is as long as `hashes`.
    pub(crate) fn fill(&self, hashes: &[BlockHash], out: &mut [u64]) {
        for (hash, out) in hashes.iter().zip(out) {
            let mut hasher = self.seeded.clone();
            hasher.write(hash.as_bytes());
            *out = hasher.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::{CutDigest, Namespace};

    use super::*;

    fn fingerprint(seed: [u64; 2], namespace: u8, cut: u8, hash: u8) -> u64 {
        let space = Space { namespace: Namespace([namespace; 16]), cut: CutDigest([cut; 16]) };
        let mut out = [0];
        Fingerprints::new(seed).of_space(&space).fill(&[BlockHash([hash; 16])], &mut out);
        out[0]
    }

    #[test]
    fn seed_and_each_part_of_the_key_count() {
        let one = fingerprint([1, 2], 3, 4, 5);
        assert_eq!(one, fingerprint([1, 2], 3, 4, 5));
        let others = [
            fingerprint([9, 2], 3, 4, 5),
            fingerprint([1, 9], 3, 4, 5),
            fingerprint([1, 2], 9, 4, 5),
            fingerprint([1, 2], 3, 9, 5),
            fingerprint([1, 2], 3, 4, 9),
        ];
        assert!(others.iter().all(|other| *other != one));
    }

    #[test]
    fn a_log_line_does_not_tell_the_seed() {
        assert_eq!(format!("{:?}", Fingerprints::new([1, 2])), "Fingerprints { .. }");
    }
}
