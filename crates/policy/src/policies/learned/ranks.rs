//! [`Ranks`]: the cohorts in the order of their hit density, so that the next victim is found at once.

use super::cohorts::{COHORTS, Cohort};

const NONE: u16 = u16::MAX;
/// Eight ranks for each doubling of density, over 32 doublings up to one hit for each reference.
const RANKS: usize = 256;
/// A rank is the exponent of an f32 and the first three bits of its mantissa.
const DROPPED_BITS: u32 = 20;
/// The steps of 2 to the power of -32, which have rank 0.
const LEAST: u32 = (127 - 32) << 3;

/// A hit density in 256 steps. Densities that differ by less than an eighth may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank(u8);

impl Rank {
    pub(super) fn of(density: f32) -> Self {
        let steps = (density.to_bits() >> DROPPED_BITS).saturating_sub(LEAST);
        Self(steps.min(RANKS as u32 - 1) as u8)
    }

    /// The lowest density of this rank.
    pub(super) fn density(self) -> f32 {
        f32::from_bits((u32::from(self.0) + LEAST) << DROPPED_BITS)
    }
}

/// Lists of cohorts, one for each rank. The caller decides the order within a rank.
pub(super) struct Ranks {
    /// The first and last cohort of each rank.
    ends: [(u16, u16); RANKS],
    /// For each cohort the next one of its rank.
    next: Box<[u16]>,
    /// A bit for each rank that has cohorts.
    filled: [u64; RANKS / 64],
}

impl Ranks {
    pub(super) fn new() -> Self {
        let next = vec![NONE; COHORTS].into_boxed_slice();
        Self { ends: [(NONE, NONE); RANKS], next, filled: [0; RANKS / 64] }
    }

    pub(super) fn clear(&mut self) {
        self.ends = [(NONE, NONE); RANKS];
        self.filled = [0; RANKS / 64];
    }

    /// Adds `cohort`, which is not ranked, behind all cohorts of its rank.
    pub(super) fn add_last(&mut self, cohort: Cohort, rank: Rank) {
        let at = usize::from(rank.0);
        self.next[usize::from(cohort.0)] = NONE;
        let (first, last) = self.ends[at];
        if first == NONE {
            self.ends[at] = (cohort.0, cohort.0);
            self.filled[at / 64] |= 1 << (at % 64);
        } else {
            self.next[usize::from(last)] = cohort.0;
            self.ends[at].1 = cohort.0;
        }
    }

    /// Adds `cohort`, which is not ranked, before the first cohort of its rank that is `later`.
    pub(super) fn add(&mut self, cohort: Cohort, rank: Rank, later: impl Fn(Cohort) -> bool) {
        let (first, last) = self.ends[usize::from(rank.0)];
        if first == NONE || !later(Cohort(last)) {
            return self.add_last(cohort, rank);
        }
        let before = self.of_rank(rank).take_while(|&other| !later(other)).last();
        match before {
            None => {
                self.next[usize::from(cohort.0)] = first;
                self.ends[usize::from(rank.0)].0 = cohort.0;
            }
            Some(Cohort(before)) => {
                self.next[usize::from(cohort.0)] = self.next[usize::from(before)];
                self.next[usize::from(before)] = cohort.0;
            }
        }
    }

    /// The least dense cohort.
    pub(super) fn first(&self) -> Option<(Rank, Cohort)> {
        let rank = self.ranks().next()?;
        Some((rank, Cohort(self.ends[usize::from(rank.0)].0)))
    }

    /// Removes the least dense cohort.
    pub(super) fn remove_first(&mut self) {
        let Some((Rank(rank), Cohort(cohort))) = self.first() else { return };
        let at = usize::from(rank);
        match self.next[usize::from(cohort)] {
            NONE => {
                self.ends[at] = (NONE, NONE);
                self.filled[at / 64] &= !(1 << (at % 64));
            }
            next => self.ends[at].0 = next,
        }
    }

    /// All cohorts, the least dense first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Rank, Cohort)> + '_ {
        self.ranks().flat_map(|rank| self.of_rank(rank).map(move |cohort| (rank, cohort)))
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        self.filled.iter().enumerate().flat_map(|(word, &bits)| {
            let left = std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
            let left = left.take_while(|&bits| bits != 0);
            left.map(move |bits| Rank((word * 64) as u8 + bits.trailing_zeros() as u8))
        })
    }

    fn of_rank(&self, rank: Rank) -> impl Iterator<Item = Cohort> + '_ {
        let is_one = |cohort: u16| (cohort != NONE).then_some(cohort);
        let first = is_one(self.ends[usize::from(rank.0)].0);
        std::iter::successors(first, move |&cohort| is_one(self.next[usize::from(cohort)])).map(Cohort)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_rank_says_the_density_within_an_eighth() {
        for step in 0..2000 {
            let density = 2.0f32.powf(-31.9 + 31.0 * step as f32 / 2000.0);
            let least = Rank::of(density).density();
            assert!(least <= density && density < least * 1.126, "{density} {least}");
        }
        let ranks = [0.0, 1e-30, 1e-9, 1.0, f32::MAX].map(Rank::of);
        assert!(ranks.is_sorted() && ranks[0] == ranks[1]);
    }

    proptest! {
        #[test]
        fn rings_come_by_rank_and_then_in_order(
            cohorts in prop::collection::btree_map(0u16..500, 0u8..6, 0..40),
            taken in 0usize..40,
        ) {
            let mut ranks = Ranks::new();
            for (&cohort, &rank) in cohorts.iter().rev() {
                // Ranks in different words.
                ranks.add(Cohort(cohort), Rank(rank * 50), |other| other.0 > cohort);
            }
            let mut expected: Vec<_> = cohorts.iter().map(|(&cohort, &rank)| (Rank(rank * 50), Cohort(cohort))).collect();
            expected.sort();
            prop_assert_eq!(ranks.iter().collect::<Vec<_>>(), expected.clone());
            for _ in 0..taken.min(expected.len()) {
                prop_assert_eq!(ranks.first(), Some(expected.remove(0)));
                ranks.remove_first();
            }
            prop_assert_eq!(ranks.iter().collect::<Vec<_>>(), expected);
        }
    }
}
