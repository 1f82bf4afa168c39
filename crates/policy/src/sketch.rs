//! [`FrequencySketch`]: estimates how often each key was requested lately, in 8 bytes for each block of capacity.

/// Counters in a row for each block of capacity.
const SPREAD: usize = 4;
/// Increments, for each block of capacity, in which every counter is halved once.
const SAMPLE: usize = 10;
const ROWS: usize = 4;

/// A count-min sketch of 4-bit counters that age: within ten increments for each block of capacity, every counter is
/// halved once. Cormode, Muthukrishnan, "An improved data stream summary", 2005. Ageing is after Einziger, Friedman,
/// Manes, "TinyLFU", 2017, but goes one word at a time, so that no single request waits for all of it.
pub(crate) struct FrequencySketch {
    /// 16 counters in a word; the rows follow each other.
    words: Box<[u64]>,
    row_words: usize,
    /// Increments since the last word was aged.
    increments: usize,
    increments_a_word: usize,
    hand: usize,
}

impl FrequencySketch {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            words: vec![0; row_words(capacity) * ROWS].into_boxed_slice(),
            row_words: row_words(capacity),
            increments: 0,
            increments_a_word: increments_a_word(capacity),
            hand: 0,
        }
    }

    /// Grows the sketch for more blocks of capacity, and keeps its counts. It never shrinks.
    pub(crate) fn grow(&mut self, capacity: usize) {
        let wanted = row_words(capacity);
        if wanted > self.row_words {
            // A key's index in a longer row has the index in the shorter row as its low bits, so repeat the row.
            let rows = self.words.chunks_exact(self.row_words);
            self.words = rows.flat_map(|row| row.iter().copied().cycle().take(wanted)).collect();
            self.row_words = wanted;
            self.increments = 0;
            self.increments_a_word = increments_a_word(capacity);
        }
    }

    pub(crate) fn increment(&mut self, key: u64) {
        for row in 0..ROWS {
            let (word, shift) = self.counter(row, key);
            if self.words[word] >> shift & 15 < 15 {
                self.words[word] += 1 << shift;
            }
        }
        self.increments += 1;
        if self.increments == self.increments_a_word {
            self.increments = 0;
            self.words[self.hand] = self.words[self.hand] >> 1 & 0x7777_7777_7777_7777;
            self.hand = (self.hand + 1) % self.words.len();
        }
    }

    /// The estimated count of a key, at most 15. Never less than the increments since the key's counters aged.
    pub(crate) fn estimate(&self, key: u64) -> u32 {
        let count = |row| {
            let (word, shift) = self.counter(row, key);
            (self.words[word] >> shift & 15) as u32
        };
        (0..ROWS).map(count).min().unwrap_or(0)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }

    fn counter(&self, row: usize, key: u64) -> (usize, u32) {
        const SEEDS: [u64; ROWS] =
            [0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0xD6E8_FEB8_6659_FD93];
        let mixed = key.wrapping_mul(SEEDS[row]);
        let mixed = mixed ^ mixed >> 32;
        let word = row * self.row_words + (mixed as usize >> 4 & (self.row_words - 1));
        (word, (mixed & 15) as u32 * 4)
    }
}

fn row_words(capacity: usize) -> usize {
    (capacity.max(64) * SPREAD / 16).next_power_of_two()
}

fn increments_a_word(capacity: usize) -> usize {
    (capacity.max(64) * SAMPLE).div_ceil(row_words(capacity) * ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_stays_when_it_grows() {
        let mut sketch = FrequencySketch::new(100);
        let key = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (1..20).for_each(|n| (0..n % 15).for_each(|_| sketch.increment(key(n))));
        let before: Vec<u32> = (1..20).map(|n| sketch.estimate(key(n))).collect();
        sketch.grow(1000);
        assert_eq!((1..20).map(|n| sketch.estimate(key(n))).collect::<Vec<_>>(), before);
        assert_eq!(sketch.heap_bytes(), FrequencySketch::new(1000).heap_bytes());
        sketch.increment(key(7));
        assert_eq!(sketch.estimate(key(7)), before[6] + 1);
    }

    #[test]
    fn counts_up_to_fifteen_and_forgets() {
        let mut sketch = FrequencySketch::new(1000);
        let key = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for times in [1, 3, 30] {
            (0..times).for_each(|_| sketch.increment(key(times)));
        }
        assert_eq!([1, 3, 30].map(|n| sketch.estimate(key(n))), [1, 3, 15]);
        assert_eq!(sketch.estimate(key(77)), 0);
        // Ten times the capacity of other keys: each counter was halved once, and what others added is small.
        (0..10_240).for_each(|n| sketch.increment(key(1000 + n)));
        assert!((7..15).contains(&sketch.estimate(key(30))), "{}", sketch.estimate(key(30)));
    }
}
