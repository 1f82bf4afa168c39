//! Cleaning: empties a segment to free it. Records that deserve it are copied to the log's end, the others are dropped.
//!
//! ```text
//!  few segments free -> choose a sealed one -> drop its other records from the index -> copy the kept ones, one by one
//!                                                                                           |
//!                                 no reads pin it any more -> free <------------------------'
//! ```

use std::sync::atomic::Ordering;

use kvlane_block::BlockKey;
use kvlane_policy::{Cleaner, Memo, Worth};

use super::Device;
use crate::index::{Live, Location};
use crate::job::Purpose;
use crate::layout::{PAGE_BYTES, RecordHeader, SegmentNumber, header_pages};
use crate::log::RecordSource;
use crate::pages::Pages;
use crate::read::{identify, shards_are_right};
use crate::stats::Counters;

impl Device {
    pub(super) fn clean(&mut self) {
        if self.is_closing() && self.queued_writes.is_empty() {
            return;
        }
        if let Some(oldest) = self.log.cleaning_candidates(Cleaner::window) {
            let live: Vec<Vec<Live>> = oldest.iter().map(|&segment| self.live(segment)).collect();
            let worths: Vec<Vec<Worth>> = live.iter().map(|live| self.worths(live)).collect();
            let Some(chosen) = self.cleaner.choose(&worths) else { return };
            let has_room = self.log.has_room_for_copies() && !self.is_closing();
            let room_in = if has_room { self.superblock.segment_pages() } else { 0 };
            let kept = self.cleaner.split(&worths[chosen], room_in);
            self.report_given_up();
            self.empty(oldest[chosen], &live[chosen], &kept);
        }
        self.copy_next();
    }

    /// Reports to the judge at which hit density the tier gives up records. That is the lowest of the devices', because
    /// a block goes to whichever device has room.
    fn report_given_up(&self) {
        let Some(judge) = self.shared.judge.get() else { return };
        let least = {
            let mut of_devices = self.shared.given_up.lock();
            of_devices[usize::from(self.number)] = self.cleaner.given_up();
            of_devices.iter().map(|density| density.unwrap_or(0.0)).fold(f32::MAX, f32::min)
        };
        judge.given_up(least);
    }

    /// The records of a segment that the index has.
    fn live(&self, segment: SegmentNumber) -> Vec<Live> {
        self.shared.index.lock().index.live(self.number, segment)
    }

    /// The worth of each record to the cleaner: its size, its reads, and its hit density if the judge can tell.
    fn worths(&self, live: &[Live]) -> Vec<Worth> {
        let known: Vec<(BlockKey, Memo)> = live.iter().map(|live| (live.key, live.memo)).collect();
        let densities = self.shared.judge.get().and_then(|judge| judge.densities(&known));
        let density = |at: usize| densities.as_ref().and_then(|densities| densities.get(at).copied());
        let worth =
            |(at, &Live { pages, reads, .. }): (usize, &Live)| Worth { pages, reads, density: density(at) };
        live.iter().enumerate().map(worth).collect()
    }

    /// Begins to empty a segment: removes the records that are not kept from the index, and lists the others for copying.
    fn empty(&mut self, segment: SegmentNumber, live: &[Live], kept: &[bool]) {
        let (mut left, mut dropped) = (Vec::new(), 0);
        let mut stored = self.shared.index.lock();
        for (live, &kept) in live.iter().zip(kept) {
            if kept {
                left.push(*live);
            } else {
                // The block may have been removed and stored elsewhere since the records were listed.
                let from = location(self.number, segment, live);
                dropped += u64::from(stored.index.remove_at(&live.key, from));
            }
        }
        drop(stored);
        Counters::add(&self.shared.counters.blocks_dropped, dropped);
        self.log.start_cleaning(segment, left);
    }

    /// Starts to copy the next record of the segment being emptied. After the last one, frees the segment if no read
    /// pins it.
    pub(super) fn copy_next(&mut self) {
        let Some(cleaning) = self.log.cleaning.as_mut() else { return };
        if cleaning.copying {
            return;
        }
        let segment = cleaning.segment;
        while let Some(live) = cleaning.left.pop_front() {
            let from = location(self.number, segment, &live);
            if self.shared.index.lock().index.find(&live.key) != Some(from) {
                continue;
            }
            cleaning.copying = true;
            let buffer = Pages::new(live.pages as usize * PAGE_BYTES as usize);
            let (id, piece) = (self.id(), buffer.piece(buffer.len()));
            let offset = self.superblock.offset(segment, live.page);
            self.start(id, Purpose::CopyIn { live, from, buffer }, offset, &[piece]);
            return;
        }
        if self.device.pins[segment.index()].load(Ordering::Acquire) == 0 {
            self.shared.index.lock().index.segment_emptied(self.number, segment);
            self.log.finish_cleaning();
            Counters::add(&self.shared.counters.segments_cleaned, 1);
        }
    }

    pub(super) fn end_copy(&mut self) {
        if let Some(cleaning) = self.log.cleaning.as_mut() {
            cleaning.copying = false;
        }
    }

    /// Writes a record that was read for copying to the log's end. If the record is damaged or there is no room, it is
    /// dropped instead.
    pub(super) fn copy_out(&mut self, live: Live, from: Location, mut buffer: Pages, failed: bool) {
        let generation = self.log.generation(from.segment);
        let header = identify(&self.superblock, generation, &from, &live.key, buffer.bytes());
        let whole = header.filter(|header| {
            let start = (header_pages(header.shards.len()) * PAGE_BYTES) as usize;
            !failed && shards_are_right(header, &buffer.bytes()[start..])
        });
        let allocated = match whole {
            Some(_) => self.allocate(live.pages, &live.key.space, RecordSource::Copies),
            None => None,
        };
        let (Some(header), Some((segment, page))) = (whole, allocated) else {
            if self.shared.index.lock().index.remove_at(&live.key, from) {
                Counters::add(&self.shared.counters.blocks_dropped, 1);
            }
            self.end_copy();
            return;
        };
        let header = RecordHeader { generation: self.log.generation(segment), segment, page, ..header };
        let bytes = header.encode();
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        let to = Location { segment, page, ..from };
        let (id, piece, offset) =
            (self.id(), buffer.piece(buffer.len()), self.superblock.offset(segment, page));
        self.start(id, Purpose::CopyOut { live, from, to, buffer }, offset, &[piece]);
    }

    /// Ends a copy: moves the block's index entry to the copy, or drops the block if the copy failed.
    pub(super) fn copy_ended(&mut self, live: &Live, from: Location, to: Location, stored: bool) {
        self.log.record_ended(to.segment, to.page, stored);
        let mut stored_now = self.shared.index.lock();
        if stored && stored_now.index.relocate(&live.key, from, to) {
            Counters::add(&self.shared.counters.blocks_kept, 1);
        } else if stored_now.index.remove_at(&live.key, from) {
            Counters::add(&self.shared.counters.blocks_dropped, 1);
        }
        drop(stored_now);
        self.end_copy();
    }
}

fn location(device: u8, segment: SegmentNumber, live: &Live) -> Location {
    Location { device, segment, page: live.page, pages: live.pages }
}
