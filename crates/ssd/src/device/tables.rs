//! Tables: written behind the records of a full segment, and of the open one at every checkpoint and at the end.
//!
//! A table is written first, then the segment's foot, which points to it. Then one sync covers both. Until the foot is
//! there, the next start finds the segment's records by their headers.

use std::collections::HashMap;
use std::time::Instant;

use kvlane_block::{CutDigest, Space};

use super::Device;
use super::state::SyncState;
use crate::job::Purpose;
use crate::layout::{PAGE_BYTES, SegmentFoot, SegmentNumber, Table, TableRecord, table_bytes};
use crate::log::HeadState;
use crate::pages::Pages;

impl Device {
    pub(super) fn finish_segments(&mut self) {
        while let Some(segment) = self.log.next_to_seal() {
            let Some(open) = self.log.unsealed(segment) else { continue };
            let (tail, generation) = (open.tail, open.generation);
            let scan_from = self.superblock.segment_pages() - 1;
            self.write_table(segment, generation, tail, scan_from);
        }
    }

    pub(super) fn checkpoint(&mut self, now: Instant) {
        if self.is_closing() {
            let writing = !self.queued_writes.is_empty()
                || self.log.open.as_ref().is_some_and(|open| !open.in_flight.is_empty());
            if !writing {
                self.log.close_open();
                self.finish_segments();
            }
        } else if now >= self.next_checkpoint {
            self.next_checkpoint = now + self.checkpoint_interval;
            let open = self.log.open.as_ref();
            let due = open.is_some_and(|open| open.changed && !open.table && open.head == HeadState::Written);
            if due {
                match self.log.checkpoint_room() {
                    None => self.log.close_open(),
                    Some(page) => {
                        if let Some(open) = self.log.open.as_mut() {
                            (open.changed, open.table) = (false, true);
                            // Scan from the first record in flight: later ones may have been written before it.
                            let scan_from = open.in_flight.first().copied().unwrap_or(open.tail);
                            let (segment, generation) = (open.segment, open.generation);
                            self.write_table(segment, generation, page, scan_from);
                        }
                    }
                }
            }
        }
        if self.sync == SyncState::Due && (self.is_closing() || !self.tables_in_flight()) {
            self.sync = SyncState::InFlight;
            let id = self.id();
            self.start(id, Purpose::Sync, 0, &[]);
        }
    }

    pub(super) fn tables_in_flight(&self) -> bool {
        !self.log.finishing.is_empty() || self.log.open.as_ref().is_some_and(|open| open.table)
    }

    pub(super) fn write_table(
        &mut self,
        segment: SegmentNumber,
        generation: u64,
        table_page: u32,
        scan_from: u32,
    ) {
        let live = self.shared.index.lock().index.live(self.number, segment);
        let (held, is_all) = self.device.holdings.lock().namespaces(segment);
        let mut spaces: Vec<Space> = Vec::new();
        let mut numbers: HashMap<Space, u32> = HashMap::new();
        let records = live
            .iter()
            .map(|live| {
                let space = *numbers.entry(live.key.space).or_insert_with(|| {
                    spaces.push(live.key.space);
                    (spaces.len() - 1) as u32
                });
                TableRecord { hash: live.key.hash, space, page: live.page, pages: live.pages }
            })
            .collect();
        // Also name the namespaces whose records in this segment no longer count, because they were dropped or written
        // again elsewhere. The next start needs the names to know which drops the file may forget.
        for namespace in held {
            if spaces.iter().all(|space| space.namespace != namespace) {
                spaces.push(Space { namespace, cut: CutDigest([0; 16]) });
            }
        }
        if is_all {
            spaces.push(Table::NAMES_ALL);
        }
        let device_id = self.superblock.device_id;
        let table = Table { device_id, generation, spaces, records };
        let table_bytes = table_bytes(table.records.len(), table.spaces.len()) as u32;
        let pages = Pages::with(&table.encode());
        let last_page = self.superblock.segment_pages() - 1;
        let (id, piece) = (self.id(), pages.piece(pages.len()));
        if u64::from(table_page) + pages.len() as u64 / PAGE_BYTES > u64::from(last_page) {
            // Only a segment that was recovered by its headers can lack room for a table. The next start scans it again.
            self.log.table_ended(segment);
            return;
        }
        let foot = SegmentFoot { device_id, segment, generation, table_page, table_bytes, scan_from };
        let offset = self.superblock.offset(segment, table_page);
        self.start(id, Purpose::Table { segment, foot, pages }, offset, &[piece]);
    }

    pub(super) fn table_ended(&mut self, segment: SegmentNumber, foot: SegmentFoot, failed: bool) {
        if failed {
            self.log.table_ended(segment);
            return;
        }
        let page = Pages::with(&foot.encode());
        let last_page = self.superblock.segment_pages() - 1;
        let (id, piece) = (self.id(), page.piece(page.len()));
        self.start(id, Purpose::Foot { segment, page }, self.superblock.offset(segment, last_page), &[piece]);
    }
}
