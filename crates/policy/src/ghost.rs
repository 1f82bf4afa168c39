//! [`Ghost`]: keys of evicted blocks, so that a policy recognises a block that comes back.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// A map by keys, which are uniform already and need no hashing.
pub type KeyMap<V> = HashMap<u64, V, BuildHasherDefault<KeyHasher>>;

/// Bytes of a map on the heap: each bucket has a control byte, and at most 7 of 8 buckets are used.
pub(crate) fn map_bytes<V>(map: &KeyMap<V>) -> usize {
    map.capacity() * 8 / 7 * (size_of::<(u64, V)>() + 1)
}

/// A hasher that passes a u64 through.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// A FIFO of keys. The owner bounds it with [`Ghost::trim`].
#[derive(Default)]
pub(crate) struct Ghost {
    /// Each key with its number. An entry is stale if `current` has another number for the key, or none.
    order: VecDeque<(u64, u32)>,
    current: KeyMap<u32>,
    next: u32,
}

impl Ghost {
    pub(crate) fn len(&self) -> usize {
        self.current.len()
    }

    pub(crate) fn contains(&self, key: u64) -> bool {
        self.current.contains_key(&key)
    }

    pub(crate) fn push(&mut self, key: u64) {
        self.order.push_back((key, self.next));
        self.current.insert(key, self.next);
        self.next = self.next.wrapping_add(1);
    }

    /// Returns false if the key was not there.
    pub(crate) fn remove(&mut self, key: u64) -> bool {
        self.current.remove(&key).is_some()
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<u64> {
        while let Some((key, number)) = self.order.pop_front() {
            if self.current.get(&key) == Some(&number) {
                self.current.remove(&key);
                return Some(key);
            }
        }
        None
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.order.capacity() * size_of::<(u64, u32)>() + map_bytes(&self.current)
    }

    /// Keeps the newest `limit` keys, and drops stale entries so that memory stays in proportion to them.
    pub(crate) fn trim(&mut self, limit: usize) {
        while self.len() > limit && self.pop_oldest().is_some() {}
        if self.order.len() > 2 * self.len() + 64 {
            let current = &self.current;
            self.order.retain(|(key, number)| current.get(key) == Some(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_memory_stays_in_proportion() {
        let mut ghost = Ghost::default();
        for key in 0..10 {
            ghost.push(key);
        }
        assert!(ghost.remove(3) && !ghost.remove(3));
        ghost.push(0);
        ghost.trim(5);
        // 0 came back last; 3 was taken out.
        assert_eq!((0..10).filter(|&key| ghost.contains(key)).collect::<Vec<_>>(), [0, 6, 7, 8, 9]);
        for key in 10..10_000 {
            ghost.push(key);
            ghost.remove(key);
            ghost.trim(5);
        }
        assert!(ghost.order.len() < 100 && ghost.len() == 5, "{} for {}", ghost.order.len(), ghost.len());
    }
}
