//! Merged runs against a model that lists each byte's positions on both sides.

use kvlane_block::{Contiguous, Position, merge};
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct InRegion {
    region: u8,
    offset: u64,
}

impl Position for InRegion {
    fn after(self, bytes: u64) -> Option<Self> {
        Some(InRegion { offset: self.offset.checked_add(bytes)?, ..self })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    place: InRegion,
    address: u64,
    len: u64,
}

impl Contiguous for Range {
    type One = InRegion;
    type Other = u64;

    fn begin(&self) -> (InRegion, u64) {
        (self.place, self.address)
    }

    fn bytes(&self) -> u64 {
        self.len
    }

    fn with_bytes(self, len: u64) -> Self {
        Range { len, ..self }
    }
}

fn range(region: u8, offset: u64, address: u64, len: u64) -> Range {
    Range { place: InRegion { region, offset }, address, len }
}

/// Ranges of which many continue the one before, on one side or on both.
fn ranges() -> impl Strategy<Value = Vec<Range>> {
    vec((0u64..5, 0u8..8, 0u64..3, 0u64..3), 0..40).prop_map(|steps| {
        let (mut region, mut offset, mut address) = (0, 0, 0);
        let next = |(len, other_region, gap_here, gap_there)| {
            if other_region == 0 {
                region = 1 - region;
            }
            let made = range(region, offset + gap_here / 2, address + gap_there / 2, len);
            (offset, address) = (made.place.offset + len, made.address + len);
            made
        };
        steps.into_iter().map(next).collect()
    })
}

proptest! {
    #[test]
    fn each_byte_stays_where_it_was_and_in_its_order(ranges in ranges()) {
        let bytes = |ranges: &[Range]| -> Vec<(u8, u64, u64)> {
            let of = |range: &Range| {
                let Range { place: InRegion { region, offset }, address, len } = *range;
                (0..len).map(move |at| (region, offset + at, address + at))
            };
            ranges.iter().flat_map(of).collect()
        };
        let merged = merge(ranges.iter().copied());
        prop_assert_eq!(bytes(&merged), bytes(&ranges));
        prop_assert!(merged.iter().all(|range| range.len > 0));
        for pair in merged.windows(2) {
            prop_assert!(!pair[0].is_continued_by(&pair[1]), "{:?} should be one", pair);
        }
    }

    /// Anywhere up to the last address: lengths add up to what they were, and nothing wraps around.
    #[test]
    fn what_is_one_was_adjacent_on_both_sides_whatever_the_numbers(
        numbers in vec((0u8..2, any::<u64>(), any::<u64>(), any::<u64>(), 0u8..3), 0..12),
    ) {
        let mut ranges: Vec<Range> = Vec::new();
        for (region, offset, address, len, follows) in numbers {
            // Where it can, some follow the one before on one side or on both, by numbers that may wrap.
            let made = match ranges.last() {
                Some(last) if follows > 0 => Range {
                    place: InRegion { offset: last.place.offset.wrapping_add(last.len), ..last.place },
                    address: if follows == 2 { last.address.wrapping_add(last.len) } else { address },
                    len,
                },
                _ => range(region, offset, address, len),
            };
            ranges.push(made);
        }
        let merged = merge(ranges.iter().copied());
        let total = |ranges: &[Range]| ranges.iter().map(|range| u128::from(range.len)).sum::<u128>();
        prop_assert_eq!(total(&merged), total(&ranges));

        // Each merged range is the ranges that it was made of, one after the other.
        let mut left = ranges.iter().filter(|range| range.len > 0);
        for Range { place, address, len } in merged {
            let mut done = 0u64;
            while done < len {
                let part = left.next().copied();
                let expected = place.offset.checked_add(done).zip(address.checked_add(done));
                let part_len = part.map_or(0, |part| part.len);
                let there = expected.map(|(offset, address)| range(place.region, offset, address, part_len));
                prop_assert_eq!(part, there);
                done = done.saturating_add(part_len);
            }
            prop_assert_eq!(done, len);
        }
        prop_assert_eq!(left.next(), None);
    }
}

#[test]
fn neighbours_on_one_side_only_stay_two() {
    let apart = [range(0, 0, 100, 4), range(0, 4, 200, 4), range(1, 8, 204, 4), range(1, 90, 208, 4)];
    assert_eq!(merge(apart), apart);
    let joined = merge([range(0, 0, 100, 4), range(0, 4, 104, 4), range(1, 8, 108, 4)]);
    assert_eq!(joined, [range(0, 0, 100, 8), range(1, 8, 108, 4)]);
}

#[test]
fn the_end_of_the_address_space_joins_nothing_with_its_start() {
    let ends = [range(0, u64::MAX - 3, 0, 4), range(0, 0, 4, 4), range(0, 4, u64::MAX - 3, 4)];
    assert_eq!(merge(ends), ends);
    assert_eq!(merge([range(0, 7, 9, 0), range(0, 8, 9, 0)]), []);
}
