//! [`BlockNumbers`]: a number for each block, by its first appearance.

use kvlane_policy::KeyMap;

/// Blocks of one generation: as many as fit into a table of 2^22 buckets, 71 MB.
const GENERATION_MAX: usize = (1 << 22) / 8 * 7;

/// Numbers blocks by their keys, in bounded memory: two generations of at most 3.7 million blocks, 143 MB.
///
/// When the young generation is full, the old one is forgotten, and the young one becomes the old one. A block that is seen
/// again moves into the young generation. So a block is forgotten only after at least 3.7 million other blocks came, and no
/// replay of a cache of fewer blocks can miss it.
#[derive(Debug, Default)]
pub struct BlockNumbers {
    young: KeyMap<u64>,
    old: KeyMap<u64>,
    /// The next number.
    next: u64,
    forgotten: u64,
    generation_max: usize,
}

impl BlockNumbers {
    /// Starts at number 0.
    pub fn new() -> Self {
        Self::with_generations_of(GENERATION_MAX)
    }

    fn with_generations_of(generation_max: usize) -> Self {
        Self { generation_max, ..Self::default() }
    }

    /// The block's number: a new one if the block is new, or was forgotten.
    pub fn number(&mut self, key: u64) -> u64 {
        if let Some(number) = self.young.get(&key) {
            return *number;
        }
        let number = self.old.remove(&key).unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        if self.young.len() >= self.generation_max {
            self.forgotten += self.old.len() as u64;
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, number);
        number
    }

    /// Blocks that were forgotten. If one of them comes again, it has a new number.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_keeps_its_number() {
        let mut numbers = BlockNumbers::new();
        assert_eq!([7, 9, 7, 1, 9].map(|key| numbers.number(key)), [0, 1, 0, 2, 1]);
        assert_eq!(numbers.forgotten(), 0);
    }

    #[test]
    fn only_blocks_that_did_not_come_again_are_forgotten() {
        let mut numbers = BlockNumbers::with_generations_of(4);
        for other in 100..120 {
            assert_eq!(numbers.number(1), 0, "it comes again and again");
            numbers.number(other);
        }
        assert!(numbers.forgotten() > 0);
        assert!(numbers.number(100) > 20, "it was forgotten");
        assert!(numbers.young.len() + numbers.old.len() <= 8);
    }
}
