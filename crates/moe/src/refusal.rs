//! The word that a rank without room for a dispatch writes in place of a sequence number of combine.
//!
//! ```text
//!  bit 63: 1 | 62 to 32: rows needed | 31 to 0: lower half of the sequence number
//! ```

use std::cmp::Ordering;

const REFUSED: u64 = 1 << 63;

/// The word that refuses dispatch `number`. `needed` has at most 31 bits: no more rows have positions.
pub(crate) fn refusal(number: u64, needed: u32) -> u64 {
    REFUSED | u64::from(needed) << 32 | number & u64::from(u32::MAX)
}

/// The rows needed, if a word refuses its dispatch.
pub(crate) fn needed(word: u64) -> Option<u32> {
    (word & REFUSED != 0).then_some((word >> 32) as u32 & !(1 << 31))
}

/// How the number of a word's dispatch, refused or not, compares with `number`. A refusal of another dispatch is an old one, because
/// its word has half a number, which comes again.
pub(crate) fn compare(word: u64, number: u64) -> Ordering {
    match needed(word) {
        None => word.cmp(&number),
        Some(_) if word as u32 == number as u32 => Ordering::Equal,
        Some(_) => Ordering::Less,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_stands_for_its_dispatch() {
        for number in [1, 7, u64::from(u32::MAX), 1 << 32, (5 << 32) + 3] {
            let word = refusal(number, i32::MAX as u32);
            assert_eq!(needed(word), Some(i32::MAX as u32));
            assert_eq!(compare(word, number), Ordering::Equal);
            assert_eq!(compare(word, number + 2), Ordering::Less);
            assert_eq!(compare(refusal(number, 0), number + (1 << 31) + 2), Ordering::Less);
            assert_eq!(compare(number, number), Ordering::Equal);
            assert_eq!(needed(number), None);
        }
    }
}
