//! Samples the daemon's rates once a second.

use std::{sync::Arc, time::Instant};

use kvlane_door::{History, Rates};

use crate::shared::Shared;

/// The series of the page's charts. All but the last three are rates a second.
pub(super) const SERIES: [&str; 19] = [
    "hit_blocks",
    "missed_blocks",
    "hit_bytes",
    "saved_bytes",
    "evicted_blocks",
    "evicted_bytes",
    // Seconds that the evicted blocks had been in the pool, together.
    "residence_seconds",
    "unsaved_blocks",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "ssd_reads",
    // Nanoseconds that these reads took, together.
    "ssd_read_ns",
    "peer_bytes",
    "lent_bytes",
    "link_bytes",
    "hand_offs",
    "used_bytes",
    "seal_queue_blocks",
    "waiting_lookups",
];
const RATES: usize = 16;

/// Makes the samples.
pub(crate) struct Sampler {
    shared: Arc<Shared>,
    history: Arc<History>,
    rates: Rates<RATES>,
}

impl Sampler {
    pub(super) fn new(shared: Arc<Shared>, history: Arc<History>) -> Self {
        Self { shared, history, rates: Rates::default() }
    }

    /// Takes a sample. Holds the store's lock for as long as a scrape does.
    pub(crate) fn sample(&mut self) {
        let shared = &*self.shared;
        let stats = shared.store.stats();
        let (hit_blocks, missed_blocks) = shared.store.hit_and_missed_blocks();
        let counters = &stats.counters;
        let ssd = shared.ssd.as_ref().map(|ssd| (ssd.tier.stats(), ssd.tier.status()));
        let cluster = shared.cluster.as_ref().map(|cluster| cluster.status());
        let reads = ssd.iter().flat_map(|(_, devices)| devices).map(|device| &device.read_latencies);
        let (ssd_reads, ssd_read_ns) = reads.fold((0, 0), |(count, ns), latencies| {
            (count + latencies.counts.iter().sum::<u64>(), ns + latencies.sum_ns)
        });
        let rates: [u64; RATES] = [
            hit_blocks,
            missed_blocks,
            shared.metrics.all_hit_bytes(),
            counters.sealed_bytes,
            counters.evicted_blocks,
            counters.evicted_bytes,
            stats.residence.seconds,
            counters.no_room,
            counters.fetched_bytes - counters.fetched_copy_bytes,
            ssd.as_ref().map_or(0, |(stats, _)| stats.write_bytes),
            ssd_reads,
            ssd_read_ns,
            cluster.as_ref().map_or(0, |cluster| cluster.fetched_bytes),
            cluster.as_ref().map_or(0, |cluster| cluster.lent_bytes),
            shared.gpus.as_ref().map_or(0, |gpus| gpus.bytes_by_link().values().sum()),
            shared.metrics.all_awaited_saves(),
        ];
        let rates = self.rates.since_last(rates, Instant::now());
        let present = [stats.used_bytes, stats.seal_queue, shared.awaited_saves.len() as u64];
        let sample: Vec<f64> = rates.into_iter().chain(present.map(|value| value as f64)).collect();
        self.history.push(&sample);
    }
}
