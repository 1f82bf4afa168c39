//! Transfers become operations here: cut, queued, posted in turn, continued if cut short, and completed.
#![expect(unsafe_code, reason = "operations go from and to the pool")]

use std::io;
use std::time::{Duration, Instant};

use super::Device;
use crate::io::{Completion, Op, OpKind, Piece};
use crate::job::{OP_BYTES, Purpose, Transfer, UnfinishedOp, cut};
use crate::stats::Counters;

/// Attempts in a row that may move nothing before an operation fails.
const STALLS: u32 = 16;

impl Device {
    pub(super) fn start(&mut self, id: u64, purpose: Purpose, offset: u64, pieces: &[Piece]) {
        let kind = purpose.kind();
        let parts = match kind {
            OpKind::Sync => {
                vec![UnfinishedOp { transfer: id, kind, offset, pieces: Vec::new(), stalls: 0 }]
            }
            _ => cut(id, kind, offset, pieces, OP_BYTES),
        };
        self.start_parts(id, purpose, parts);
    }

    pub(super) fn start_parts(&mut self, id: u64, purpose: Purpose, parts: Vec<UnfinishedOp>) {
        // Reads for cleaning queue with the writes, because no engine waits for them.
        let is_read = matches!(purpose, Purpose::Read { .. });
        self.transfers.insert(id, Transfer { purpose, operations: parts.len(), error: None });
        if is_read {
            self.ready_reads.extend(parts);
        } else {
            self.writes_ahead += parts.iter().map(UnfinishedOp::bytes).sum::<u64>();
            self.ready_writes.extend(parts);
        }
    }

    /// Posts the operations that may go now, reads first. Returns how long writes have to wait, unless only a completion
    /// can make room for them.
    pub(super) fn post(&mut self, now: Instant) -> Option<Duration> {
        while self.io.room() > 0
            && let Some(part) = self.ready_reads.pop_front()
        {
            self.turns.read_started(part.bytes());
            self.post_part(part);
        }
        while self.io.room() > 0
            && let Some(part) = self.ready_writes.front()
        {
            let bytes = part.bytes();
            if let Some(wait) = self.turns.wait(bytes, now) {
                return Some(wait);
            }
            if !self.is_closing()
                && let Some(wait) = self.rate.as_mut().and_then(|rate| rate.wait(now))
            {
                return Some(wait);
            }
            let Some(part) = self.ready_writes.pop_front() else { break };
            if let Some(rate) = self.rate.as_mut() {
                rate.take(bytes);
            }
            self.writes_ahead -= bytes;
            self.turns.write_started(bytes);
            self.post_part(part);
        }
        None
    }

    pub(super) fn post_part(&mut self, part: UnfinishedOp) {
        let id = self.id();
        let op = Op { id, kind: part.kind, offset: part.offset, pieces: part.pieces.clone() };
        self.parts.insert(id, part);
        // SAFETY: the transfer owns the tier's own pages. Its job owns the pool's extents by the contract of read and
        // write, and `memory` keeps the pool mapped. A transfer leaves `transfers` when its last operation has ended,
        // and `io` is dropped before all transfers.
        unsafe { self.io.post(op) };
        self.unsubmitted = true;
    }

    pub(super) fn operation_ended(&mut self, end: Completion) {
        let Some(mut part) = self.parts.remove(&end.id) else { return };
        let (bytes, is_read) = (part.bytes(), self.is_read(part.transfer));
        if is_read {
            self.turns.read_ended(bytes, Instant::now());
        } else {
            self.turns.write_ended(bytes);
        }
        let again = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
        };
        let failed = match end.result {
            Ok(moved) if moved as u64 >= bytes => None,
            Ok(0) if part.kind == OpKind::Read => Some(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => Some(io::ErrorKind::WriteZero.into()),
            Err(error) if !again(&error) => Some(error),
            short => {
                Counters::add(&self.shared.counters.short_transfers, 1);
                part.advance(short.unwrap_or(0));
                if part.stalls <= STALLS {
                    if is_read {
                        self.ready_reads.push_front(part);
                    } else {
                        self.writes_ahead += part.bytes();
                        self.ready_writes.push_front(part);
                    }
                    return;
                }
                Some(io::Error::other("the device moves nothing"))
            }
        };
        let Some(transfer) = self.transfers.get_mut(&part.transfer) else { return };
        transfer.operations -= 1;
        transfer.error = transfer.error.take().or(failed);
        if transfer.operations == 0
            && let Some(transfer) = self.transfers.remove(&part.transfer)
        {
            self.complete.push_back(transfer);
        }
    }

    pub(super) fn is_read(&self, transfer: u64) -> bool {
        matches!(self.transfers.get(&transfer), Some(Transfer { purpose: Purpose::Read { .. }, .. }))
    }

    pub(super) fn finish(&mut self, mut transfer: Transfer) {
        if transfer.purpose.kind() != OpKind::Read {
            self.record_health(transfer.error.as_ref());
        }
        let failed = transfer.error.is_some();
        match transfer.purpose {
            Purpose::Read { job, memory } => self.finish_read(job, memory, transfer.error),
            Purpose::Write { ref mut staged, .. } => {
                if let Some(slot) = staged.take() {
                    self.release_staging(slot);
                }
                self.finish_records(transfer);
            }
            Purpose::CopyOut { .. } => self.finish_records(transfer),
            Purpose::Head { segment, .. } => self.head_ended(segment, transfer.error.as_ref()),
            Purpose::Table { segment, foot, .. } => self.table_ended(segment, foot, failed),
            Purpose::Foot { segment, .. } => {
                self.log.table_ended(segment);
                if !failed {
                    self.sync.table_written();
                    Counters::add(&self.shared.counters.checkpoints, 1);
                }
            }
            Purpose::Sync => self.sync.ended(),
            Purpose::CopyIn { live, from, buffer } => self.copy_out(live, from, buffer, failed),
        }
    }

    pub(super) fn record_health(&self, error: Option<&io::Error>) {
        let mut health = self.device.health.lock();
        let now = Instant::now();
        match error {
            Some(error) => {
                if health.reason().is_none() {
                    // Log: new blocks are not kept on this SSD for a while, 1 s to a minute; then the daemon
                    // tries again. Do: look at the disk: full, or failing (dmesg).
                    tracing::warn!(
                        path = %self.device.facts.path.display(), %error,
                        "SSD write failed; pausing writes to this device"
                    );
                }
                health.failed(error.to_string(), now);
            }
            None => health.succeeded(now),
        }
    }
}
