//! Histograms of durations that several threads write without a lock.

use std::{
    fmt::Write,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use kvlane_door::MetricKind;

/// Durations by upper bounds, in milliseconds. `BUCKETS` is the number of bounds and one more, for durations above all of them.
#[derive(Debug)]
pub(crate) struct Histogram<const BUCKETS: usize> {
    bounds_ms: &'static [u64],
    counts: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

/// Durations that one thread counts before it adds them to a [`Histogram`].
#[derive(Debug)]
pub(crate) struct Pending<const BUCKETS: usize> {
    counts: [u32; BUCKETS],
    sum_us: u64,
    total: u32,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Distribution {
    bounds_ms: &'static [u64],
    counts: Vec<u64>,
    sum_us: u64,
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    pub(crate) fn new(bounds_ms: &'static [u64]) -> Self {
        assert_eq!(bounds_ms.len() + 1, BUCKETS, "a bucket for each bound, and one more");
        Self { bounds_ms, counts: std::array::from_fn(|_| AtomicU64::new(0)), sum_us: AtomicU64::new(0) }
    }

    pub(crate) fn observe(&self, took: Duration) {
        self.counts[bucket(self.bounds_ms, took)].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(micros(took), Ordering::Relaxed);
    }

    /// Adds the counts of `pending`, and empties it.
    pub(crate) fn add(&self, pending: &mut Pending<BUCKETS>) {
        for (count, more) in self.counts.iter().zip(&mut pending.counts) {
            if *more > 0 {
                count.fetch_add(u64::from(std::mem::take(more)), Ordering::Relaxed);
            }
        }
        self.sum_us.fetch_add(std::mem::take(&mut pending.sum_us), Ordering::Relaxed);
        pending.total = 0;
    }

    pub(crate) fn read(&self) -> Distribution {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Distribution { bounds_ms: self.bounds_ms, counts, sum_us: self.sum_us.load(Ordering::Relaxed) }
    }
}

impl<const BUCKETS: usize> Default for Pending<BUCKETS> {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum_us: 0, total: 0 }
    }
}

impl<const BUCKETS: usize> Pending<BUCKETS> {
    /// Adds `times` durations of this length. `bounds_ms` are the histogram's.
    pub(crate) fn observe(&mut self, bounds_ms: &[u64], each: Duration, times: u32) {
        let count = &mut self.counts[bucket(bounds_ms, each)];
        *count = count.saturating_add(times);
        self.sum_us = self.sum_us.saturating_add(micros(each).saturating_mul(u64::from(times)));
        self.total = self.total.saturating_add(times);
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }
}

impl Distribution {
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}

/// Appends a histogram in Prometheus' text format, or nothing if no distribution has a value.
pub(crate) fn write_histogram(
    page: &mut String,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (String, Distribution)>,
) {
    let mut values = values.into_iter().filter(|(_, values)| !values.is_empty()).peekable();
    if values.peek().is_none() {
        return;
    }
    // Writing to a String cannot fail.
    let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {}", MetricKind::Histogram.name());
    for (labels, Distribution { bounds_ms, counts, sum_us }) in values {
        let mut below = 0;
        for (number, count) in counts.iter().enumerate() {
            below += count;
            let bound = bounds_ms.get(number).map_or("+Inf".to_owned(), |ms| (*ms as f64 / 1e3).to_string());
            let _ = writeln!(page, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(page, "{name}_sum{{{labels}}} {}", sum_us as f64 / 1e6);
        let _ = writeln!(page, "{name}_count{{{labels}}} {below}");
    }
    page.push('\n');
}

fn bucket(bounds_ms: &[u64], took: Duration) -> usize {
    let us = micros(took);
    bounds_ms.iter().position(|ms| us <= ms * 1000).unwrap_or(bounds_ms.len())
}

fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_what_is_at_most_their_bound_and_all_that_are_smaller() {
        const BOUNDS: &[u64] = &[10, 100];
        let histogram = Histogram::<3>::new(BOUNDS);
        let mut pending = Pending::default();
        histogram.observe(Duration::from_millis(10));
        histogram.observe(Duration::from_secs(1));
        pending.observe(BOUNDS, Duration::from_millis(11), 2);
        assert_eq!(pending.total(), 2);
        histogram.add(&mut pending);
        assert_eq!(pending.total(), 0);
        histogram.add(&mut pending);
        let mut page = String::new();
        write_histogram(&mut page, "x_seconds", "X.", [("a=\"b\"".to_owned(), histogram.read())]);
        assert_eq!(
            page,
            "# HELP x_seconds X.\n# TYPE x_seconds histogram\nx_seconds_bucket{a=\"b\",le=\"0.01\"} 1\n\
             x_seconds_bucket{a=\"b\",le=\"0.1\"} 3\nx_seconds_bucket{a=\"b\",le=\"+Inf\"} 4\n\
             x_seconds_sum{a=\"b\"} 1.032\nx_seconds_count{a=\"b\"} 4\n\n"
        );
        page.clear();
        write_histogram(&mut page, "y", "Y.", [(String::new(), Histogram::<3>::new(BOUNDS).read())]);
        assert_eq!(page, "", "nothing was observed");
    }
}
