//! [`Arrivals`]: where the rows that a rank receives stand.

use crate::{RowLayout, Shape};

/// The position of a row that is not here.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The places of one rank's rows, in the layout of its [`Shape`].
///
/// ```text
///  experts  | expert 0: of rank 0, of rank 1, ... | padding | expert 1: of rank 0, ... | padding | ...
///           starts[0]                                       starts[1], a multiple of the alignment
///  masked   | expert 0: of rank 0, of rank 1, ... | unused  | expert 1: of rank 0, ... | unused  | ...
///           starts[0] = 0                                   starts[1] = capacity
///  tokens   | of rank 0: slot 0, slot 1, ... | of rank 1: ...
/// ```
/// Of one expert and source, rows stand in the order of tokens, then k. Slots are in the order of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrivals {
    /// For each expert of this rank, its rows.
    pub counts: Vec<u32>,
    /// For each expert, the position of its first row; empty in the layout of tokens.
    pub starts: Vec<u32>,
    /// Rows of all, with the padding behind the last one.
    pub rows: usize,
    /// Rows that an expert needs, if they are more than the capacity of a masked layout. No row has a place then.
    pub needed: Option<u32>,
    /// For each source and expert, the position of the source's first row. In the layout of tokens, one for each source.
    bases: Vec<Vec<u32>>,
    /// For each source and expert, its rows.
    by_source: Vec<Vec<u32>>,
}

impl Arrivals {
    /// From what each source has for each expert of this rank, and how many tokens it sent here.
    pub fn of(by_source: Vec<Vec<u32>>, slots: &[usize], shape: &Shape) -> Arrivals {
        let experts = by_source.first().map_or(0, Vec::len);
        let counts: Vec<u32> =
            (0..experts).map(|expert| by_source.iter().map(|counts| counts[expert]).sum()).collect();
        let mut found = Arrivals {
            starts: Vec::new(),
            rows: 0,
            needed: None,
            bases: vec![Vec::new(); by_source.len()],
            counts,
            by_source,
        };
        match shape.layout {
            RowLayout::Tokens => {
                for (bases, slots) in found.bases.iter_mut().zip(slots) {
                    bases.push(found.rows as u32);
                    found.rows += slots;
                }
                return found;
            }
            RowLayout::Experts => {
                for count in &found.counts {
                    found.starts.push(found.rows as u32);
                    found.rows = (found.rows + *count as usize).next_multiple_of(shape.alignment);
                }
            }
            RowLayout::Masked { capacity } => {
                found.starts = (0..experts).map(|expert| (expert * capacity) as u32).collect();
                found.rows = experts * capacity;
                found.needed = found.counts.iter().copied().filter(|count| *count as usize > capacity).max();
            }
        }
        for (expert, start) in found.starts.iter().enumerate() {
            let mut at = *start;
            for (bases, counts) in found.bases.iter_mut().zip(&found.by_source) {
                bases.push(at);
                at += counts[expert];
            }
        }
        found
    }

    /// Rows that a source has for each expert.
    pub(crate) fn of_source(&self, source: usize) -> &[u32] {
        &self.by_source[source]
    }

    /// Position of the row that has this place among those of a source for an expert, for layouts that go by experts. None if
    /// the source has not so many.
    pub fn position(&self, source: usize, expert: usize, place: u32) -> Option<u32> {
        self.has(source, expert, place).then(|| self.bases[source][expert] + place)
    }

    fn has(&self, source: usize, expert: usize, place: u32) -> bool {
        let count = self.by_source.get(source).and_then(|counts| counts.get(expert));
        count.is_some_and(|count| place < *count)
    }

    /// Position of the token in this slot of a source, in the layout of tokens. None as in [`Arrivals::position`].
    pub(crate) fn token_position(
        &self,
        source: usize,
        slot: usize,
        expert: usize,
        place: u32,
    ) -> Option<u32> {
        self.has(source, expert, place).then(|| self.bases[source][0] + slot as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Number;

    fn arrivals(layout: RowLayout, alignment: usize) -> Arrivals {
        let (ranks, experts, top_k, max_tokens, hidden) = (2, 6, 4, 8, 8);
        let (row_bytes, scale_bytes, number) = (16, 0, Number::Bf16);
        let shape = Shape {
            ranks,
            experts,
            top_k,
            max_tokens,
            row_bytes,
            scale_bytes,
            hidden,
            number,
            alignment,
            layout,
        };
        Arrivals::of(vec![vec![2, 0, 1], vec![1, 3, 0]], &[2, 3], &shape)
    }

    #[test]
    fn each_layout_has_its_places() {
        let places = |layout, alignment| {
            let found = arrivals(layout, alignment);
            assert_eq!(found.counts, [3, 3, 1]);
            let of_last = found.position(1, 1, 2);
            assert_eq!(found.position(1, 1, 3), None);
            (found.starts.clone(), found.rows, of_last, found.needed)
        };
        assert_eq!(places(RowLayout::Experts, 1), (vec![0, 3, 6], 7, Some(5), None));
        assert_eq!(places(RowLayout::Experts, 4), (vec![0, 4, 8], 12, Some(6), None));
        assert_eq!(places(RowLayout::Masked { capacity: 3 }, 1), (vec![0, 3, 6], 9, Some(5), None));
        assert_eq!(places(RowLayout::Masked { capacity: 2 }, 1), (vec![0, 2, 4], 6, Some(4), Some(3)));
        let tokens = arrivals(RowLayout::Tokens, 1);
        let of_last = tokens.token_position(1, 2, 1, 2);
        assert_eq!((tokens.rows, tokens.starts.len(), of_last), (5, 0, Some(4)));
        assert_eq!(tokens.token_position(1, 2, 1, 3), None);
    }
}
