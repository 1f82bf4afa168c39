//! Reads of a device: queued, expired at their deadline, started, and verified before their `done`.
#![expect(unsafe_code, reason = "operations go from and to the pool")]

use std::cmp::Reverse;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvlane_block::PoolExtent;

use super::Device;
use crate::headers::HeaderMemory;
use crate::io::{OpKind, Piece};
use crate::job::{Purpose, ReadJob, Transfer, cut_record};
use crate::layout::{PAGE_BYTES, header_pages, shard_pages};
use crate::read::verify;
use crate::request::{Miss, ReadEnd};
use crate::stats::Counters;

/// Limit of bytes in reads that have started and not ended.
const READS_IN_FLIGHT: u64 = 32 << 20;

impl Device {
    pub(super) fn expire_reads(&mut self, now: Instant) {
        while let Some(Reverse((deadline, id))) = self.deadlines.peek().copied()
            && deadline <= now
        {
            self.deadlines.pop();
            if let Some(job) = self.queued_reads.remove(&id) {
                Counters::add(&self.shared.counters.reads_late, 1);
                self.end_read(job, ReadEnd::Miss(Miss::Late));
            } else if matches!(self.transfers.get(&id), Some(Transfer { purpose: Purpose::Read { .. }, .. }))
            {
                Counters::add(&self.shared.counters.reads_late, 1);
            }
        }
    }

    pub(super) fn start_reads(&mut self) {
        while self.reads_in_flight < READS_IN_FLIGHT
            && let Some(id) = self.read_order.pop_front()
        {
            // An expired read has left `queued_reads` but not `read_order`.
            let Some(job) = self.queued_reads.remove(&id) else { continue };
            let header = self.headers.take(header_pages(job.into.len()) * PAGE_BYTES);
            let shards: Vec<Piece> = job.into.iter().map(|extent| self.pool_piece(extent)).collect();
            let offset = self.superblock.offset(job.location.segment, job.location.page);
            self.reads_in_flight += u64::from(job.location.pages) * PAGE_BYTES;
            let piece = self.headers.piece(&header);
            let parts = cut_record(id, OpKind::Read, offset, piece, &shards, self.registration);
            self.start_parts(id, Purpose::Read { job, header }, parts);
        }
    }

    pub(super) fn pool_piece(&self, extent: &PoolExtent) -> Piece {
        let bytes = (shard_pages(extent.bytes) * PAGE_BYTES) as usize;
        Piece { address: self.memory.base().wrapping_add(extent.offset.0 as usize), bytes }
    }

    pub(super) fn finish_read(&mut self, job: ReadJob, header: HeaderMemory, error: Option<io::Error>) {
        self.reads_in_flight -= u64::from(job.location.pages) * PAGE_BYTES;
        let counters = &self.shared.counters;
        let end = if let Some(error) = error {
            Counters::add(&counters.reads_failed, 1);
            // Log: a block could not be read; it was a miss and is computed. Do: look at the disk's own health
            // and at dmesg.
            tracing::warn!(path = %self.device.facts.path.display(), %error, hash = %job.key.hash, "SSD read failed");
            ReadEnd::Miss(Miss::Failed)
        } else {
            let generation = self.log.generation(job.location.segment);
            // SAFETY: the tier checked that the extents are in the pool. They belong to this read until `done` is
            // called, and its operations have ended.
            unsafe {
                verify(
                    &self.superblock,
                    generation,
                    &job.location,
                    &job.key,
                    self.headers.bytes(&header),
                    &job.into,
                    &*self.memory,
                )
            }
        };
        self.headers.release(header);
        match end {
            ReadEnd::Found { .. } => {
                Counters::add(&counters.reads_found, 1);
                Counters::add(&counters.read_bytes, u64::from(job.location.pages) * PAGE_BYTES);
            }
            ReadEnd::Miss(Miss::Damaged) => {
                Counters::add(&counters.reads_damaged, 1);
                self.shared.index.lock().index.remove_at(&job.key, job.location);
                // Log: a block's bytes changed on the disk; it was a miss and is computed. Do: look at the disk's
                // own health.
                tracing::warn!(
                    path = %self.device.facts.path.display(), hash = %job.key.hash,
                    segment = job.location.segment.0, page = job.location.page,
                    "SSD block damaged: its header or checksum is wrong; dropped from the index"
                );
            }
            ReadEnd::Miss(Miss::Lengths) => Counters::add(&counters.reads_lengths, 1),
            ReadEnd::Miss(_) => {}
        }
        self.end_read(job, end);
    }

    pub(super) fn end_read(&self, job: ReadJob, end: ReadEnd) {
        self.device.pins[job.location.segment.index()].fetch_sub(1, Ordering::Release);
        self.device.reads.fetch_sub(1, Ordering::Relaxed);
        if let ReadEnd::Found { .. } = end {
            self.device.read_latency.observe(job.accepted_at.elapsed());
        }
        (job.done)(end);
    }
}
