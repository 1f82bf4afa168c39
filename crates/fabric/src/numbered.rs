//! [`Numbered`]: a hash map for numbers that this process counts up, with a fast hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map whose keys this process counted up itself, or that are less than [`crate::descriptor::REGIONS_MAX`]. No peer can choose
/// many keys that collide. So the hash need not be secret, as that of the standard library is, and takes one multiplication.
pub(crate) type Numbered<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Multiplies by 2^64 over the golden ratio (Knuth, The Art of Computer Programming, volume 3, 6.4).
#[derive(Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        // The map uses the lowest and the uppermost bits, and the multiplication mixes the upper half best.
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn numbers_in_a_row_fall_apart() {
        let build = BuildHasherDefault::<NumberHasher>::default();
        for step in [1, 2, 64, 4096] {
            let hashes: Vec<u64> = (0..1024u64).map(|number| build.hash_one(number * step)).collect();
            let tags: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
            let places: HashSet<u64> = hashes.iter().map(|hash| hash % 1024).collect();
            // Random hashes would have 647 places.
            assert!(tags.len() > 100 && places.len() > 600, "{step}: {} tags, {}", tags.len(), places.len());
        }
    }
}
