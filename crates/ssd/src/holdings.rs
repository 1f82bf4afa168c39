//! [`Holdings`]: which namespaces may have records in which segment of a file, whether or not the index has them. Pure.
//!
//! A dropped block leaves the index at once, but its bytes stay in their segment until the segment is reused. Until then
//! the file's drop table has to name the block's namespace.
//!
//! A segment is reused when its new head reaches the device. Between opening the segment and that moment, a crash may
//! leave the old head or the new one, so the segment holds both layers:
//!
//! ```text
//!  found, erased ---> now ---opened---> now + next ---head_written---> now (the former next)
//!                                        | opened again: the head failed and may or may not be there
//!                                        '--> the former next is merged into now
//! ```

use std::collections::BTreeSet;

use kvlane_block::Namespace;

use crate::layout::SegmentNumber;

/// The segments of one file.
#[derive(Debug)]
pub(crate) struct Holdings {
    segments: Vec<Held>,
    /// A segment could not be read, so any namespace may have a record in it.
    is_unknown: bool,
}

/// The layers of one segment.
#[derive(Debug, Default)]
struct Held {
    /// Records under the head that is on the device. After a failed head, the union of the layers that the device may
    /// have, under the lowest of their generations.
    now: Layer,
    /// Records under the new head, which is not on the device yet.
    next: Option<Layer>,
}

/// Records under one generation of a segment.
#[derive(Debug, Default)]
struct Layer {
    generation: u64,
    namespaces: BTreeSet<Namespace>,
    /// Namespaces outside the list may have records too.
    is_partial: bool,
}

impl Holdings {
    /// Holdings of a file without records.
    pub(crate) fn new(segments: u32) -> Holdings {
        Holdings { segments: (0..segments).map(|_| Held::default()).collect(), is_unknown: false }
    }

    /// Sets what recovery found in a segment. With `is_partial`, other namespaces may have records there too.
    pub(crate) fn found(
        &mut self,
        segment: SegmentNumber,
        generation: u64,
        namespaces: BTreeSet<Namespace>,
        is_partial: bool,
    ) {
        self.segments[segment.index()].now = Layer { generation, namespaces, is_partial };
    }

    /// Called when recovery cannot read a segment: from then on every namespace may have records.
    pub(crate) fn unreadable(&mut self) {
        self.is_unknown = true;
    }

    /// Called when a segment's records were made void for good.
    pub(crate) fn erased(&mut self, segment: SegmentNumber, generation: u64) {
        self.segments[segment.index()] = Held { now: Layer { generation, ..Layer::default() }, next: None };
    }

    /// Called when a segment is opened; its new head is not written yet.
    pub(crate) fn opened(&mut self, segment: SegmentNumber, generation: u64) {
        let held = &mut self.segments[segment.index()];
        if let Some(failed) = held.next.take() {
            // The previous head failed, so it may or may not be on the device: keep both layers.
            held.now.generation = held.now.generation.min(failed.generation);
            held.now.namespaces.extend(failed.namespaces);
            held.now.is_partial |= failed.is_partial;
        }
        held.next = Some(Layer { generation, ..Layer::default() });
    }

    /// Called when the new head is on the device, which makes the segment's former records void.
    pub(crate) fn head_written(&mut self, segment: SegmentNumber) {
        let held = &mut self.segments[segment.index()];
        if let Some(next) = held.next.take() {
            held.now = next;
        }
    }

    /// Called before a record of the namespace is written to the segment.
    pub(crate) fn appended(&mut self, segment: SegmentNumber, namespace: Namespace) {
        let Held { now, next } = &mut self.segments[segment.index()];
        next.as_mut().unwrap_or(now).namespaces.insert(namespace);
    }

    /// The namespaces that may have records in a segment, and whether the list is complete.
    pub(crate) fn namespaces(&self, segment: SegmentNumber) -> (BTreeSet<Namespace>, bool) {
        let Held { now, next } = &self.segments[segment.index()];
        let layer = next.as_ref().unwrap_or(now);
        (layer.namespaces.clone(), !layer.is_partial)
    }

    /// Whether a segment of this generation or a lower one may hold a record of the namespace.
    pub(crate) fn may_hold(&self, namespace: &Namespace, up_to: u64) -> bool {
        let holds = |layer: &Layer| {
            layer.generation <= up_to && (layer.is_partial || layer.namespaces.contains(namespace))
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
