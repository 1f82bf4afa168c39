//! Which segment is written, filled up, emptied: the bookkeeping of a device's log. Pure.

use std::collections::{BTreeSet, VecDeque};

use kvlane_block::Space;

use crate::index::Live;
use crate::layout::{PAGE_BYTES, SegmentNumber, table_bytes};

/// Cleaning begins when only so many segments are free; fewer in a small file.
const FREE_SEGMENTS: usize = 2;
const SMALL_FILE: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// Written, or complete but for its table.
    Busy,
    Sealed,
    Cleaned,
    /// Nothing is known of it, and nothing is written to it in this run.
    Unread,
}

/// Whether the head of a segment is on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    Awaited,
    Written,
    /// Nothing in the segment counts.
    Failed,
}

/// A segment that is written.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) segment: SegmentNumber,
    pub(crate) generation: u64,
    pub(crate) head: Head,
    /// First page that is not given to anybody.
    pub(crate) tail: u32,
    /// First pages of records that are being written.
    pub(crate) in_flight: BTreeSet<u32>,
    records: usize,
    spaces: Vec<Space>,
    /// Something was stored since the last checkpoint.
    pub(crate) changed: bool,
    /// Its table is being written.
    pub(crate) table: bool,
    /// That table is its last.
    sealing: bool,
}

/// A segment that is emptied.
#[derive(Debug)]
pub(crate) struct Cleaning {
    pub(crate) segment: SegmentNumber,
    /// Records to copy on.
    pub(crate) left: VecDeque<Live>,
    /// One is being copied.
    pub(crate) copying: bool,
}

/// Who asks for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    Writes,
    /// What is copied on, which makes room by it.
    Copies,
}

/// The segments of a device.
pub(crate) struct Log {
    segment_pages: u32,
    states: Vec<(State, u64)>,
    free: VecDeque<SegmentNumber>,
    pub(crate) open: Option<Open>,
    /// Full; wait for what is in flight, then for their tables.
    pub(crate) finishing: Vec<Open>,
    pub(crate) cleaning: Option<Cleaning>,
    next_generation: u64,
}

impl Log {
    /// A log whose segments are all free, but for those that [`Log::found`] names afterwards.
    pub(crate) fn new(segments: u32, segment_pages: u32) -> Log {
        Log {
            segment_pages,
            states: vec![(State::Free, 0); segments as usize],
            free: (0..segments).map(SegmentNumber).collect(),
            open: None,
            finishing: Vec::new(),
            cleaning: None,
            next_generation: 1,
        }
    }

    /// A segment that holds records from before. With `tail`, the end of them, its table is missing and will be written.
    pub(crate) fn found(&mut self, segment: SegmentNumber, generation: u64, tail: Option<u32>) {
        self.free.retain(|free| *free != segment);
        self.states[segment.index()] = (if tail.is_some() { State::Busy } else { State::Sealed }, generation);
        self.generation_seen(generation);
        if let Some(tail) = tail {
            self.finishing.push(Open {
                segment,
                generation,
                head: Head::Written,
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

    /// Of a segment it could not be read which generation it has. A new head might get the same one, and would make its old
    /// records count again: so it is left alone until a start can read it.
    pub(crate) fn unread(&mut self, segment: SegmentNumber) {
        self.free.retain(|free| *free != segment);
        self.states[segment.index()] = (State::Unread, 0);
    }

    /// Later segments get higher generations.
    pub(crate) fn generation_seen(&mut self, generation: u64) {
        self.next_generation = self.next_generation.max(generation.saturating_add(1));
    }

    /// A generation for a segment that stays free.
    pub(crate) fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
    }

    /// The highest generation so far.
    pub(crate) fn last_generation(&self) -> u64 {
        self.next_generation - 1
    }

    pub(crate) fn generation(&self, segment: SegmentNumber) -> u64 {
        self.states[segment.index()].1
    }

    pub(crate) fn free_segments(&self) -> u32 {
        self.free.len() as u32
    }

    /// Opens a segment; its head is to be written. None if there is no room for that.
    pub(crate) fn open_segment(&mut self, whom: For) -> Option<(SegmentNumber, u64)> {
        // The last free segment is kept for copies: without it nothing could be emptied any more.
        let kept = match whom {
            For::Writes => 1,
            For::Copies => 0,
        };
        if self.open.is_some() || self.free.len() <= kept {
            return None;
        }
        let segment = self.free.pop_front()?;
        let generation = self.next_generation;
        self.next_generation += 1;
        self.states[segment.index()] = (State::Busy, generation);
        self.open = Some(Open {
            segment,
            generation,
            head: Head::Awaited,
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

    /// Room for a record in the open segment: its segment and first page. None if it does not fit in there.
    pub(crate) fn append(&mut self, pages: u32, space: &Space, whom: For) -> Option<(SegmentNumber, u32)> {
        // What is copied from the last segment that can be emptied must find its room.
        if whom == For::Writes && self.cleaning.is_some() && self.free.is_empty() {
            return None;
        }
        let last_page = self.segment_pages - 1;
        let open = self.open.as_mut().filter(|open| open.head != Head::Failed)?;
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

    /// No more is appended to the open segment.
    pub(crate) fn close_open(&mut self) {
        self.finishing.extend(self.open.take());
    }

    /// A segment that is written or waits for its table.
    pub(crate) fn written(&mut self, segment: SegmentNumber) -> Option<&mut Open> {
        self.open.iter_mut().chain(&mut self.finishing).find(|open| open.segment == segment)
    }

    /// The head of a segment was written, or could not be.
    pub(crate) fn head_ended(&mut self, segment: SegmentNumber, head: Head) {
        if let Some(open) = self.written(segment) {
            open.head = head;
        }
        if head == Head::Failed && self.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.close_open();
        }
    }

    /// A record is not in flight any more.
    pub(crate) fn record_ended(&mut self, segment: SegmentNumber, page: u32, stored: bool) {
        if let Some(open) = self.written(segment) {
            open.in_flight.remove(&page);
            open.changed |= stored;
        }
    }

    /// Room for the table of the open segment at a checkpoint, with what must follow it; None if the segment is to be
    /// closed instead.
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

    /// Full segments in which nothing is in flight any more. Those whose head failed are free at once; the others, given
    /// out once, need their tables.
    pub(crate) fn finished(&mut self) -> Option<SegmentNumber> {
        while let Some(index) =
            self.finishing.iter().position(|open| open.head == Head::Failed && open.in_flight.is_empty())
        {
            let open = self.finishing.swap_remove(index);
            self.states[open.segment.index()].0 = State::Free;
            self.free.push_back(open.segment);
        }
        let ready = |open: &&mut Open| open.head == Head::Written && open.in_flight.is_empty() && !open.table;
        let open = self.finishing.iter_mut().find(ready)?;
        (open.table, open.sealing) = (true, true);
        Some(open.segment)
    }

    /// The table of a segment was written, or could not be; then the segment's headers stand for it.
    pub(crate) fn table_ended(&mut self, segment: SegmentNumber) {
        if let Some(index) = self.finishing.iter().position(|open| open.segment == segment && open.sealing) {
            self.finishing.swap_remove(index);
            self.states[segment.index()].0 = State::Sealed;
        } else if let Some(open) = self.written(segment) {
            open.table = false;
        }
    }

    /// Generations and numbers of the segments that may be emptied, if one should be.
    pub(crate) fn to_clean(&self) -> Option<Vec<(u64, SegmentNumber)>> {
        let enough = if self.states.len() >= SMALL_FILE { FREE_SEGMENTS } else { FREE_SEGMENTS / 2 };
        if self.cleaning.is_some() || self.free.len() > enough {
            return None;
        }
        let sealed = self.states.iter().enumerate().filter(|(_, (state, _))| *state == State::Sealed);
        let sealed: Vec<_> =
            sealed.map(|(segment, &(_, generation))| (generation, SegmentNumber(segment as u32))).collect();
        (!sealed.is_empty()).then_some(sealed)
    }

    /// A segment is emptied from now on.
    pub(crate) fn clean(&mut self, segment: SegmentNumber, kept: Vec<Live>) {
        self.states[segment.index()].0 = State::Cleaned;
        self.cleaning = Some(Cleaning { segment, left: kept.into(), copying: false });
    }

    /// The segment being emptied is empty.
    pub(crate) fn cleaned(&mut self) {
        if let Some(cleaning) = self.cleaning.take() {
            self.states[cleaning.segment.index()].0 = State::Free;
            self.free.push_back(cleaning.segment);
        }
    }

    /// Whether copies have any room to go to.
    pub(crate) fn has_room_for_copies(&self) -> bool {
        self.open.is_some() || !self.free.is_empty()
    }
}

/// Largest record, in pages, that fits into an empty segment.
pub(crate) fn largest_record(segment_pages: u32) -> u32 {
    // Head, foot, and the table of one record.
    segment_pages.saturating_sub(3)
}

fn table_pages(records: usize, spaces: usize) -> u64 {
    // And the mark that the table names all spaces.
    table_bytes(records, spaces + 1).div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use kvlane_block::{CutDigest, Namespace};

    use super::*;

    const SPACE: Space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };

    fn fill(log: &mut Log, whom: For) -> Vec<u32> {
        let (segment, _) = log.open_segment(whom).unwrap();
        log.head_ended(segment, Head::Written);
        let mut pages = Vec::new();
        while let Some((_, page)) = log.append(3, &SPACE, whom) {
            log.record_ended(segment, page, true);
            pages.push(page);
        }
        log.close_open();
        assert_eq!(log.finished(), Some(segment));
        log.table_ended(segment);
        pages
    }

    #[test]
    fn a_segment_is_filled_with_room_left_for_its_table() {
        let mut log = Log::new(8, 16);
        assert_eq!(fill(&mut log, For::Writes), [1, 4, 7, 10]);
        assert_eq!(largest_record(16), 13);
        log.open_segment(For::Writes).unwrap();
        assert!(log.append(14, &SPACE, For::Writes).is_none());
        assert!(log.append(13, &SPACE, For::Writes).is_some());
    }

    #[test]
    fn the_last_free_segment_is_for_copies_and_what_was_emptied_is_free() {
        let mut log = Log::new(4, 16);
        for _ in 0..3 {
            fill(&mut log, For::Writes);
        }
        assert_eq!(log.open_segment(For::Writes), None);
        let sealed = log.to_clean().unwrap();
        assert_eq!(
            sealed,
            [(1, 0), (2, 1), (3, 2)].map(|(generation, number)| (generation, SegmentNumber(number)))
        );
        log.clean(SegmentNumber(0), Vec::new());
        assert_eq!(log.to_clean(), None);
        let (segment, generation) = log.open_segment(For::Copies).unwrap();
        assert_eq!((segment, generation), (SegmentNumber(3), 4));
        assert!(log.append(3, &SPACE, For::Writes).is_none(), "copies come first");
        assert!(log.append(3, &SPACE, For::Copies).is_some());
        log.cleaned();
        assert!(log.append(3, &SPACE, For::Writes).is_some());
        assert_eq!(log.free_segments(), 1);
    }

    #[test]
    fn a_segment_whose_head_failed_is_free_when_nothing_is_in_flight() {
        let mut log = Log::new(4, 16);
        let (segment, _) = log.open_segment(For::Writes).unwrap();
        let (_, page) = log.append(3, &SPACE, For::Writes).unwrap();
        log.head_ended(segment, Head::Failed);
        assert!(log.open.is_none() && log.finished().is_none());
        assert_eq!(log.free_segments(), 3);
        log.record_ended(segment, page, false);
        assert!(log.finished().is_none());
        assert_eq!(log.free_segments(), 4);
    }

    #[test]
    fn checkpoints_take_room_and_a_segment_without_room_for_one_is_closed() {
        let mut log = Log::new(4, 8);
        log.open_segment(For::Writes).unwrap();
        log.append(1, &SPACE, For::Writes).unwrap();
        assert_eq!(log.checkpoint_room(), Some(2));
        assert_eq!(log.append(1, &SPACE, For::Writes), Some((SegmentNumber(0), 3)));
        assert_eq!(log.checkpoint_room(), Some(4));
        assert_eq!(log.checkpoint_room(), Some(5));
        assert_eq!(log.checkpoint_room(), None);
        assert_eq!(log.append(1, &SPACE, For::Writes), None);
    }

    #[test]
    fn what_was_found_is_not_free_and_generations_go_on() {
        let mut log = Log::new(4, 16);
        log.found(SegmentNumber(2), 7, None);
        log.found(SegmentNumber(0), 9, Some(5));
        log.generation_seen(12);
        assert_eq!(log.free_segments(), 2);
        assert_eq!(log.finished(), Some(SegmentNumber(0)));
        assert_eq!(log.open_segment(For::Writes), Some((SegmentNumber(1), 13)));
    }
}
