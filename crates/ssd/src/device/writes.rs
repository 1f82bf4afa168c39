//! Records on their way to the log.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Device;
use crate::index::Location;
use crate::job::{Transfer, What, WriteJob};
use crate::layout::{PAGE_BYTES, RecordHeader, SegmentHead};
use crate::log::{For, Head};
use crate::pages::Pages;
use crate::request::{Space, WriteEnd};
use crate::stats::Counters;

/// Bytes of writes that are cut into operations ahead.
const WRITES_AHEAD: u64 = 16 << 20;

impl Device {
    pub(super) fn start_writes(&mut self, now: Instant) {
        if !self.queued_writes.is_empty() && !self.device.health.lock().accepts_writes(now) {
            while let Some(job) = self.queued_writes.pop_front() {
                self.end_write(job, WriteEnd::Failed);
            }
        }
        while self.writes_ahead < WRITES_AHEAD
            && let Some(job) = self.queued_writes.front()
        {
            let (pages, space) = (job.pages, job.record.key.space);
            let Some((segment, page)) = self.place(pages, &space, For::Writes) else { return };
            let Some(job) = self.queued_writes.pop_front() else { return };
            let location = Location { device: self.number, segment, page, pages };
            let record = &job.record;
            let header = RecordHeader {
                device_id: self.superblock.device_id,
                generation: self.log.generation(segment),
                segment,
                page,
                key: record.key,
                parent: record.parent,
                shards: record.shards.iter().map(|shard| (shard.extent.bytes as u32, shard.crc)).collect(),
            };
            let header = Pages::with(&header.encode());
            let mut pieces = vec![header.piece(header.len())];
            pieces.extend(record.shards.iter().map(|shard| self.pool_piece(&shard.extent)));
            let (id, offset) = (self.id(), self.superblock.offset(segment, page));
            self.start(id, What::Write { job, location, header }, offset, &pieces);
        }
    }

    /// Room at the log's end, in the next segment if there is not enough in this one.
    pub(super) fn place(&mut self, pages: u32, space: &Space, whom: For) -> Option<(u32, u32)> {
        if let Some(found) = self.log.append(pages, space, whom) {
            return Some(found);
        }
        // Closing what cannot be followed would only waste it.
        let kept = if whom == For::Writes { 1 } else { 0 };
        if self.log.free_segments() <= kept {
            return None;
        }
        self.log.close_open();
        let (segment, generation) = self.log.open_segment(whom)?;
        let head = SegmentHead { device_id: self.superblock.device_id, segment, generation };
        let page = Pages::with(&head.encode());
        let piece = page.piece(page.len());
        let (id, offset) = (self.id(), self.superblock.offset(segment, 0));
        self.start(id, What::Head { segment, page }, offset, &[piece]);
        self.log.append(pages, space, whom)
    }

    /// A record, written whole, counts from here on; unless its segment's head is not there, or will never be.
    pub(super) fn finish_record(&mut self, transfer: Transfer) {
        let (to, key) = match &transfer.what {
            What::Write { location, job, .. } => (*location, job.record.key),
            What::CopyOut { to, live, .. } => (*to, live.key),
            _ => return,
        };
        let head = self.log.written(to.segment).map_or(Head::Failed, |open| open.head);
        if head == Head::Awaited {
            self.held.push(transfer);
            return;
        }
        let stored = transfer.error.is_none() && head == Head::Written;
        self.log.record_ended(to.segment, to.page, stored);
        match transfer.what {
            What::Write { job, .. } => {
                let mut shared = self.shared.index.lock();
                // If the namespace was dropped meanwhile, the record stays where it is and is nobody's.
                let stored = stored && shared.drops_of(&key.space.namespace) == job.accepted.drops;
                if stored {
                    shared.index.insert(&key, to);
                }
                drop(shared);
                if stored {
                    Counters::add(&self.shared.counters.write_bytes, u64::from(to.pages) * PAGE_BYTES);
                }
                self.end_write(job, if stored { WriteEnd::Stored } else { WriteEnd::Failed });
            }
            What::CopyOut { from, .. } => {
                let mut stored_now = self.shared.index.lock();
                if stored && stored_now.index.relocate(&key, from, to) {
                    Counters::add(&self.shared.counters.blocks_kept, 1);
                } else if stored_now.index.remove_at(&key, from) {
                    Counters::add(&self.shared.counters.blocks_dropped, 1);
                }
                drop(stored_now);
                self.copied();
            }
            _ => {}
        }
    }

    pub(super) fn end_write(&self, job: WriteJob, end: WriteEnd) {
        self.shared.index.lock().no_longer_pending(&job.record.key, job.accepted);
        self.device.backlog.fetch_sub(u64::from(job.pages) * PAGE_BYTES, Ordering::Relaxed);
        let counters = &self.shared.counters;
        let counter = match end {
            WriteEnd::Stored => &counters.writes_stored,
            WriteEnd::Failed => &counters.writes_failed,
        };
        Counters::add(counter, 1);
        (job.done)(end);
    }

    pub(super) fn head_ended(&mut self, segment: u32, error: Option<&io::Error>) {
        let head = if error.is_none() { Head::Written } else { Head::Failed };
        self.log.head_ended(segment, head);
        for transfer in std::mem::take(&mut self.held) {
            self.finish_record(transfer);
        }
    }
}
