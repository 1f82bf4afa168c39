//! Segments are emptied, and what was read goes to the log's end.

use std::sync::atomic::Ordering;

use super::Device;
use crate::cleaning::{self, Worth};
use crate::index::{Live, Location};
use crate::job::What;
use crate::layout::{PAGE_BYTES, RecordHeader, header_pages};
use crate::log::For;
use crate::pages::Pages;
use crate::read::{identify, shards_are_right};
use crate::stats::Counters;

impl Device {
    pub(super) fn clean(&mut self) {
        if self.closing && self.queued_writes.is_empty() {
            return;
        }
        if let Some(mut sealed) = self.log.to_clean() {
            let mut stored = self.shared.index.lock();
            let worth = |segment| Worth::of(&stored.index.live(self.number, segment));
            let Some(segment) = cleaning::choose(&mut sealed, worth) else { return };
            let live = stored.index.live(self.number, segment);
            let (mut kept, mut dropped) = cleaning::split(live, self.superblock.segment_pages());
            if !self.log.has_room_for_copies() || self.closing {
                dropped.append(&mut kept);
            }
            for live in &dropped {
                stored.index.remove(&live.key);
            }
            drop(stored);
            Counters::add(&self.shared.counters.blocks_dropped, dropped.len() as u64);
            self.log.clean(segment, kept);
        }
        self.copy_next();
    }

    /// Copies the next record of the segment being emptied, or ends its cleaning.
    pub(super) fn copy_next(&mut self) {
        let Some(cleaning) = self.log.cleaning.as_mut() else { return };
        if cleaning.copying {
            return;
        }
        let segment = cleaning.segment;
        while let Some(live) = cleaning.left.pop_front() {
            let from = Location { device: self.number, segment, page: live.page, pages: live.pages };
            if self.shared.index.lock().index.find(&live.key) != Some(from) {
                continue;
            }
            cleaning.copying = true;
            let buffer = Pages::new(live.pages as usize * PAGE_BYTES as usize);
            let (id, piece) = (self.id(), buffer.piece(buffer.len()));
            let offset = self.superblock.offset(segment, live.page);
            self.start(id, What::CopyIn { live, from, buffer }, offset, &[piece]);
            return;
        }
        if self.device.pins[segment.index()].load(Ordering::Acquire) == 0 {
            self.shared.index.lock().index.segment_emptied(self.number, segment);
            self.log.cleaned();
            Counters::add(&self.shared.counters.segments_cleaned, 1);
        }
    }

    pub(super) fn copied(&mut self) {
        if let Some(cleaning) = self.log.cleaning.as_mut() {
            cleaning.copying = false;
        }
    }

    /// A record that was read for its second life goes to the log's end if it is whole and there is room.
    pub(super) fn copy_out(&mut self, live: Live, from: Location, mut buffer: Pages, failed: bool) {
        let generation = self.log.generation(from.segment);
        let header = identify(&self.superblock, generation, &from, &live.key, buffer.bytes());
        let whole = header.filter(|header| {
            let start = (header_pages(header.shards.len()) * PAGE_BYTES) as usize;
            !failed && shards_are_right(header, &buffer.bytes()[start..])
        });
        let place = match whole {
            Some(_) => self.place(live.pages, &live.key.space, For::Copies),
            None => None,
        };
        let (Some(header), Some((segment, page))) = (whole, place) else {
            if self.shared.index.lock().index.remove_at(&live.key, from) {
                Counters::add(&self.shared.counters.blocks_dropped, 1);
            }
            self.copied();
            return;
        };
        let header = RecordHeader { generation: self.log.generation(segment), segment, page, ..header };
        let bytes = header.encode();
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        let to = Location { segment, page, ..from };
        let (id, piece, offset) =
            (self.id(), buffer.piece(buffer.len()), self.superblock.offset(segment, page));
        self.start(id, What::CopyOut { live, from, to, buffer }, offset, &[piece]);
    }

    /// A record was copied to the log's end, or could not be.
    pub(super) fn copy_ended(&mut self, live: &Live, from: Location, to: Location, stored: bool) {
        self.log.record_ended(to.segment, to.page, stored);
        let mut stored_now = self.shared.index.lock();
        if stored && stored_now.index.relocate(&live.key, from, to) {
            Counters::add(&self.shared.counters.blocks_kept, 1);
        } else if stored_now.index.remove_at(&live.key, from) {
            Counters::add(&self.shared.counters.blocks_dropped, 1);
        }
        drop(stored_now);
        self.copied();
    }
}
