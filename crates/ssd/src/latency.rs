//! [`Latency`]: counts how long a device's reads or writes took, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets, in microseconds. One more bucket is above all of them.
pub const LATENCY_BOUNDS_US: [u64; 11] =
    [50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000, 250_000, 1_000_000];

/// Counters of one kind of operation.
#[derive(Debug, Default)]
pub(crate) struct Latency {
    counts: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

/// How long the operations of a kind took, at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Operations in each bucket of [`LATENCY_BOUNDS_US`], and above.
    pub counts: [u64; LATENCY_BOUNDS_US.len() + 1],
    /// Their time together, in nanoseconds.
    pub sum_ns: u64,
}

impl Latency {
    pub(crate) fn observe(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BOUNDS_US.partition_point(|bound| bound * 1000 < ns);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Latencies {
        Latencies {
            counts: std::array::from_fn(|bucket| self.counts[bucket].load(Ordering::Relaxed)),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_what_is_at_most_its_bound() {
        let latency = Latency::default();
        for us in [50, 51, 1_000_000, 2_000_000] {
            latency.observe(Duration::from_micros(us));
        }
        let read = latency.read();
        assert_eq!(read.counts, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(read.sum_ns, 3_000_101_000);
    }
}
