//! Counters and histograms of events, updated without a lock as the events happen.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use kvlane_door::{Distribution, Histogram, Labels};
use kvlane_proto::v1::register_worker::Method;
use kvlane_trace::TierBlocks;

use crate::calls::{
    outcome::WaitOutcome,
    table::{CALLS, Call},
};

/// Upper bounds of the histogram of request durations, in microseconds.
const REQUEST_BOUNDS_US: &[u64] =
    &[10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000, 250_000, 1_000_000, 5_000_000];
/// The same for waits for another engine's saves.
const WAIT_BOUNDS_US: &[u64] =
    &[1000, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000];

/// Counters and histograms of the daemon.
#[derive(Debug)]
pub(crate) struct Events {
    bad_frames: AtomicU64,
    /// Workers, indexed by [`Method`].
    registered: [AtomicU64; METHODS],
    /// Requests, indexed by [`Call`].
    refused: [AtomicU64; CALLS.len()],
    durations: [Histogram<15>; CALLS.len()],
    /// Lookups that named another engine's saves, indexed by [`WaitOutcome`].
    awaited_saves: [AtomicU64; WaitOutcome::ALL.len()],
    save_waits: [Histogram<11>; WaitOutcome::ALL.len()],
    /// Bytes of hits, indexed by [`TIERS`].
    hit_bytes: [AtomicU64; TIERS.len()],
}

/// Where the blocks of a hit were when the prompt was looked up.
const TIERS: [&str; 3] = ["ram", "ssd", "peers"];

/// Values of [`Method`].
const METHODS: usize = Method::Gpu as usize + 1;

/// How metrics, status and logs name the way that a worker's saves travel.
pub(crate) fn method_name(method: Method) -> &'static str {
    match method {
        Method::Auto => "auto",
        Method::ProcessVm => "process_vm",
        Method::Mapped => "mapped",
        Method::Gpu => "gpu",
    }
}

impl Default for Events {
    fn default() -> Self {
        Self {
            bad_frames: AtomicU64::new(0),
            registered: std::array::from_fn(|_| AtomicU64::new(0)),
            refused: std::array::from_fn(|_| AtomicU64::new(0)),
            durations: std::array::from_fn(|_| Histogram::new(REQUEST_BOUNDS_US)),
            awaited_saves: std::array::from_fn(|_| AtomicU64::new(0)),
            save_waits: std::array::from_fn(|_| Histogram::new(WAIT_BOUNDS_US)),
            hit_bytes: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

/// Called by the code that the events happen in.
impl Events {
    pub(crate) fn answered(&self, call: Call, took: Duration, refused: bool) {
        self.durations[call as usize].observe(took);
        if refused {
            count(&self.refused[call as usize]);
        }
    }

    pub(crate) fn bad_frame(&self) {
        count(&self.bad_frames);
    }

    pub(crate) fn worker_registered(&self, method: Method) {
        count(&self.registered[method as usize]);
    }

    /// A lookup has found these blocks, of `block_bytes` each.
    pub(crate) fn hit(&self, blocks: TierBlocks, block_bytes: u64) {
        for (count, blocks) in self.hit_bytes.iter().zip([blocks.ram, blocks.ssd, blocks.peers]) {
            count.fetch_add(blocks * block_bytes, Ordering::Relaxed);
        }
    }

    /// A lookup's wait for saves has ended. `waited` is 0 if it did not wait.
    pub(crate) fn save_wait_ended(&self, outcome: WaitOutcome, waited: Duration) {
        count(&self.awaited_saves[outcome as usize]);
        if waited > Duration::ZERO {
            self.save_waits[outcome as usize].observe(waited);
        }
    }
}

/// Called by the live page's sampler.
impl Events {
    pub(crate) fn all_hit_bytes(&self) -> u64 {
        self.hit_bytes.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn all_awaited_saves(&self) -> u64 {
        self.awaited_saves.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Called by a scrape. Labels with a count of 0 are left out, except among the durations of calls.
impl Events {
    pub(super) fn bad_frames(&self) -> u64 {
        self.bad_frames.load(Ordering::Relaxed)
    }

    pub(super) fn registered(&self) -> Vec<(Labels, f64)> {
        let methods = [Method::Auto, Method::ProcessVm, Method::Mapped, Method::Gpu];
        counted(methods.map(|method| (method_name(method), &self.registered[method as usize])))
    }

    pub(crate) fn refused(&self) -> Vec<(Labels, f64)> {
        counted(CALLS.iter().map(|call| call.name).zip(&self.refused))
    }

    pub(super) fn durations(&self) -> Vec<(Labels, Distribution)> {
        let read = |(call, took): (&str, &Histogram<15>)| (vec![call.to_owned()], took.read());
        CALLS.iter().map(|call| call.name).zip(&self.durations).map(read).collect()
    }

    pub(crate) fn hit_bytes(&self) -> Vec<(Labels, f64)> {
        let value =
            |(tier, count): (&str, &AtomicU64)| (vec![tier.to_owned()], count.load(Ordering::Relaxed) as f64);
        TIERS.into_iter().zip(&self.hit_bytes).map(value).collect()
    }

    pub(super) fn awaited_saves(&self) -> Vec<(Labels, f64)> {
        counted(WaitOutcome::ALL.map(WaitOutcome::name).into_iter().zip(&self.awaited_saves))
    }

    pub(super) fn save_waits(&self) -> Vec<(Labels, Distribution)> {
        let read = |(outcome, waits): (WaitOutcome, &Histogram<11>)| {
            let waits = waits.read();
            (!waits.is_empty()).then(|| (vec![outcome.name().to_owned()], waits))
        };
        WaitOutcome::ALL.into_iter().zip(&self.save_waits).filter_map(read).collect()
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn counted<'c>(counters: impl IntoIterator<Item = (&'static str, &'c AtomicU64)>) -> Vec<(Labels, f64)> {
    let value = |(label, counter): (&str, &AtomicU64)| {
        let count = counter.load(Ordering::Relaxed);
        (count > 0).then(|| (vec![label.to_owned()], count as f64))
    };
    counters.into_iter().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_the_place_of_its_number() {
        assert!(WaitOutcome::ALL.iter().enumerate().all(|(at, outcome)| *outcome as usize == at));
    }

    #[test]
    fn what_never_happened_is_left_out() {
        let events = Events::default();
        assert!(
            events.registered().is_empty()
                && events.refused().is_empty()
                && events.awaited_saves().is_empty()
        );
        events.worker_registered(Method::Gpu);
        events.answered(Call::Lookup, Duration::from_micros(7), true);
        events.save_wait_ended(WaitOutcome::Ready, Duration::ZERO);
        events.save_wait_ended(WaitOutcome::Stalled, Duration::from_millis(2));
        let one = |label: &str| (vec![label.to_owned()], 1.0);
        assert_eq!(events.registered(), [one("gpu")]);
        assert_eq!(events.refused(), [one("Lookup")]);
        assert_eq!(events.awaited_saves(), [one("ready"), one("stalled")]);
        let waits: Vec<_> = events.save_waits().into_iter().map(|(labels, _)| labels).collect();
        assert_eq!(waits, [["stalled"]]);
        assert_eq!(events.durations().iter().filter(|(_, took)| !took.is_empty()).count(), 1);
    }
}
