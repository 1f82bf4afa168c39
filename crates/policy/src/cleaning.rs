//! [`Cleaner`]: chooses the segment of an SSD's log to empty, and which of its records are written again.
//!
//! Segments are emptied about in the order in which they were filled. Records that deserve it are written again at the
//! log's end, up to a quarter of a segment. So each cleaning frees at least three quarters of a segment, whatever its
//! records are worth.
//!
//! If the policy learns, each record has a hit density. A record is written again if it is twice as dense as the
//! records given up lately, because it takes the room, and the writing, of a later one. With other policies a record is
//! written again if it was read since it was written, as in the CLOCK policy.

use std::cmp::Reverse;

/// At most one in this many pages of a segment is written again.
const KEPT_PART: u32 = 4;
/// The oldest one in this many segments are compared, but at most `WINDOW`.
const WINDOW_PART: usize = 8;
const WINDOW: usize = 16;
/// A record is written again if it is this many times as dense as the records given up lately.
const DENSER: f32 = 2.0;
/// The mean of what was given up moves by one in this many parts at each cleaning.
const MEMORY: f32 = 20.0;

/// The worth of one record of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worth {
    /// Length of the record in pages.
    pub pages: u32,
    /// Reads since the record was written.
    pub reads: u8,
    /// Expected hits for each reference that the block is kept, 0 or above. None if the policy does not learn, or has
    /// not learnt yet.
    pub density: Option<f32>,
}

/// The cleaner of one log. It keeps the mean density of what it gave up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cleaner {
    given_up: Option<f32>,
}

impl Cleaner {
    /// How many of the oldest segments are to be compared, if `segments` may be emptied.
    pub fn window(segments: usize) -> usize {
        (segments / WINDOW_PART).clamp(1, WINDOW)
    }

    /// The mean density of the records given up lately. None before any was, and while records have no density.
    pub fn given_up(&self) -> Option<f32> {
        self.given_up
    }

    /// The index of the segment to empty: the one that is worth the least. If several are, the first of those with the
    /// fewest live pages. None without segments.
    pub fn choose(&self, segments: &[Vec<Worth>]) -> Option<usize> {
        let worth = |records: &Vec<Worth>| {
            let sum = |of: fn(&Worth) -> f64| records.iter().map(of).sum::<f64>();
            let is_learnt = records.iter().any(|record| record.density.is_some());
            let of_all = match is_learnt {
                // The expected hits that are lost with the segment.
                true => sum(|record| f64::from(record.density.unwrap_or(0.0))),
                false => sum(|record| if record.reads > 0 { f64::from(record.pages) } else { 0.0 }),
            };
            (of_all, sum(|record| f64::from(record.pages)))
        };
        let worths: Vec<(f64, f64)> = segments.iter().map(worth).collect();
        (0..segments.len()).min_by(|&a, &b| {
            let ((a, a_pages), (b, b_pages)) = (worths[a], worths[b]);
            a.total_cmp(&b).then(a_pages.total_cmp(&b_pages))
        })
    }

    /// For each record of the segment to empty, whether it is to be written again. `segment_pages` is the segment's
    /// size, or 0 if the log has no room for copies; then no record is.
    pub fn split(&mut self, records: &[Worth], segment_pages: u32) -> Vec<bool> {
        let known = |record: &Worth| record.density.unwrap_or(0.0);
        let is_learnt = records.iter().any(|record| record.density.is_some());
        let mut order: Vec<usize> = (0..records.len()).collect();
        if is_learnt {
            // Order by expected hits for each page.
            let dense = |at: usize| known(&records[at]) / records[at].pages.max(1) as f32;
            order.sort_by(|&a, &b| dense(b).total_cmp(&dense(a)));
        } else {
            order.sort_by_key(|&at| Reverse(records[at].reads));
        }
        let mean = |given_up: &mut dyn Iterator<Item = &Worth>| {
            let (sum, count) = given_up.fold((0.0, 0.0), |(sum, count), one| (sum + known(one), count + 1.0));
            (count > 0.0).then(|| sum / count)
        };
        let usual = self.given_up.or_else(|| mean(&mut records.iter())).unwrap_or(0.0);
        let mut kept = vec![false; records.len()];
        let mut room = segment_pages / KEPT_PART;
        for at in order {
            let record = &records[at];
            let deserves = if is_learnt { known(record) > DENSER * usual } else { record.reads > 0 };
            if deserves && record.pages <= room {
                room -= record.pages;
                kept[at] = true;
            }
        }
        if !is_learnt {
            // Forget the mean, because the densities of another policy are no measure for those of the next one.
            self.given_up = None;
        } else {
            let left = records.iter().zip(&kept).filter(|(_, kept)| !**kept).map(|(record, _)| record);
            if let Some(now) = mean(&mut { left }) {
                let before = self.given_up.unwrap_or(now);
                self.given_up = Some(before + (now - before) / MEMORY);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(pages: u32, reads: u8) -> Worth {
        Worth { pages, reads, density: None }
    }

    fn dense(pages: u32, density: f32) -> Worth {
        Worth { pages, reads: 0, density: Some(density) }
    }

    #[test]
    fn an_eighth_of_the_segments_is_compared_one_at_least_and_sixteen_at_most() {
        assert_eq!([0, 1, 8, 16, 64, 128, 10_000].map(Cleaner::window), [1, 1, 1, 2, 8, 16, 16]);
    }

    #[test]
    fn the_segment_of_which_the_least_was_read_goes_and_of_equal_ones_the_emptier() {
        let cleaner = Cleaner::default();
        let segments = [vec![read(10, 1), read(10, 0)], vec![read(10, 0), read(20, 0)], vec![read(20, 0)]];
        assert_eq!(cleaner.choose(&segments), Some(2));
        assert_eq!(cleaner.choose(&segments[..2]), Some(1));
        assert_eq!(cleaner.choose(&[vec![], vec![]]), Some(0), "the older");
        assert_eq!(cleaner.choose(&[]), None);
    }

    #[test]
    fn what_is_dense_outweighs_what_was_read() {
        let often_read = Worth { pages: 10, reads: 9, density: Some(0.001) };
        assert_eq!(Cleaner::default().choose(&[vec![dense(10, 0.002)], vec![often_read]]), Some(1));
    }

    #[test]
    fn what_was_read_is_kept_up_to_a_quarter_the_most_read_first() {
        let records = [read(10, 0), read(10, 1), read(10, 7), read(10, 2), read(5, 1)];
        let mut cleaner = Cleaner::default();
        assert_eq!(cleaner.split(&records, 100), [false, false, true, true, true]);
        assert_eq!(cleaner.given_up(), None);
    }

    #[test]
    fn what_a_policy_said_that_does_not_decide_any_more_is_forgotten() {
        let mut cleaner = Cleaner::default();
        cleaner.split(&[dense(1, 0.01); 8], 100);
        cleaner.split(&[read(1, 0); 8], 100);
        assert_eq!(cleaner.given_up(), None);
        assert_eq!(cleaner.split(&[dense(1, 0.5), dense(1, 0.01), dense(1, 0.01)], 0), [false; 3], "no room");
        assert!(cleaner.given_up().is_some_and(|density| density > 0.1), "it was given up, too");
    }

    #[test]
    fn of_two_that_are_as_dense_the_smaller_one_is_kept() {
        let records = [dense(20, 0.5), dense(10, 0.5), dense(10, 0.01), dense(10, 0.01), dense(10, 0.01)];
        assert_eq!(Cleaner::default().split(&records, 100), [false, true, false, false, false]);
    }

    #[test]
    fn what_is_denser_than_what_is_usually_given_up_is_kept() {
        let mut cleaner = Cleaner::default();
        // Nothing is known of others yet: they are compared among themselves, and are alike.
        assert_eq!(cleaner.split(&[dense(1, 0.01); 8], 100), [false; 8]);
        assert!((cleaner.given_up().unwrap() - 0.01).abs() < 1e-6);
        let kept = cleaner.split(&[dense(10, 0.015), dense(10, 0.03), dense(10, 0.021), dense(10, 0.5)], 100);
        assert_eq!(kept, [false, true, false, true], "twice as dense, the densest first, a quarter at most");
        for _ in 0..200 {
            cleaner.split(&[dense(10, 0.1); 3], 100);
        }
        assert!(cleaner.given_up().unwrap() > 0.09, "it follows what is given up");
    }

    proptest! {
        #[test]
        fn each_cleaning_gives_three_quarters_of_room_and_keeps_nothing_that_is_worth_nothing(
            records in prop::collection::vec(
                (1u32..40, 0u8..4, prop_oneof![Just(0.0f32), 0.0f32..1.0]), 0..60),
            is_learnt: bool,
            rounds in 1usize..5,
        ) {
            let worth = |&(pages, reads, density): &(u32, u8, f32)| Worth { pages, reads, density: is_learnt.then_some(density) };
            let records: Vec<Worth> = records.iter().map(worth).collect();
            let pages = records.iter().map(|record| record.pages).sum::<u32>();
            let mut cleaner = Cleaner::default();
            for _ in 0..rounds {
                let kept = cleaner.split(&records, pages);
                prop_assert_eq!(kept.len(), records.len());
                let of_kept = records.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(record, _)| record);
                prop_assert!(of_kept.clone().map(|record| record.pages).sum::<u32>() <= pages / KEPT_PART);
                for record in of_kept {
                    let is_worth_something = if is_learnt { record.density != Some(0.0) } else { record.reads > 0 };
                    prop_assert!(is_worth_something);
                }
            }
        }
    }
}
