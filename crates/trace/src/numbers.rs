//! [`BlockNumbers`]: a number for each block, by its first appearance.

use kvlane_policy::KeyMap;

use crate::runs::{Run, push_run};

/// Blocks of one generation: as many as fit into a table of 2^22 buckets, 71 MB. So many other blocks come before one is
/// forgotten.
pub const GENERATION_MAX: usize = (1 << 22) / 8 * 7;

/// Numbers blocks by their keys, in bounded memory: two generations of at most 3.7 million blocks, 143 MB.
///
/// When a prompt finds the young generation full, the old one is forgotten, and the young one becomes the old one. A block that is
/// seen again moves into the young generation. So a block is forgotten after about 3.7 million other blocks, and replays of
/// caches of fewer blocks hardly miss it.
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

    /// The numbers of a prompt's blocks, as runs. `keys` are in the prompt's order, and each names a block and all before it.
    ///
    /// So a prompt that is known takes a few steps for each run, not for each block: if the last of `n` blocks has the first one's
    /// number plus `n - 1`, the numbers of those between follow each other, because each of them was numbered after the first one
    /// and before the last one.
    pub fn runs(&mut self, keys: &[u64]) -> Vec<Run> {
        // Not in the middle of a prompt: its first blocks would be old and its last ones young.
        if self.young.len() + keys.len() > self.generation_max {
            self.forgotten += self.old.len() as u64;
            self.old = std::mem::take(&mut self.young);
        }
        let mut runs = Vec::new();
        let mut at = 0;
        while let Some(key) = keys.get(at) {
            let is_young = self.young.contains_key(key);
            let first = self.number(*key);
            // Blocks that are new or old are numbered one by one, which moves them to the young ones.
            let count = if is_young { self.young_run(first, &keys[at..]) } else { 1 };
            push_run(&mut runs, Run { first, count: count as u64 });
            at += count;
        }
        runs
    }

    /// The block's number: a new one if the block is new, or was forgotten.
    fn number(&mut self, key: u64) -> u64 {
        if let Some(number) = self.young.get(&key) {
            return *number;
        }
        let number = self.old.remove(&key).unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.young.insert(key, number);
        number
    }

    /// How many of the blocks are young and have numbers that follow each other. The first one is young, with this number.
    fn young_run(&self, first: u64, keys: &[u64]) -> usize {
        let ends_a_run = |count: usize| self.young.get(&keys[count - 1]) == Some(&(first + count as u64 - 1));
        if ends_a_run(keys.len()) {
            return keys.len();
        }
        let (mut fits, mut too_many) = (1, keys.len());
        while too_many - fits > 1 {
            let middle = (fits + too_many) / 2;
            if ends_a_run(middle) {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }

    /// Blocks that were forgotten. If one of them comes again, it has a new number.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvlane_policy::spread;
    use proptest::prelude::*;

    use super::*;
    use crate::runs::ids;

    /// Keys of a path in a tree: each names all steps before it.
    fn path(steps: &[u8]) -> Vec<u64> {
        let chain = steps.iter().scan(0, |before, step| {
            *before = spread(*before ^ spread(u64::from(*step) + 1));
            Some(*before)
        });
        chain.collect()
    }

    proptest! {
        #[test]
        fn runs_have_the_number_of_each_block(
            paths in prop::collection::vec(prop::collection::vec(0..3_u8, 0..24), 1..60),
        ) {
            let mut numbers = BlockNumbers::new();
            let mut model: HashMap<u64, u64> = HashMap::new();
            for keys in paths.iter().map(|steps| path(steps)) {
                let wanted: Vec<u64> = keys
                    .iter()
                    .map(|key| {
                        let next = model.len() as u64;
                        *model.entry(*key).or_insert(next)
                    })
                    .collect();
                let runs = numbers.runs(&keys);
                prop_assert_eq!(ids(&runs).collect::<Vec<_>>(), wanted);
                prop_assert_eq!(&runs, &crate::runs::runs(ids(&runs)), "as few runs as can be");
            }
        }

        #[test]
        fn blocks_that_come_again_are_not_forgotten(
            paths in prop::collection::vec(prop::collection::vec(0..2_u8, 1..6), 1..200),
        ) {
            // Both generations together hold each block of the last 8 prompts.
            let mut numbers = BlockNumbers::with_generations_of(60);
            let mut last: Vec<(u64, u64)> = Vec::new();
            for keys in paths.iter().map(|steps| path(steps)) {
                let found: Vec<u64> = ids(&numbers.runs(&keys)).collect();
                for (key, number) in keys.iter().zip(found) {
                    if let Some((_, before)) = last.iter().rev().take(40).find(|(known, _)| known == key) {
                        prop_assert_eq!(number, *before);
                    }
                    last.push((*key, number));
                }
            }
        }
    }

    fn number(numbers: &mut BlockNumbers, key: u64) -> u64 {
        numbers.runs(&[key])[0].first
    }

    /// A prompt across the border of two generations once had another block's number.
    #[test]
    fn a_generation_does_not_end_within_a_prompt() {
        let mut numbers = BlockNumbers::with_generations_of(8);
        let prompt = path(&[0, 1, 2]);
        for filler in 100..107 {
            number(&mut numbers, filler);
        }
        let first = ids(&numbers.runs(&prompt[..2])).collect::<Vec<_>>();
        for filler in 200..208 {
            number(&mut numbers, filler);
        }
        number(&mut numbers, prompt[0]);
        number(&mut numbers, 300);
        let [once, again] = [(); 2].map(|()| ids(&numbers.runs(&prompt)).collect::<Vec<_>>());
        assert_eq!(once, again);
        assert_eq!(once[0], first[0]);
        let other = number(&mut numbers, 300);
        assert!(!once.contains(&other), "{once:?} has the number of another block");
    }

    #[test]
    fn a_block_keeps_its_number() {
        let mut numbers = BlockNumbers::new();
        assert_eq!([7, 9, 7, 1, 9].map(|key| number(&mut numbers, key)), [0, 1, 0, 2, 1]);
        assert_eq!(numbers.forgotten(), 0);
    }

    #[test]
    fn only_blocks_that_did_not_come_again_are_forgotten() {
        let mut numbers = BlockNumbers::with_generations_of(4);
        for other in 100..120 {
            assert_eq!(number(&mut numbers, 1), 0, "it comes again and again");
            number(&mut numbers, other);
        }
        assert!(numbers.forgotten() > 0);
        assert!(number(&mut numbers, 100) > 20, "it was forgotten");
        assert!(numbers.young.len() + numbers.old.len() <= 8);
    }
}
