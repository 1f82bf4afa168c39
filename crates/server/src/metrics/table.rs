//! All metrics of the daemon, each named in one place: what it is called, what it tells, and where its value comes from.

use kvlane_door::MetricKind;
use kvlane_policy::PolicyKind;
use kvlane_store::SpaceStats;

use super::scrape::{ROLES, Samples, Scrape, each, of_auto, of_ssd, one};

/// One metric of the daemon.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// As scraped.
    pub name: &'static str,
    /// What it is.
    pub kind: MetricKind,
    /// Labels, comma-separated.
    pub labels: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Where its value comes from.
    pub(crate) source: Source,
}

/// Where the value of a metric comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    /// Counted when it happens.
    Counted(Event),
    /// Read when somebody asks for the page. It has one label at most.
    Read(fn(&Scrape) -> Samples),
    /// Read too, summed over the spaces of each namespace that the daemon knows now.
    OfNamespace(fn(&SpaceStats) -> u64),
    /// The hit-rate ceilings of each namespace.
    NamespaceCeilings,
}

/// What is counted when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Event {
    /// A connection did not speak the protocol.
    BadFrame,
    /// A worker registered, with a method.
    WorkerRegistered,
    /// A call was refused.
    Refused,
    /// A call was answered, after a time.
    Answered,
    /// A lookup's wait for another engine is over, or did not begin.
    HandOff,
    /// And how long it took, if it began.
    HandOffWaited,
}

impl Event {
    /// The metric that counts it. Evaluated when the daemon is compiled: an event without a metric does not compile.
    pub(crate) const fn metric(self) -> &'static Metric {
        let mut at = 0;
        loop {
            assert!(at < METRICS.len(), "no metric counts this event");
            if let Source::Counted(event) = METRICS[at].source
                && event as u8 == self as u8
            {
                return &METRICS[at];
            }
            at += 1;
        }
    }
}

const fn metric(
    name: &'static str,
    kind: MetricKind,
    labels: &'static str,
    help: &'static str,
    source: Source,
) -> Metric {
    Metric { name, kind, labels, help, source }
}

use MetricKind::{Counter, Gauge, Histogram};
use Source::{Counted, NamespaceCeilings, OfNamespace, Read};

/// All metrics of the daemon. A new one is a row here; `make docs` puts it onto the reference page.
pub const METRICS: &[Metric] = &[
    metric("kvlane_pool_bytes", Gauge, "", "Bytes of the pool.", Read(|s| one(s.stats.pool_bytes))),
    metric(
        "kvlane_pool_used_bytes",
        Gauge,
        "",
        "Bytes of the pool that hold blocks or are claimed for them.",
        Read(|s| one(s.stats.used_bytes)),
    ),
    metric(
        "kvlane_blocks",
        Gauge,
        "",
        "Blocks in the pool that a lookup can find.",
        Read(|s| one(s.stats.blocks)),
    ),
    metric(
        "kvlane_leased_blocks",
        Gauge,
        "",
        "Blocks that were promised to engines and may not be evicted.",
        Read(|s| one(s.stats.leased_blocks)),
    ),
    metric(
        "kvlane_claimed_blocks",
        Gauge,
        "",
        "Blocks that are being saved.",
        Read(|s| one(s.stats.claimed_blocks)),
    ),
    metric("kvlane_leases", Gauge, "", "Leases that engines hold.", Read(|s| one(s.stats.leases))),
    metric(
        "kvlane_seal_queue_blocks",
        Gauge,
        "",
        "Blocks that are saved and wait for their checksum.",
        Read(|s| one(s.stats.seal_queue)),
    ),
    metric(
        "kvlane_connections_turned_away_total",
        Counter,
        "door",
        "Connections over TCP and HTTP that were closed at once because as many as may be were open.",
        Read(|s| each(s.turned_away)),
    ),
    metric(
        "kvlane_sessions",
        Gauge,
        "role",
        "Connected schedulers, workers and tools.",
        Read(|s| each(ROLES.map(|role| (role, s.connected(role))))),
    ),
    metric(
        "kvlane_limbo_sessions",
        Gauge,
        "",
        "Processes whose connection was lost and that are still alive.",
        Read(|s| one(s.lost_sessions())),
    ),
    metric(
        "kvlane_sealed_blocks_total",
        Counter,
        "",
        "Blocks that became visible.",
        Read(|s| one(s.stats.counters.sealed_blocks)),
    ),
    metric(
        "kvlane_evicted_blocks_total",
        Counter,
        "",
        "Blocks that made room for others.",
        Read(|s| one(s.stats.counters.evicted_blocks)),
    ),
    metric(
        "kvlane_evicted_bytes_total",
        Counter,
        "",
        "Bytes of evicted blocks.",
        Read(|s| one(s.stats.counters.evicted_bytes)),
    ),
    metric(
        "kvlane_replacement_policy",
        Gauge,
        "policy",
        "1 for the policy that decides which blocks make room for others, else 0.",
        Read(|s| each(PolicyKind::ALL.map(|kind| (kind.name(), u64::from(kind == s.policy.active))))),
    ),
    metric(
        "kvlane_policy_shadow_hit_ratio",
        Gauge,
        "policy",
        "With --policy auto, recent prefix hits of the shadow cache that runs this policy, of its block references.",
        Read(|s| {
            each(
                s.auto()
                    .into_iter()
                    .flat_map(|auto| &auto.shadow_hit_rates)
                    .map(|(kind, rate)| (kind.name(), *rate)),
            )
        }),
    ),
    metric(
        "kvlane_policy_learned_hit_density",
        Gauge,
        "blocks",
        "With --policy learned, or auto while that one decides: hits that a block of this kind, just asked for, is expected to bring for each block reference that passes while it is kept.",
        Read(|s| each(s.policy.learnt.iter().map(|class| (class.blocks.as_str(), class.density(0))))),
    ),
    metric(
        "kvlane_policy_switches_total",
        Counter,
        "",
        "With --policy auto, how often another policy took over.",
        Read(|s| of_auto(s, |auto| auto.switches)),
    ),
    metric(
        "kvlane_policy_left_out_total",
        Counter,
        "",
        "With --policy auto, sampled lookups that the shadow caches did not get, since too many came at once.",
        Read(|s| of_auto(s, |auto| auto.left_out)),
    ),
    metric(
        "kvlane_hit_blocks_total",
        Counter,
        "namespace, name",
        "Blocks that lookups found.",
        OfNamespace(|space| space.hit_blocks),
    ),
    metric(
        "kvlane_missed_blocks_total",
        Counter,
        "namespace, name",
        "Blocks that lookups did not find.",
        OfNamespace(|space| space.missed_blocks),
    ),
    metric(
        "kvlane_hit_ceiling_ratio",
        Gauge,
        "window",
        "Share of the blocks looked up in the last 15m, 1h or 24h that a cache without limit could have hit, estimated.",
        Read(|s| each(s.ceilings_of_all().map(|reading| (reading.window, reading.ratio)))),
    ),
    metric(
        "kvlane_namespace_hit_ceiling_ratio",
        Gauge,
        "namespace, name, window",
        "The same for each of the 16 namespaces first heard of, until one of them is silent for an hour.",
        NamespaceCeilings,
    ),
    metric(
        "kvlane_hit_ceiling_left_out_total",
        Counter,
        "",
        "Lookups that the ceilings do not count, since too many came at once.",
        Read(|s| one(s.ceilings_left_out)),
    ),
    metric(
        "kvlane_namespace_blocks",
        Gauge,
        "namespace, name",
        "Blocks of a namespace.",
        OfNamespace(|space| space.blocks),
    ),
    metric(
        "kvlane_namespace_bytes",
        Gauge,
        "namespace, name",
        "Bytes of a namespace.",
        OfNamespace(|space| space.bytes),
    ),
    metric(
        "kvlane_save_present_blocks_total",
        Counter,
        "",
        "Blocks not copied because the pool had them.",
        Read(|s| one(s.stats.counters.dedup_present)),
    ),
    metric(
        "kvlane_ssd_blocks",
        Gauge,
        "",
        "Blocks that the SSD tier has.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.blocks)),
    ),
    metric(
        "kvlane_ssd_bytes",
        Gauge,
        "",
        "Bytes of the blocks that the SSD tier has.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.block_bytes)),
    ),
    metric(
        "kvlane_ssd_index_bytes",
        Gauge,
        "",
        "Memory that the index of the SSD tier takes, about.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.index_bytes)),
    ),
    metric(
        "kvlane_ssd_backlog_bytes",
        Gauge,
        "device",
        "Bytes on their way to an SSD.",
        Read(|s| each(s.ssd_devices().map(|device| (device.path.display(), device.backlog_bytes)))),
    ),
    metric(
        "kvlane_ssd_degraded",
        Gauge,
        "device",
        "1 while an SSD takes no writes after errors.",
        Read(|s| {
            each(s.ssd_devices().map(|device| (device.path.display(), u64::from(device.degraded.is_some()))))
        }),
    ),
    metric(
        "kvlane_ssd_waiting_blocks",
        Gauge,
        "",
        "Blocks that wait for their turn to go to the SSD.",
        Read(|s| of_ssd(s, |_| s.stats.spill_queue)),
    ),
    metric(
        "kvlane_ssd_written_blocks_total",
        Counter,
        "",
        "Blocks written to the SSD tier.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.writes_stored)),
    ),
    metric(
        "kvlane_ssd_written_bytes_total",
        Counter,
        "",
        "Bytes written to the SSD tier for blocks.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.write_bytes)),
    ),
    metric(
        "kvlane_ssd_unwritten_blocks_total",
        Counter,
        "",
        "Blocks that the SSD tier did not get: evicted before their turn, too many, or refused by it.",
        Read(|s| of_ssd(s, |_| s.stats.counters.unspilled_blocks)),
    ),
    metric(
        "kvlane_ssd_fetched_blocks_total",
        Counter,
        "",
        "Blocks brought back from the SSD tier.",
        Read(|s| of_ssd(s, |_| s.stats.counters.fetched_blocks)),
    ),
    metric(
        "kvlane_ssd_fetched_bytes_total",
        Counter,
        "",
        "Bytes brought back from the SSD tier.",
        Read(|s| of_ssd(s, |_| s.stats.counters.fetched_bytes)),
    ),
    metric(
        "kvlane_ssd_failed_fetches_total",
        Counter,
        "",
        "Blocks that could not be brought back: gone meanwhile, damaged, or too slow.",
        Read(|s| of_ssd(s, |_| s.stats.counters.failed_fetches)),
    ),
    metric(
        "kvlane_ssd_damaged_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier dropped for wrong bytes.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.reads_damaged)),
    ),
    metric(
        "kvlane_ssd_dropped_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier that made room for others.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.blocks_dropped)),
    ),
    metric(
        "kvlane_ssd_kept_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier written again when their place was needed: what was read since it was written, or what --policy learned expects the most hits of.",
        Read(|s| of_ssd(s, |ssd| ssd.tier.blocks_kept)),
    ),
    metric(
        "kvlane_save_in_flight_blocks_total",
        Counter,
        "",
        "Blocks not copied because another engine was saving them.",
        Read(|s| one(s.stats.counters.dedup_in_flight)),
    ),
    metric(
        "kvlane_save_no_room_blocks_total",
        Counter,
        "",
        "Blocks not saved because everything was leased or in flight.",
        Read(|s| one(s.stats.counters.no_room)),
    ),
    metric(
        "kvlane_save_not_admitted_blocks_total",
        Counter,
        "",
        "Blocks not saved because the policy found them not worth what they would displace.",
        Read(|s| one(s.stats.counters.not_admitted)),
    ),
    metric(
        "kvlane_stale_commits_total",
        Counter,
        "",
        "Commits that came after their claim had died; discarded.",
        Read(|s| one(s.stats.counters.stale_commits)),
    ),
    metric(
        "kvlane_lease_expired_total",
        Counter,
        "",
        "Leases freed because their living owner no longer named them.",
        Read(|s| one(s.stats.counters.expired_leases)),
    ),
    metric(
        "kvlane_loaded_over_rails_bytes_total",
        Counter,
        "",
        "Bytes that loads for one GPU moved over the links of others.",
        Read(|s| one(s.gpus.relayed_bytes)),
    ),
    metric(
        "kvlane_loaded_staged_bytes_total",
        Counter,
        "",
        "Bytes of short pieces that loads brought in long runs to a ring on their GPU, and scattered there.",
        Read(|s| one(s.gpus.staged_bytes)),
    ),
    metric(
        "kvlane_loads_unstaged_total",
        Counter,
        "",
        "Loads of short pieces that came piece by piece, since the ring on their GPU was in use or had failed.",
        Read(|s| one(s.gpus.unstaged_loads)),
    ),
    metric(
        "kvlane_gpu_engine_bytes",
        Gauge,
        "direction",
        "Runs from this length on are left to copy engines while a GPU is idle; measured at start.",
        Read(|s| each(s.gpus.engine_bytes.iter().copied())),
    ),
    metric(
        "kvlane_loaded_by_link_bytes_total",
        Counter,
        "gpu",
        "Bytes that loads brought from the host over the link of each GPU, by its ordinal in the daemon.",
        Read(|s| each(s.gpus.bytes_by_link.iter().map(|(gpu, bytes)| (gpu, *bytes)))),
    ),
    metric(
        "kvlane_scrub_blocks_total",
        Counter,
        "",
        "Blocks whose checksum was verified again.",
        Read(|s| one(s.stats.counters.scrub_checked)),
    ),
    metric(
        "kvlane_scrub_bad_blocks_total",
        Counter,
        "",
        "Blocks dropped because their bytes had changed.",
        Read(|s| one(s.stats.counters.scrub_bad)),
    ),
    metric(
        "kvlane_journal_entries_total",
        Counter,
        "",
        "Blocks that became visible or went, since an engine first asked to be told.",
        Read(|s| one(s.stats.counters.journal_entries)),
    ),
    metric(
        "kvlane_journal_restarts_total",
        Counter,
        "",
        "Times that an engine asked too late for all that had happened: it took back all it had told of.",
        Read(|s| one(s.stats.counters.journal_restarts)),
    ),
    metric(
        "kvlane_workers_registered_total",
        Counter,
        "method",
        "Worker registrations by how their saves travel.",
        Counted(Event::WorkerRegistered),
    ),
    metric(
        "kvlane_bad_frames_total",
        Counter,
        "",
        "Connections closed because they did not speak the protocol.",
        Counted(Event::BadFrame),
    ),
    metric(
        "kvlane_requests_refused_total",
        Counter,
        "call",
        "Requests that were refused.",
        Counted(Event::Refused),
    ),
    metric(
        "kvlane_hand_offs_waiting",
        Gauge,
        "",
        "Lookups that wait for what another engine saves.",
        Read(|s| one(s.hand_offs as u64)),
    ),
    metric(
        "kvlane_hand_off_blocks",
        Gauge,
        "",
        "Blocks that these lookups wait for, each as often as it is waited for.",
        Read(|s| one(s.watched_blocks as u64)),
    ),
    metric(
        "kvlane_hand_offs_total",
        Counter,
        "outcome",
        "Lookups of prompts that another engine was to save, by what became of the wait for it.",
        Counted(Event::HandOff),
    ),
    metric(
        "kvlane_hand_off_wait_seconds",
        Histogram,
        "outcome",
        "How long lookups waited for what another engine saves.",
        Counted(Event::HandOffWaited),
    ),
    metric(
        "kvlane_request_duration_seconds",
        Histogram,
        "call",
        "From reading a request to its answer.",
        Counted(Event::Answered),
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_prometheus_and_are_unique() {
        let mut names: Vec<_> = METRICS.iter().map(|metric| metric.name).collect();
        assert!(
            METRICS
                .iter()
                .all(|m| (m.kind == Counter) == m.name.ends_with("_total") && m.help.ends_with('.'))
        );
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }
}
