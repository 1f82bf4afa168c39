//! Histograms of durations that several threads write without a lock.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Counts durations in buckets with upper bounds in microseconds. `BUCKETS` is the number of bounds plus one, for durations
/// above all of them.
#[derive(Debug)]
pub struct Histogram<const BUCKETS: usize> {
    bounds_us: &'static [u64],
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// Durations that one thread counts before it adds them to a [`Histogram`].
#[derive(Debug)]
pub struct Pending<const BUCKETS: usize> {
    counts: [u32; BUCKETS],
    sum_ns: u64,
    total: u32,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    bounds_us: &'static [u64],
    counts: Vec<u64>,
    sum_seconds: f64,
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// An empty histogram.
    pub fn new(bounds_us: &'static [u64]) -> Self {
        assert_eq!(bounds_us.len() + 1, BUCKETS, "a bucket for each bound, and one more");
        Self { bounds_us, counts: std::array::from_fn(|_| AtomicU64::new(0)), sum_ns: AtomicU64::new(0) }
    }

    /// Counts a duration.
    pub fn observe(&self, took: Duration) {
        self.counts[bucket(self.bounds_us, took)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(nanos(took), Ordering::Relaxed);
    }

    /// Adds the counts of `pending`, and empties it.
    pub fn add(&self, pending: &mut Pending<BUCKETS>) {
        for (count, more) in self.counts.iter().zip(&mut pending.counts) {
            if *more > 0 {
                count.fetch_add(u64::from(std::mem::take(more)), Ordering::Relaxed);
            }
        }
        self.sum_ns.fetch_add(std::mem::take(&mut pending.sum_ns), Ordering::Relaxed);
        pending.total = 0;
    }

    /// Reads each counter on its own: an observation in progress may be in the counts and not yet in the sum.
    pub fn read(&self) -> Distribution {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Distribution {
            bounds_us: self.bounds_us,
            counts,
            sum_seconds: self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

impl<const BUCKETS: usize> Default for Pending<BUCKETS> {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum_ns: 0, total: 0 }
    }
}

impl<const BUCKETS: usize> Pending<BUCKETS> {
    /// Adds `times` durations of this length. `bounds_us` are the histogram's.
    pub fn observe(&mut self, bounds_us: &[u64], each: Duration, times: u32) {
        let count = &mut self.counts[bucket(bounds_us, each)];
        *count = count.saturating_add(times);
        self.sum_ns = self.sum_ns.saturating_add(nanos(each).saturating_mul(u64::from(times)));
        self.total = self.total.saturating_add(times);
    }

    /// How many durations are not added yet.
    pub fn total(&self) -> u32 {
        self.total
    }
}

impl Distribution {
    /// What another counter has counted: one count for each bound, and one for durations above all.
    pub fn new(bounds_us: &'static [u64], counts: Vec<u64>, sum_seconds: f64) -> Self {
        assert_eq!(bounds_us.len() + 1, counts.len(), "a bucket for each bound, and one more");
        Self { bounds_us, counts, sum_seconds }
    }

    /// How many durations are in each bucket.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Whether nothing was observed.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// Upper bound in seconds (None for the last) and count of each bucket.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (Option<f64>, u64)> {
        let bounds = self.bounds_seconds().map(Some).chain([None]);
        bounds.zip(self.counts.iter().copied())
    }

    /// Upper bounds of the buckets in seconds, without the last one, which has none.
    pub fn bounds_seconds(&self) -> impl Iterator<Item = f64> {
        self.bounds_us.iter().map(|us| *us as f64 / 1e6)
    }

    /// All durations together.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_seconds
    }
}

#[inline]
fn bucket(bounds_us: &[u64], took: Duration) -> usize {
    let ns = nanos(took);
    bounds_us.iter().position(|us| ns <= us * 1000).unwrap_or(bounds_us.len())
}

#[inline]
fn nanos(took: Duration) -> u64 {
    u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_what_is_at_most_their_bound() {
        const BOUNDS: &[u64] = &[10, 100_000];
        let histogram = Histogram::<3>::new(BOUNDS);
        assert!(histogram.read().is_empty());
        let mut pending = Pending::default();
        histogram.observe(Duration::from_micros(10));
        histogram.observe(Duration::from_secs(1));
        pending.observe(BOUNDS, Duration::from_nanos(10_500), 2);
        assert_eq!(pending.total(), 2);
        histogram.add(&mut pending);
        assert_eq!(pending.total(), 0);
        histogram.add(&mut pending);
        let read = histogram.read();
        assert_eq!(read.buckets().collect::<Vec<_>>(), [(Some(1e-5), 1), (Some(0.1), 2), (None, 1)]);
        assert_eq!(read.sum_seconds(), 1.000_031);
    }
}
