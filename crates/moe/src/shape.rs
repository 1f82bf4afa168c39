//! [`Shape`]: what all ranks agree on.

use std::ops::Range;

use crate::Number;

/// Most ranks of an all-to-all.
pub const RANKS_MAX: usize = 64;
/// Most experts of a token.
pub const TOP_K_MAX: usize = 32;
const EXPERTS_MAX: usize = 1 << 16;
const TOKENS_MAX: usize = 1 << 20;
const ROW_BYTES_MAX: usize = 1 << 20;
const ALIGNMENT_MAX: usize = 1 << 16;

/// How the rows that a rank receives stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLayout {
    /// Expert by expert, each from a multiple of [`Shape::alignment`] on.
    Experts,
    /// Expert e's rows stand from `e * capacity` on.
    Masked {
        /// Most rows of an expert.
        capacity: usize,
    },
    /// Each token that came stands there once, by source and slot. Its experts' sum is the caller's.
    Tokens,
}

/// The sizes of an all-to-all. All ranks have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Ranks, 1 to [`RANKS_MAX`].
    pub ranks: usize,
    /// Experts of all ranks together. Rank r holds those from `r * ceil(experts / ranks)` on.
    pub experts: usize,
    /// Experts of a token, 1 to [`TOP_K_MAX`].
    pub top_k: usize,
    /// Most tokens of a rank in one dispatch.
    pub max_tokens: usize,
    /// Bytes of a row that is dispatched, a multiple of 16. Their meaning does not matter.
    pub row_bytes: usize,
    /// Bytes of scales that go with a row; 0: none.
    pub scale_bytes: usize,
    /// Elements of a row that combine sums; with their size a multiple of 16 bytes.
    pub hidden: usize,
    /// How these are written.
    pub number: Number,
    /// Rows to a multiple of which each expert's first row is rounded up.
    pub alignment: usize,
    /// How the rows that a rank receives stand.
    pub layout: RowLayout,
}

impl Shape {
    /// # Errors
    /// A sentence about the first size that is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        let in_bounds = |name: &str, value: usize, range: Range<usize>| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(format!("{name} is {value}, and has to be {} to {}", range.start, range.end - 1))
        };
        in_bounds("the number of ranks", self.ranks, 1..RANKS_MAX + 1)?;
        in_bounds("experts", self.experts, 1..EXPERTS_MAX + 1)?;
        in_bounds("top_k", self.top_k, 1..TOP_K_MAX + 1)?;
        in_bounds("max_tokens", self.max_tokens, 1..TOKENS_MAX + 1)?;
        in_bounds("row_bytes", self.row_bytes, 16..ROW_BYTES_MAX + 1)?;
        in_bounds("scale_bytes", self.scale_bytes, 0..ROW_BYTES_MAX + 1)?;
        in_bounds("hidden", self.hidden, 1..ROW_BYTES_MAX / self.number.bytes() + 1)?;
        in_bounds("alignment", self.alignment, 1..ALIGNMENT_MAX + 1)?;
        if !self.row_bytes.is_multiple_of(16) {
            return Err(format!("row_bytes is {}, and has to be a multiple of 16", self.row_bytes));
        }
        if !self.sum_bytes().is_multiple_of(16) {
            return Err(format!(
                "hidden is {}: a row of combine has {} bytes, and has to have a multiple of 16",
                self.hidden,
                self.sum_bytes()
            ));
        }
        // Positions of rows are numbers of 32 bits, in Python signed ones.
        let mut rows = self.ranks * self.max_tokens * self.top_k + self.experts_a_rank() * self.alignment;
        if let RowLayout::Masked { capacity } = self.layout {
            in_bounds("capacity", capacity, 1..i32::MAX as usize + 1)?;
            rows = rows.max(self.experts_a_rank() * capacity);
        }
        if rows > i32::MAX as usize {
            return Err(format!("a rank might receive {rows} rows, and positions go to {}", i32::MAX));
        }
        Ok(())
    }

    /// Bytes of a row that combine sums.
    pub fn sum_bytes(&self) -> usize {
        self.hidden * self.number.bytes()
    }

    /// Most experts of a rank.
    pub fn experts_a_rank(&self) -> usize {
        self.experts.div_ceil(self.ranks)
    }

    /// The experts that a rank holds.
    pub fn experts_of(&self, rank: usize) -> Range<usize> {
        let each = self.experts_a_rank();
        (rank * each).min(self.experts)..((rank + 1) * each).min(self.experts)
    }

    /// The rank that holds an expert.
    pub fn rank_of(&self, expert: usize) -> usize {
        expert / self.experts_a_rank()
    }

    /// All sizes, for comparing those of two ranks.
    pub(crate) fn fields(&self) -> [Field; 11] {
        let (layout, capacity) = match self.layout {
            RowLayout::Experts => (0, 0),
            RowLayout::Masked { capacity } => (1, capacity as u64),
            RowLayout::Tokens => (2, 0),
        };
        [
            Field::size("the number of ranks", self.ranks),
            Field::size("experts", self.experts),
            Field::size("top_k", self.top_k),
            Field::size("max_tokens", self.max_tokens),
            Field::size("row_bytes", self.row_bytes),
            Field::size("scale_bytes", self.scale_bytes),
            Field::size("hidden", self.hidden),
            Field { name: "dtype", value: self.number as u64, words: &["bfloat16", "float16", "float32"] },
            Field::size("alignment", self.alignment),
            Field { name: "layout", value: layout, words: &["experts", "masked", "tokens"] },
            Field { name: "capacity", value: capacity, words: &[] },
        ]
    }
}

/// A value on which ranks have to agree, by the name that users give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) value: u64,
    /// Meanings of the numbers from 0 on; none for a size.
    pub(crate) words: &'static [&'static str],
}

impl Field {
    fn size(name: &'static str, value: usize) -> Field {
        Field { name, value: value as u64, words: &[] }
    }

    /// How users write a value of it.
    pub(crate) fn say(&self, value: u64) -> String {
        let word = usize::try_from(value).ok().and_then(|value| self.words.get(value));
        word.map_or_else(|| value.to_string(), |&word| word.into())
    }
}
