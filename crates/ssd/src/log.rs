//! [`Log`]: the segments of one device, and which of them is free, open, sealed or being emptied. Pure.
//!
//! ```text
//!         open_segment            full, or close_open        nothing in flight, table written
//!  Free ---------------> open --------------------> finishing ------------------------------> Sealed
//!   ^                                                   |                                        |
//!   +--- the head failed, nothing in flight ------------'                         start_cleaning |
//!   '--- finish_cleaning: kept records copied, no read pins it ----------------- Cleaned <-------'
//! ```
//!
//! - Every opened segment gets a higher generation than all before it, so that its former structures do not count.
//! - Callers' writes never take the last free segment. Copies need it, and without them no segment could be emptied.
//! - `append` always leaves room for the segment's table and foot.

use std::collections::{BTreeSet, VecDeque};

use kvlane_block::Space;

use crate::index::Live;
use crate::layout::{PAGE_BYTES, SegmentNumber, table_bytes};

/// Cleaning begins when this many segments, or fewer, are free. Half as many in a file below `SMALL_FILE` segments.
const FREE_SEGMENTS: usize = 2;
const SMALL_FILE: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentState {
    Free,
    /// Open, or full and waiting for its table.
    Busy,
    /// Its table is written, or failed: then its headers stand in for it.
    Sealed,
    /// Being emptied; copies of its records may be in flight.
    Cleaned,
    /// Its generation could not be read, so this run never writes to it.
    Unread,
}

/// Whether the head of an open segment is on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadState {
    Awaited,
    Written,
    /// No record in the segment counts.
    Failed,
}

/// A segment that is open, or full and waiting for its table.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    pub(crate) segment: SegmentNumber,
    pub(crate) generation: u64,
    pub(crate) head: HeadState,
    /// First page that is not allocated.
    pub(crate) tail: u32,
    /// First pages of the records whose writes are in flight.
    pub(crate) in_flight: BTreeSet<u32>,
    records: usize,
    spaces: Vec<Space>,
    /// A record was stored since the last checkpoint.
    pub(crate) changed: bool,
    /// A table of the segment is being written.
    pub(crate) table: bool,
    /// The table that is being written is the segment's last.
    sealing: bool,
}

/// The segment that is being emptied.
#[derive(Debug)]
pub(crate) struct Cleaning {
    pub(crate) segment: SegmentNumber,
    /// Records that are still to be copied to the log's end.
    pub(crate) left: VecDeque<Live>,
    /// A copy is in flight; there is at most one.
    pub(crate) copying: bool,
}

/// Where a record that is appended comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordSource {
    /// Callers' writes.
    Writes,
    /// Records that cleaning copies, which frees their segment.
    Copies,
}

/// The segments of a device.
pub(crate) struct Log {
    segment_pages: u32,
    states: Vec<(SegmentState, u64)>,
    free: VecDeque<SegmentNumber>,
    pub(crate) open: Option<OpenSegment>,
    /// Full segments, which wait for their writes in flight, then for their tables.
    pub(crate) finishing: Vec<OpenSegment>,
    pub(crate) cleaning: Option<Cleaning>,
    next_generation: u64,
}

impl Log {
    /// A log of free segments. Recovery then reports the used ones with [`Log::add_recovered`] and [`Log::exclude`].
    pub(crate) fn new(segments: u32, segment_pages: u32) -> Log {
        Log {
            segment_pages,
            states: vec![(SegmentState::Free, 0); segments as usize],
            free: (0..segments).map(SegmentNumber).collect(),
            open: None,
            finishing: Vec::new(),
            cleaning: None,
            next_generation: 1,
        }
    }

    /// Adds a recovered segment that holds records. With `tail`, the end of its records, its table is missing and will be
    /// written.
    pub(crate) fn add_recovered(&mut self, segment: SegmentNumber, generation: u64, tail: Option<u32>) {
        self.free.retain(|free| *free != segment);
        self.states[segment.index()] =
            (if tail.is_some() { SegmentState::Busy } else { SegmentState::Sealed }, generation);
        self.observe_generation(generation);
        if let Some(tail) = tail {
            self.finishing.push(OpenSegment {
                segment,
                generation,
                head: HeadState::Written,
                tail,
                in_flight: BTreeSet::new(),
                records: 0,
                spaces: Vec::new(),
                changed: false,
                table: false,
                sealing: false,
            });
        }
    }

    /// The segments that hold records and are not written to.
    pub(crate) fn sealed(&self) -> impl Iterator<Item = SegmentNumber> {
        let is_sealed = |(_, (state, _)): &(usize, &(SegmentState, u64))| *state == SegmentState::Sealed;
        self.states.iter().enumerate().filter(is_sealed).map(|(number, _)| SegmentNumber(number as u32))
    }

    /// Excludes a segment whose generation could not be read. A new head might get the same generation, which would make
    /// the segment's old records count again. So the segment stays unused until a start can read it.
    pub(crate) fn exclude(&mut self, segment: SegmentNumber) {
        self.free.retain(|free| *free != segment);
        self.states[segment.index()] = (SegmentState::Unread, 0);
    }

    /// Makes all later segments get higher generations than this one.
    pub(crate) fn observe_generation(&mut self, generation: u64) {
        self.next_generation = self.next_generation.max(generation.saturating_add(1));
    }

    /// Takes the next generation, for a segment that is erased and stays free.
    pub(crate) fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
    }

    /// The highest generation that was seen or taken.
    pub(crate) fn last_generation(&self) -> u64 {
        self.next_generation - 1
    }

    pub(crate) fn generation(&self, segment: SegmentNumber) -> u64 {
        self.states[segment.index()].1
    }

    pub(crate) fn free_segments(&self) -> u32 {
        self.free.len() as u32
    }

    /// Opens a free segment, whose head the caller has to write. None if a segment is open, or none is free for `source`.
    pub(crate) fn open_segment(&mut self, source: RecordSource) -> Option<(SegmentNumber, u64)> {
        // Keep the last free segment for copies, because without it no segment could be emptied any more.
        let kept = match source {
            RecordSource::Writes => 1,
            RecordSource::Copies => 0,
        };
        if self.open.is_some() || self.free.len() <= kept {
            return None;
        }
        let segment = self.free.pop_front()?;
        let generation = self.next_generation;
        self.next_generation += 1;
        self.states[segment.index()] = (SegmentState::Busy, generation);
        self.open = Some(OpenSegment {
            segment,
            generation,
            head: HeadState::Awaited,
            tail: 1,
            in_flight: BTreeSet::new(),
            records: 0,
            spaces: Vec::new(),
            changed: false,
            table: false,
            sealing: false,
        });
        Some((segment, generation))
    }

    /// Allocates room for a record in the open segment: returns the segment and the record's first page. None if the
    /// record does not fit, or no segment is open.
    pub(crate) fn append(
        &mut self,
        pages: u32,
        space: &Space,
        source: RecordSource,
    ) -> Option<(SegmentNumber, u32)> {
        // While a segment is emptied and none is free, the open segment's room belongs to the copies.
        if source == RecordSource::Writes && self.cleaning.is_some() && self.free.is_empty() {
            return None;
        }
        let last_page = self.segment_pages - 1;
        let open = self.open.as_mut().filter(|open| open.head != HeadState::Failed)?;
        let new_space = !open.spaces.contains(space);
        let table = table_pages(open.records + 1, open.spaces.len() + usize::from(new_space));
        if u64::from(open.tail) + u64::from(pages) + table > u64::from(last_page) {
            return None;
        }
        if new_space {
            open.spaces.push(*space);
        }
        let page = open.tail;
        open.tail += pages;
        open.records += 1;
        open.in_flight.insert(page);
        Some((open.segment, page))
    }

    /// Ends the open segment: no more records are appended to it.
    pub(crate) fn close_open(&mut self) {
        self.finishing.extend(self.open.take());
    }

    /// The segment, if it is open or waits for its table.
    pub(crate) fn unsealed(&mut self, segment: SegmentNumber) -> Option<&mut OpenSegment> {
        self.open.iter_mut().chain(&mut self.finishing).find(|open| open.segment == segment)
    }

    /// Called when the write of a segment's head has ended. A failed head closes the open segment.
    pub(crate) fn head_ended(&mut self, segment: SegmentNumber, head: HeadState) {
        if let Some(open) = self.unsealed(segment) {
            open.head = head;
        }
        if head == HeadState::Failed && self.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.close_open();
        }
    }

    /// Called when the write of a record has ended.
    pub(crate) fn record_ended(&mut self, segment: SegmentNumber, page: u32, stored: bool) {
        if let Some(open) = self.unsealed(segment) {
            open.in_flight.remove(&page);
            open.changed |= stored;
        }
    }

    /// Allocates room for the open segment's table at a checkpoint; returns its first page. None if no record and final
    /// table would fit behind it: then the segment is to be closed instead.
    pub(crate) fn checkpoint_room(&mut self) -> Option<u32> {
        let last_page = self.segment_pages - 1;
        let open = self.open.as_mut()?;
        let now = table_pages(open.records, open.spaces.len());
        let later = table_pages(open.records + 1, open.spaces.len() + 1);
        if u64::from(open.tail) + now + later > u64::from(last_page) {
            return None;
        }
        let page = open.tail;
        open.tail += now as u32;
        Some(page)
    }

    /// Takes a full segment that has no write in flight and needs its last table. Each is returned once. Also frees the
    /// full segments whose head failed.
    pub(crate) fn next_to_seal(&mut self) -> Option<SegmentNumber> {
        while let Some(index) =
            self.finishing.iter().position(|open| open.head == HeadState::Failed && open.in_flight.is_empty())
        {
            let open = self.finishing.swap_remove(index);
            self.states[open.segment.index()].0 = SegmentState::Free;
            self.free.push_back(open.segment);
        }
        let ready = |open: &&mut OpenSegment| {
            open.head == HeadState::Written && open.in_flight.is_empty() && !open.table
        };
        let open = self.finishing.iter_mut().find(ready)?;
        (open.table, open.sealing) = (true, true);
        Some(open.segment)
    }

    /// Called when a segment's foot was written, or its table or foot failed: then the segment's headers stand in for it.
    pub(crate) fn table_ended(&mut self, segment: SegmentNumber) {
        if let Some(index) = self.finishing.iter().position(|open| open.segment == segment && open.sealing) {
            self.finishing.swap_remove(index);
            self.states[segment.index()].0 = SegmentState::Sealed;
        } else if let Some(open) = self.unsealed(segment) {
            open.table = false;
        }
    }

    /// The segments that may be emptied, the oldest first, if few are free and none is being emptied. They are among the
    /// oldest `window(n)` of the `n` that hold records. None while all of those wait for their tables: on a slow device
    /// later segments may have theirs before, and would go although they are newer.
    pub(crate) fn cleaning_candidates(&self, window: fn(usize) -> usize) -> Option<Vec<SegmentNumber>> {
        let enough = if self.states.len() >= SMALL_FILE { FREE_SEGMENTS } else { FREE_SEGMENTS / 2 };
        if self.cleaning.is_some() || self.free.len() > enough {
            return None;
        }
        let mut full: Vec<(u64, SegmentNumber)> =
            self.finishing.iter().map(|open| (open.generation, open.segment)).collect();
        full.extend(self.sealed().map(|segment| (self.generation(segment), segment)));
        full.sort_unstable();
        full.truncate(window(full.len()));
        let is_sealed = |segment: &SegmentNumber| self.states[segment.index()].0 == SegmentState::Sealed;
        let oldest: Vec<SegmentNumber> =
            full.into_iter().map(|(_, segment)| segment).filter(is_sealed).collect();
        (!oldest.is_empty()).then_some(oldest)
    }

    /// Starts to empty a segment; `kept` lists the records to copy.
    pub(crate) fn start_cleaning(&mut self, segment: SegmentNumber, kept: Vec<Live>) {
        self.states[segment.index()].0 = SegmentState::Cleaned;
        self.cleaning = Some(Cleaning { segment, left: kept.into(), copying: false });
    }

    /// Frees the segment that was being emptied.
    pub(crate) fn finish_cleaning(&mut self) {
        if let Some(cleaning) = self.cleaning.take() {
            self.states[cleaning.segment.index()].0 = SegmentState::Free;
            self.free.push_back(cleaning.segment);
        }
    }

    /// Whether a copy could be appended: a segment is open or free.
    pub(crate) fn has_room_for_copies(&self) -> bool {
        self.open.is_some() || !self.free.is_empty()
    }
}

/// The largest record, in pages, that fits into an empty segment.
pub(crate) fn largest_record(segment_pages: u32) -> u32 {
    // One page each for the head, the foot, and the table of one record.
    segment_pages.saturating_sub(3)
}

fn table_pages(records: usize, spaces: usize) -> u64 {
    // One more space for the mark `Table::NAMES_ALL`.
    table_bytes(records, spaces + 1).div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use kvlane_block::{CutDigest, Namespace};

    use super::*;

    const SPACE: Space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };

    fn fill(log: &mut Log, source: RecordSource) -> Vec<u32> {
        let (segment, _) = log.open_segment(source).unwrap();
        log.head_ended(segment, HeadState::Written);
        let mut pages = Vec::new();
        while let Some((_, page)) = log.append(3, &SPACE, source) {
            log.record_ended(segment, page, true);
            pages.push(page);
        }
        log.close_open();
        assert_eq!(log.next_to_seal(), Some(segment));
        log.table_ended(segment);
        pages
    }

    #[test]
    fn a_segment_is_filled_with_room_left_for_its_table() {
        let mut log = Log::new(8, 16);
        assert_eq!(fill(&mut log, RecordSource::Writes), [1, 4, 7, 10]);
        assert_eq!(largest_record(16), 13);
        log.open_segment(RecordSource::Writes).unwrap();
        assert!(log.append(14, &SPACE, RecordSource::Writes).is_none());
        assert!(log.append(13, &SPACE, RecordSource::Writes).is_some());
    }

    #[test]
    fn the_last_free_segment_is_for_copies_and_what_was_emptied_is_free() {
        let mut log = Log::new(4, 16);
        for _ in 0..3 {
            fill(&mut log, RecordSource::Writes);
        }
        assert_eq!(log.open_segment(RecordSource::Writes), None);
        assert_eq!(log.cleaning_candidates(|full| full).unwrap(), [0, 1, 2].map(SegmentNumber));
        assert_eq!(log.cleaning_candidates(|full| full - 1).unwrap(), [0, 1].map(SegmentNumber));
        log.start_cleaning(SegmentNumber(0), Vec::new());
        assert_eq!(log.cleaning_candidates(|full| full), None);
        let (segment, generation) = log.open_segment(RecordSource::Copies).unwrap();
        assert_eq!((segment, generation), (SegmentNumber(3), 4));
        assert!(log.append(3, &SPACE, RecordSource::Writes).is_none(), "copies come first");
        assert!(log.append(3, &SPACE, RecordSource::Copies).is_some());
        log.finish_cleaning();
        assert!(log.append(3, &SPACE, RecordSource::Writes).is_some());
        assert_eq!(log.free_segments(), 1);
    }

    #[test]
    fn a_segment_whose_head_failed_is_free_when_nothing_is_in_flight() {
        let mut log = Log::new(4, 16);
        let (segment, _) = log.open_segment(RecordSource::Writes).unwrap();
        let (_, page) = log.append(3, &SPACE, RecordSource::Writes).unwrap();
        log.head_ended(segment, HeadState::Failed);
        assert!(log.open.is_none() && log.next_to_seal().is_none());
        assert_eq!(log.free_segments(), 3);
        log.record_ended(segment, page, false);
        assert!(log.next_to_seal().is_none());
        assert_eq!(log.free_segments(), 4);
    }

    #[test]
    fn checkpoints_take_room_and_a_segment_without_room_for_one_is_closed() {
        let mut log = Log::new(4, 8);
        log.open_segment(RecordSource::Writes).unwrap();
        log.append(1, &SPACE, RecordSource::Writes).unwrap();
        assert_eq!(log.checkpoint_room(), Some(2));
        assert_eq!(log.append(1, &SPACE, RecordSource::Writes), Some((SegmentNumber(0), 3)));
        assert_eq!(log.checkpoint_room(), Some(4));
        assert_eq!(log.checkpoint_room(), Some(5));
        assert_eq!(log.checkpoint_room(), None);
        assert_eq!(log.append(1, &SPACE, RecordSource::Writes), None);
    }

    #[test]
    fn what_was_found_is_not_free_and_generations_go_on() {
        let mut log = Log::new(4, 16);
        log.add_recovered(SegmentNumber(2), 7, None);
        log.add_recovered(SegmentNumber(0), 9, Some(5));
        log.observe_generation(12);
        assert_eq!(log.free_segments(), 2);
        assert_eq!(log.next_to_seal(), Some(SegmentNumber(0)));
        assert_eq!(log.open_segment(RecordSource::Writes), Some((SegmentNumber(1), 13)));
    }
}
