//! Counters of the tier, and the status of each device, for metrics and `kvlane status`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::latency::Latencies;
use crate::way::PathStatus;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since the tier was opened, and the size of its index now.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Blocks that are stored.
            pub blocks: u64,
            /// Bytes of their records.
            pub block_bytes: u64,
            /// Estimated memory of the index in bytes.
            pub index_bytes: u64,
        }

        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* ..Stats::default() }
            }
        }
    };
}

counters! {
    /// Reads that found their block and verified it.
    reads_found,
    /// Bytes of the blocks that were found, headers included.
    read_bytes,
    /// Reads that found other bytes than were written; each block was dropped from the index.
    reads_damaged,
    /// Reads that the device failed.
    reads_failed,
    /// Reads whose deadline passed, before or after the device was asked.
    reads_late,
    /// Reads refused because the block has other lengths.
    reads_lengths,
    /// Writes that ended as stored.
    writes_stored,
    /// Bytes of blocks written, headers included.
    write_bytes,
    /// Writes that failed.
    writes_failed,
    /// Writes refused because the queues were full.
    writes_refused,
    /// Writes refused while the devices recovered from errors.
    writes_degraded,
    /// Segments emptied.
    segments_cleaned,
    /// Blocks written again when their segment was emptied.
    blocks_kept,
    /// Blocks dropped to make room.
    blocks_dropped,
    /// Checkpoints written.
    checkpoints,
    /// Blocks found when the tier was opened, in the tables of segments.
    recovered_from_tables,
    /// Blocks found when the tier was opened, by their headers.
    recovered_by_scan,
    /// Transfers that moved less than asked for and were continued.
    short_transfers,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// Status of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// The file as it was named, which stands for its device.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub capacity: u64,
    /// Size of a segment in bytes: no block can be larger.
    pub segment_bytes: u64,
    /// How many segments the file has, free ones included.
    pub segments: u32,
    /// Segments that hold nothing.
    pub free_segments: u32,
    /// "io_uring" or "threads".
    pub io: &'static str,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Whether the pool is registered with io_uring.
    pub registered: bool,
    /// Fallbacks and repairs when the file was opened, each with its reason.
    pub notes: Vec<String>,
    /// Error of the last failed write, until a write succeeds.
    pub degraded: Option<String>,
    /// Dropped namespaces that the file's drop table lacks: a restart would bring them back.
    pub drops_not_noted: usize,
    /// Bytes accepted and not yet written.
    pub backlog_bytes: u64,
    /// Reads waiting or in flight.
    pub reads: u64,
    /// How long reads took that found their block, from their request on.
    pub read_latencies: Latencies,
    /// How long writes took that were stored, from their request on.
    pub write_latencies: Latencies,
    /// Whether transfers go through staging memory, and why.
    pub path_taken: PathStatus,
    /// Whether the file was there when the tier was opened.
    pub warm: bool,
}
