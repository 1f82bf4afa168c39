//! Which namespaces may have records in which segment of a file, whether or not those are in the index. Pure.
//!
//! What is dropped leaves the index at once, but its bytes lie in their segment until that one is used again. As long as
//! they do, the file has to say that they do not count.

use std::collections::BTreeSet;

use kvlane_block::Namespace;

use crate::layout::SegmentNumber;

/// Of one file.
#[derive(Debug)]
pub(crate) struct Holdings {
    segments: Vec<Held>,
    /// A segment could not be read: it may hold anything.
    is_unknown: bool,
}

/// Of one segment.
#[derive(Debug, Default)]
struct Held {
    /// What the segment's head on the device stands for. Where heads failed, all that any of them may stand for, under the
    /// lowest of their generations.
    now: Layer,
    /// What it will stand for once its new head is written.
    next: Option<Layer>,
}

#[derive(Debug, Default)]
struct Layer {
    generation: u64,
    namespaces: BTreeSet<Namespace>,
    /// There may be records of others, too.
    is_open: bool,
}

impl Holdings {
    /// A file in which nothing was found.
    pub(crate) fn new(segments: u32) -> Holdings {
        Holdings { segments: (0..segments).map(|_| Held::default()).collect(), is_unknown: false }
    }

    /// The file was opened: the segment has records of these, and where it `is_open` perhaps of others.
    pub(crate) fn found(
        &mut self,
        segment: SegmentNumber,
        generation: u64,
        namespaces: BTreeSet<Namespace>,
        is_open: bool,
    ) {
        self.segments[segment.index()].now = Layer { generation, namespaces, is_open };
    }

    /// A segment could not be read when the file was opened.
    pub(crate) fn unreadable(&mut self) {
        self.is_unknown = true;
    }

    /// The segment's former records are void for good.
    pub(crate) fn erased(&mut self, segment: SegmentNumber, generation: u64) {
        self.segments[segment.index()] = Held { now: Layer { generation, ..Layer::default() }, next: None };
    }

    /// The segment gets a new head, which is not written yet.
    pub(crate) fn opened(&mut self, segment: SegmentNumber, generation: u64) {
        let held = &mut self.segments[segment.index()];
        if let Some(failed) = held.next.take() {
            // Of a head that could not be written nobody knows whether it is there.
            held.now.generation = held.now.generation.min(failed.generation);
            held.now.namespaces.extend(failed.namespaces);
            held.now.is_open |= failed.is_open;
        }
        held.next = Some(Layer { generation, ..Layer::default() });
    }

    /// The head is on the device: what the segment held before does not count any more.
    pub(crate) fn head_written(&mut self, segment: SegmentNumber) {
        let held = &mut self.segments[segment.index()];
        if let Some(next) = held.next.take() {
            held.now = next;
        }
    }

    /// A record of the namespace goes to the segment.
    pub(crate) fn appended(&mut self, segment: SegmentNumber, namespace: Namespace) {
        let Held { now, next } = &mut self.segments[segment.index()];
        next.as_mut().unwrap_or(now).namespaces.insert(namespace);
    }

    /// What a segment may hold, and whether that is all.
    pub(crate) fn namespaces(&self, segment: SegmentNumber) -> (BTreeSet<Namespace>, bool) {
        let Held { now, next } = &self.segments[segment.index()];
        let layer = next.as_ref().unwrap_or(now);
        (layer.namespaces.clone(), !layer.is_open)
    }

    /// Whether a segment of this generation or a lower one may hold a record of the namespace.
    pub(crate) fn may_hold(&self, namespace: &Namespace, up_to: u64) -> bool {
        let holds = |layer: &Layer| {
            layer.generation <= up_to && (layer.is_open || layer.namespaces.contains(namespace))
        };
        let mut segments = self.segments.iter();
        self.is_unknown || segments.any(|held| holds(&held.now) || held.next.as_ref().is_some_and(holds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Namespace = Namespace([1; 16]);
    const TWO: Namespace = Namespace([2; 16]);

    #[test]
    fn what_a_segment_held_counts_until_its_next_head_is_written() {
        let mut holdings = Holdings::new(2);
        holdings.found(SegmentNumber(0), 3, BTreeSet::from([ONE]), false);
        assert!(holdings.may_hold(&ONE, 3) && !holdings.may_hold(&ONE, 2));
        holdings.opened(SegmentNumber(0), 5);
        holdings.appended(SegmentNumber(0), TWO);
        assert!(holdings.may_hold(&ONE, 3) && holdings.may_hold(&TWO, 5) && !holdings.may_hold(&TWO, 4));
        holdings.head_written(SegmentNumber(0));
        assert!(!holdings.may_hold(&ONE, u64::MAX) && holdings.may_hold(&TWO, u64::MAX));
        assert_eq!(holdings.namespaces(SegmentNumber(0)), (BTreeSet::from([TWO]), true));
        holdings.erased(SegmentNumber(0), 6);
        assert!(!holdings.may_hold(&TWO, u64::MAX));
    }

    #[test]
    fn where_a_head_failed_either_may_be_there() {
        let mut holdings = Holdings::new(1);
        holdings.found(SegmentNumber(0), 3, BTreeSet::from([ONE]), false);
        holdings.opened(SegmentNumber(0), 5);
        holdings.appended(SegmentNumber(0), TWO);
        // It failed, and the segment is used again.
        holdings.opened(SegmentNumber(0), 6);
        assert!(holdings.may_hold(&ONE, 3) && holdings.may_hold(&TWO, 5));
        holdings.head_written(SegmentNumber(0));
        assert!(!holdings.may_hold(&ONE, u64::MAX) && !holdings.may_hold(&TWO, u64::MAX));
    }

    #[test]
    fn what_could_not_be_read_may_hold_anything() {
        let mut holdings = Holdings::new(1);
        assert!(!holdings.may_hold(&ONE, u64::MAX));
        holdings.unreadable();
        assert!(holdings.may_hold(&ONE, 0));
    }
}
