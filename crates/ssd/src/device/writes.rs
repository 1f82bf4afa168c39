//! Writes of a device: records are appended to the log, written in batches, and enter the index when they count.
//!
//! A write ends as [`WriteEnd::Stored`] when the record and its segment's head are both on the device. If its namespace
//! was dropped after the write was accepted, it fails instead.
#![expect(unsafe_code, reason = "shards are copied out of the pool")]

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvlane_block::Space;

use super::Device;
use crate::index::Location;
use crate::io::{OpKind, Piece};
use crate::job::{AllocatedWrite, Batch, OP_BYTES, Purpose, STAGED_OP_BYTES, Transfer, WriteJob, cut};
use crate::layout::{PAGE_BYTES, RecordHeader, SegmentHead, SegmentNumber, ShardSum};
use crate::log::{HeadState, RecordSource};
use crate::pages::Pages;
use crate::request::WriteEnd;
use crate::staging::SlotUse;
use crate::stats::Counters;
use crate::way::Way;

/// Limit of bytes in writes that are cut into operations and not posted yet.
const WRITES_AHEAD: u64 = 16 << 20;
/// The same if they are in staging memory, which is to hold writes in flight.
const STAGED_WRITES_AHEAD: u64 = 4 << 20;

impl Device {
    pub(super) fn start_writes(&mut self, now: Instant) {
        if !self.queued_writes.is_empty() && !self.device.health.lock().accepts_writes(now) {
            while let Some(job) = self.queued_writes.pop_front() {
                self.end_write(job, WriteEnd::Failed);
            }
        }
        let (op_bytes, ahead) = match (self.chooser.way(), &self.staging) {
            (Way::Staged, Some(staging)) => (staging.write_op_bytes(STAGED_OP_BYTES), STAGED_WRITES_AHEAD),
            _ => (OP_BYTES, WRITES_AHEAD),
        };
        let mut batch = Batch::new(op_bytes);
        while self.writes_ahead + batch.bytes() < ahead
            && let Some(job) = self.queued_writes.front()
        {
            let (pages, space) = (job.pages, job.record.key.space);
            if self.waits_for_staging(batch.bytes() + u64::from(pages) * PAGE_BYTES, op_bytes) {
                break;
            }
            let Some((segment, page)) = self.allocate(pages, &space, RecordSource::Writes) else { break };
            let Some(job) = self.queued_writes.pop_front() else { break };
            let location = Location { device: self.number, segment, page, pages };
            if !batch.takes(&location, job.record.shards.len() + 1) {
                self.start_batch(batch.take());
            }
            let record = &job.record;
            let header = RecordHeader {
                device_id: self.superblock.device_id,
                generation: self.log.generation(segment),
                segment,
                page,
                key: record.key,
                shards: record
                    .shards
                    .iter()
                    .map(|shard| ShardSum { bytes: shard.extent.bytes as u32, crc: shard.crc32c })
                    .collect(),
            };
            let header = Pages::with(&header.encode());
            let shards: Vec<Piece> =
                record.shards.iter().map(|shard| self.pool_piece(&shard.extent)).collect();
            batch.push(AllocatedWrite { job, location, header }, &shards);
        }
        self.start_batch(batch);
    }

    fn start_batch(&mut self, batch: Batch) {
        let (records, pieces) = batch.into_parts();
        let Some(Location { segment, page, .. }) = records.first().map(|record| record.location) else {
            return;
        };
        let (id, offset) = (self.id(), self.superblock.offset(segment, page));
        let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
        match self.take_staging(bytes as u64, SlotUse::Write) {
            Some(slot) => {
                let staged_piece = self.staging.as_mut().map(|staging| {
                    // SAFETY: the headers belong to the batch. The shards are sealed blocks, whose bytes do not change
                    // before `done` is called, by the contract of `SsdTier::write`.
                    unsafe { staging.fill(&slot, &pieces) };
                    staging.piece(&slot, bytes)
                });
                let parts = cut(id, OpKind::Write, offset, staged_piece.as_slice(), STAGED_OP_BYTES);
                self.start_parts(id, Purpose::Write { records, staged: Some(slot) }, parts);
            }
            None => self.start(id, Purpose::Write { records, staged: None }, offset, &pieces),
        }
    }

    /// Whether a batch of so many bytes has to wait until staged writes before it have ended.
    fn waits_for_staging(&self, bytes: u64, op_bytes: usize) -> bool {
        self.chooser.way() == Way::Staged
            && self.staging.as_ref().is_some_and(|staging| staging.write_waits(bytes, op_bytes))
    }

    /// Allocates room at the log's end, and opens the next segment if the open one has too little. None if no segment
    /// is free for this source.
    pub(super) fn allocate(
        &mut self,
        pages: u32,
        space: &Space,
        source: RecordSource,
    ) -> Option<(SegmentNumber, u32)> {
        if let Some(found) = self.append(pages, space, source) {
            return Some(found);
        }
        // Keep the open segment if no other can follow it, because closing it would waste the room that is left in it.
        let kept = if source == RecordSource::Writes { 1 } else { 0 };
        if self.log.free_segments() <= kept {
            return None;
        }
        self.log.close_open();
        let (segment, generation) = self.log.open_segment(source)?;
        self.device.holdings.lock().opened(segment, generation);
        let head = SegmentHead { device_id: self.superblock.device_id, segment, generation };
        let page = Pages::with(&head.encode());
        let piece = page.piece(page.len());
        let (id, offset) = (self.id(), self.superblock.offset(segment, 0));
        self.start(id, Purpose::Head { segment, page }, offset, &[piece]);
        self.append(pages, space, source)
    }

    fn append(&mut self, pages: u32, space: &Space, source: RecordSource) -> Option<(SegmentNumber, u32)> {
        let (segment, page) = self.log.append(pages, space, source)?;
        self.device.holdings.lock().appended(segment, space.namespace);
        Some((segment, page))
    }

    /// Ends the records of a completed transfer. They are held back while the write of their segment's head is in
    /// flight, and fail if that write failed.
    pub(super) fn finish_records(&mut self, transfer: Transfer) {
        let segment = match &transfer.purpose {
            Purpose::Write { records, .. } => records.first().map(|record| record.location.segment),
            Purpose::CopyOut { to, .. } => Some(to.segment),
            _ => None,
        };
        let Some(segment) = segment else { return };
        let head = self.log.unsealed(segment).map_or(HeadState::Failed, |open| open.head);
        if head == HeadState::Awaited {
            self.held.push(transfer);
            return;
        }
        let stored = transfer.error.is_none() && head == HeadState::Written;
        match transfer.purpose {
            Purpose::Write { records, .. } => {
                for AllocatedWrite { job, location, .. } in records {
                    self.finish_write(job, location, stored);
                }
            }
            Purpose::CopyOut { live, from, to, .. } => self.copy_ended(&live, from, to, stored),
            _ => {}
        }
    }

    fn finish_write(&mut self, job: WriteJob, location: Location, stored: bool) {
        self.log.record_ended(location.segment, location.page, stored);
        let key = job.record.key;
        let mut shared = self.shared.index.lock();
        // If the namespace was dropped after the write was accepted, the record stays on the device but out of the index.
        let stored = stored && shared.drops_of(&key.space.namespace) == job.accepted.drops;
        if stored {
            shared.index.insert(&key, location);
            shared.index.remember(&key, job.record.memo);
        }
        drop(shared);
        if stored {
            Counters::add(&self.shared.counters.write_bytes, u64::from(location.pages) * PAGE_BYTES);
        }
        self.end_write(job, if stored { WriteEnd::Stored } else { WriteEnd::Failed });
    }

    pub(super) fn end_write(&self, job: WriteJob, end: WriteEnd) {
        self.shared.index.lock().remove_pending(&job.record.key, job.accepted);
        self.device.backlog.fetch_sub(u64::from(job.pages) * PAGE_BYTES, Ordering::Relaxed);
        let counters = &self.shared.counters;
        let counter = match end {
            WriteEnd::Stored => &counters.writes_stored,
            WriteEnd::Failed => &counters.writes_failed,
        };
        Counters::add(counter, 1);
        if end == WriteEnd::Stored {
            self.device.write_latency.observe(job.accepted_at.elapsed());
        }
        (job.done)(end);
    }

    pub(super) fn head_ended(&mut self, segment: SegmentNumber, error: Option<&io::Error>) {
        let head = if error.is_none() { HeadState::Written } else { HeadState::Failed };
        if head == HeadState::Written {
            self.device.holdings.lock().head_written(segment);
        }
        self.log.head_ended(segment, head);
        for transfer in std::mem::take(&mut self.held) {
            self.finish_records(transfer);
        }
    }
}
