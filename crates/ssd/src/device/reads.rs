//! Reads of a device: queued, expired at their deadline, started, and verified before their `done`.
#![expect(unsafe_code, reason = "operations go from and to the pool")]

use std::cmp::Reverse;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvlane_block::PoolExtent;

use super::Device;
use crate::io::{OpKind, Piece};
use crate::job::{Purpose, ReadJob, ReadMemory, STAGED_OP_BYTES, Transfer, cut, cut_record};
use crate::layout::{PAGE_BYTES, header_pages, shard_pages};
use crate::read::{verify, verify_staged};
use crate::request::{Miss, ReadEnd};
use crate::staging::{Slot, SlotUse};
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
            let bytes = u64::from(job.location.pages) * PAGE_BYTES;
            self.reads_in_flight += bytes;
            match self.take_staging(bytes, SlotUse::Read) {
                Some(slot) => self.start_staged_read(id, job, slot),
                None => self.start_direct_read(id, job),
            }
        }
    }

    fn start_staged_read(&mut self, id: u64, job: ReadJob, slot: Slot) {
        let bytes = (u64::from(job.location.pages) * PAGE_BYTES) as usize;
        let piece = self.staging.as_ref().map(|staging| staging.piece(&slot, bytes));
        let offset = self.superblock.offset(job.location.segment, job.location.page);
        let parts = cut(id, OpKind::Read, offset, piece.as_slice(), STAGED_OP_BYTES);
        let memory = ReadMemory::Staged(slot);
        self.start_parts(id, Purpose::Read { job, memory }, parts);
    }

    fn start_direct_read(&mut self, id: u64, job: ReadJob) {
        let header = self.headers.take(header_pages(job.into.len()) * PAGE_BYTES);
        let shards: Vec<Piece> = job.into.iter().map(|extent| self.pool_piece(extent)).collect();
        let offset = self.superblock.offset(job.location.segment, job.location.page);
        let piece = self.headers.piece(&header);
        let parts = cut_record(id, OpKind::Read, offset, piece, &shards, self.registration);
        let memory = ReadMemory::Direct(header);
        self.start_parts(id, Purpose::Read { job, memory }, parts);
    }

    pub(super) fn pool_piece(&self, extent: &PoolExtent) -> Piece {
        let bytes = (shard_pages(extent.bytes) * PAGE_BYTES) as usize;
        Piece { address: self.memory.base().wrapping_add(extent.offset.0 as usize), bytes }
    }

    pub(super) fn finish_read(&mut self, job: ReadJob, memory: ReadMemory, error: Option<io::Error>) {
        self.reads_in_flight -= u64::from(job.location.pages) * PAGE_BYTES;
        let end = if let Some(error) = error {
            Counters::add(&self.shared.counters.reads_failed, 1);
            // Log: a block could not be read; it was a miss and is computed. Do: look at the disk's own health
            // and at dmesg.
            tracing::warn!(path = %self.device.facts.path.display(), %error, hash = %job.key.hash, "SSD read failed");
            ReadEnd::Miss(Miss::Failed)
        } else {
            self.verify(&job, &memory)
        };
        match memory {
            ReadMemory::Direct(header) => self.headers.release(header),
            ReadMemory::Staged(slot) => self.release_staging(slot),
        }
        let counters = &self.shared.counters;
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

    /// Verifies a record that was read, and has its bytes in the pool afterwards.
    fn verify(&self, job: &ReadJob, memory: &ReadMemory) -> ReadEnd {
        let generation = self.log.generation(job.location.segment);
        let (superblock, location, key) = (&self.superblock, &job.location, &job.key);
        // SAFETY, of both calls: the tier checked that the extents are in the pool. They belong to this read until `done` is
        // called, and its operations have ended.
        match (memory, &self.staging) {
            (ReadMemory::Direct(header), _) => {
                let header = self.headers.bytes(header);
                // SAFETY: as above.
                unsafe { verify(superblock, generation, location, key, header, &job.into, &*self.memory) }
            }
            (ReadMemory::Staged(slot), Some(staging)) => {
                let record = staging.slot_bytes(slot);
                // SAFETY: as above.
                unsafe {
                    verify_staged(superblock, generation, location, key, record, &job.into, &*self.memory)
                }
            }
            // A slot comes from the staging memory, which stays.
            (ReadMemory::Staged(_), None) => ReadEnd::Miss(Miss::Failed),
        }
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
