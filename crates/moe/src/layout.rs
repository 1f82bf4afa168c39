//! [`Layout`]: the bytes of a rank's memory, which its peers write.

use crate::Shape;

/// Sections and rows begin at multiples of it. On GPUs a bulk copy to other multiples takes longer.
const ALIGNMENT: usize = 128;
const WORD: usize = 8;

/// Offsets in the memory of a rank, of W ranks, T tokens at most, K experts a token and L experts a rank.
///
/// ```text
///  0          whether this rank still takes part
///  counts     2 x W x (L + 1) words: (sequence number << 32 | rows) for each source and expert; the last: slots
///  row words  2 x W x T words: a sequence number for each source and slot
///  rows       2 x W x T rows: | row | scales | K x (expert here, place) | K weights | token |
///  sum words  2 x W x T words                  reduced: from each rank, one row for each of this rank's slots there
///  sums       2 x W x T rows of combine
///  pair words 2 x T x K words                  exact: one row for each of this rank's tokens and k
///  pairs      2 x T x K rows of combine
/// ```
/// The factor of 2 is for even and odd operations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    ranks: usize,
    tokens: usize,
    top_k: usize,
    counts_a_source: usize,
    pub(crate) row_words: usize,
    pub(crate) rows: usize,
    pub(crate) row_stride: usize,
    pub(crate) sum_words: usize,
    pub(crate) sums: usize,
    pub(crate) sum_stride: usize,
    pub(crate) pair_words: usize,
    pub(crate) pairs: usize,
    /// Bytes of all sections together.
    pub(crate) bytes: usize,
    /// From the begin of a row to its scales.
    pub(crate) scales_at: usize,
    /// From the begin of a row to what stands behind its scales.
    pub(crate) rest_at: usize,
}

/// Offset of the word that says whether the rank takes part.
pub(crate) const STATE: usize = 0;
/// Offset of the counts.
pub(crate) const COUNTS: usize = ALIGNMENT;

impl Layout {
    /// None if it would have more bytes than a process can address.
    pub(crate) fn of(shape: &Shape) -> Option<Layout> {
        let Shape { ranks, top_k, max_tokens: tokens, .. } = *shape;
        let counts_a_source = shape.experts_a_rank() + 1;
        let scales_at = shape.row_bytes;
        let rest_at = scales_at + shape.scale_bytes.next_multiple_of(16);
        let row_stride = (rest_at + rest_bytes(top_k)).next_multiple_of(ALIGNMENT);
        let sum_stride = shape.sum_bytes().next_multiple_of(ALIGNMENT);
        let mut end = COUNTS;
        let mut section = |bytes: Option<usize>| {
            let at = end;
            end = end.checked_add(bytes?)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(at)
        };
        let slots = 2 * ranks * tokens;
        section(Some(2 * ranks * counts_a_source * WORD))?;
        let row_words = section(slots.checked_mul(WORD))?;
        let rows = section(slots.checked_mul(row_stride))?;
        let sum_words = section(slots.checked_mul(WORD))?;
        let sums = section(slots.checked_mul(sum_stride))?;
        let pair_words = section((2 * tokens * top_k).checked_mul(WORD))?;
        let pairs = section((2 * tokens * top_k).checked_mul(sum_stride))?;
        (end <= isize::MAX as usize).then_some(Layout {
            ranks,
            tokens,
            top_k,
            counts_a_source,
            row_words,
            rows,
            row_stride,
            sum_words,
            sums,
            sum_stride,
            pair_words,
            pairs,
            bytes: end,
            scales_at,
            rest_at,
        })
    }

    /// Bytes on a GPU, where memory that is never written takes room, too. Without exact sums no pairs come back.
    pub(crate) fn gpu_bytes(&self, is_exact: bool) -> usize {
        if is_exact { self.bytes } else { self.pair_words }
    }

    fn slot(&self, sequence: u64, rank: usize, slot: usize) -> usize {
        assert!(rank < self.ranks && slot < self.tokens, "a slot that does not exist");
        (parity(sequence) * self.ranks + rank) * self.tokens + slot
    }

    fn pair(&self, sequence: u64, token: usize, k: usize) -> usize {
        assert!(token < self.tokens && k < self.top_k, "a pair that does not exist");
        (parity(sequence) * self.tokens + token) * self.top_k + k
    }

    /// The word of a source's rows for an expert of this rank, or of its slots.
    pub(crate) fn count(&self, sequence: u64, source: usize, expert: usize) -> usize {
        assert!(source < self.ranks && expert < self.counts_a_source, "a count that does not exist");
        COUNTS + ((parity(sequence) * self.ranks + source) * self.counts_a_source + expert) * WORD
    }

    /// Word and begin of a source's row.
    pub(crate) fn row(&self, sequence: u64, source: usize, slot: usize) -> (usize, usize) {
        let slot = self.slot(sequence, source, slot);
        (self.row_words + slot * WORD, self.rows + slot * self.row_stride)
    }

    /// Word and begin of what a rank made of this rank's token in that slot.
    pub(crate) fn sum(&self, sequence: u64, rank: usize, slot: usize) -> (usize, usize) {
        let slot = self.slot(sequence, rank, slot);
        (self.sum_words + slot * WORD, self.sums + slot * self.sum_stride)
    }

    /// Word and begin of what an expert made of this rank's token.
    pub(crate) fn pair_row(&self, sequence: u64, token: usize, k: usize) -> (usize, usize) {
        let pair = self.pair(sequence, token, k);
        (self.pair_words + pair * WORD, self.pairs + pair * self.sum_stride)
    }
}

/// Bytes behind a row and its scales: for each k an expert and a place, then the weights, then the token.
pub(crate) fn rest_bytes(top_k: usize) -> usize {
    top_k * 12 + 4
}

fn parity(sequence: u64) -> usize {
    (sequence & 1) as usize
}
