//! Which segment is emptied when room is needed, and what of it is copied on. Pure.
//!
//! Segments are emptied about in the order in which they were filled. What was read since it was written has shown its
//! worth and gets a second life at the log's end, as in the CLOCK policy, but for a quarter of a segment at most: so
//! that each cleaning gives at least three quarters of a segment of room, whatever is read.

use crate::index::Live;
use crate::layout::SegmentNumber;

/// How much of a segment may be copied on: one part of so many.
pub(crate) const KEPT_PART: u32 = 4;
/// The oldest of so many parts of the segments are compared,
const WINDOW_PART: usize = 8;
/// but not more than these.
const WINDOW: usize = 16;

/// What speaks for leaving a segment as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Worth {
    /// Pages of records that were read since they were written.
    pub(crate) reused_pages: u64,
    /// Pages of all records that count.
    pub(crate) live_pages: u64,
}

impl Worth {
    pub(crate) fn of(live: &[Live]) -> Worth {
        let pages = |live: &Live| u64::from(live.pages);
        Worth {
            reused_pages: live.iter().filter(|live| live.reads > 0).map(pages).sum(),
            live_pages: live.iter().map(pages).sum(),
        }
    }
}

/// The segment to empty: of the oldest ones the one of which the least was reused. `sealed` are generations and numbers
/// of all segments that may be chosen.
pub(crate) fn choose(
    sealed: &mut [(u64, SegmentNumber)],
    mut worth: impl FnMut(SegmentNumber) -> Worth,
) -> Option<SegmentNumber> {
    sealed.sort_unstable();
    let window = (sealed.len() / WINDOW_PART).clamp(1, WINDOW);
    let oldest = sealed.iter().take(window).map(|&(_, segment)| segment);
    oldest.min_by_key(|&segment| {
        let Worth { reused_pages, live_pages } = worth(segment);
        (reused_pages, live_pages)
    })
}

/// Splits a segment's records into those to copy on, in the order of their pages, and those to drop.
pub(crate) fn split(mut live: Vec<Live>, segment_pages: u32) -> (Vec<Live>, Vec<Live>) {
    live.sort_by_key(|live| (std::cmp::Reverse(live.reads), live.page));
    let mut room = segment_pages / KEPT_PART;
    let (mut kept, dropped): (Vec<Live>, Vec<Live>) = live.into_iter().partition(|live| {
        let keep = live.reads > 0 && live.pages <= room;
        if keep {
            room -= live.pages;
        }
        keep
    });
    kept.sort_by_key(|live| live.page);
    (kept, dropped)
}

#[cfg(test)]
mod tests {
    use kvlane_block::{BlockHash, CutDigest, Namespace};

    use super::*;
    use crate::request::{Key, Space};

    fn live(page: u32, pages: u32, reads: u8) -> Live {
        let space = Space { namespace: Namespace([0; 16]), cut: CutDigest([0; 16]) };
        Live { key: Key { space, hash: BlockHash([page as u8; 16]) }, page, pages, reads }
    }

    #[test]
    fn the_oldest_segment_goes_first_unless_a_younger_old_one_was_reused_less() {
        let mut few =
            [(9, 0), (3, 1), (5, 2)].map(|(generation, number)| (generation, SegmentNumber(number)));
        assert_eq!(choose(&mut few, |_| Worth::default()), Some(SegmentNumber(1)));
        let aged = |number: u32| (100 - u64::from(number), SegmentNumber(number));
        let mut many: Vec<_> = (0..64).map(aged).collect();
        let worth = |segment| Worth { reused_pages: u64::from(segment > SegmentNumber(60)), live_pages: 10 };
        assert_eq!(choose(&mut many, worth), Some(SegmentNumber(60)));
        assert_eq!(choose(&mut [], |_| Worth::default()), None);
    }

    #[test]
    fn what_was_read_is_kept_up_to_a_quarter_the_most_read_first() {
        let all = vec![live(1, 10, 0), live(11, 10, 1), live(21, 10, 7), live(31, 10, 2), live(41, 5, 1)];
        let (kept, dropped) = split(all, 100);
        assert_eq!(kept.iter().map(|live| live.page).collect::<Vec<_>>(), [21, 31, 41]);
        assert_eq!(dropped.iter().map(|live| live.page).collect::<Vec<_>>(), [11, 1]);
    }
}
