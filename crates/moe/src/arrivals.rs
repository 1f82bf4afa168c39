//! [`Arrivals`]: where the rows that a rank receives stand, sorted by expert, then source, then token and k.

use crate::Shape;

/// The position of a row that is not here.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The places of one rank's rows.
///
/// ```text
///  | expert 0: of rank 0, of rank 1, ... | padding | expert 1: of rank 0, ... | padding | ...
///  starts[0]                                       starts[1], a multiple of the alignment
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrivals {
    /// For each expert of this rank, its rows.
    pub counts: Vec<u32>,
    /// For each expert, the position of its first row.
    pub starts: Vec<u32>,
    /// Rows of all experts, with the padding behind the last one.
    pub rows: usize,
    /// For each source and expert, the position of the source's first row.
    bases: Vec<Vec<u32>>,
    /// For each source and expert, its rows.
    by_source: Vec<Vec<u32>>,
}

impl Arrivals {
    /// From what each source has for each expert of this rank.
    pub fn of(by_source: Vec<Vec<u32>>, shape: &Shape) -> Arrivals {
        let experts = by_source.first().map_or(0, Vec::len);
        let mut found = Arrivals {
            counts: vec![0; experts],
            starts: vec![0; experts],
            rows: 0,
            bases: vec![vec![0; experts]; by_source.len()],
            by_source,
        };
        for expert in 0..experts {
            found.starts[expert] = found.rows as u32;
            let mut at = found.rows as u32;
            for (bases, counts) in found.bases.iter_mut().zip(&found.by_source) {
                bases[expert] = at;
                at += counts[expert];
            }
            found.counts[expert] = at - found.starts[expert];
            found.rows = (at as usize).next_multiple_of(shape.alignment);
        }
        found
    }

    /// Rows that a source has for each expert.
    pub(crate) fn of_source(&self, source: usize) -> &[u32] {
        &self.by_source[source]
    }

    /// Position of the row that has this place among those of a source for an expert. None if the source has not so many.
    pub fn position(&self, source: usize, expert: usize, place: u32) -> Option<u32> {
        let count = *self.by_source.get(source)?.get(expert)?;
        (place < count).then(|| self.bases[source][expert] + place)
    }
}
