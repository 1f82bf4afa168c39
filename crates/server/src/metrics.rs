//! Prometheus metrics: one table names them all, and the reference page is made from it.

use std::{collections::BTreeMap, time::Duration};

use kvlane_block::Namespace;
use kvlane_engine_memory::Gpus;
use kvlane_policy::{Choice, PolicyKind};
use kvlane_store::{PolicyReport, SpaceStats, StoreStats};
use metrics::{Histogram, Unit, counter, gauge, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::{
    calls::table::{CALLS, Call},
    ceilings::Reading,
    shared::Shared,
    ssd::Ssd,
};

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A present value.
    Gauge,
    /// A distribution.
    Histogram,
}

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
}

const fn metric(name: &'static str, kind: MetricKind, labels: &'static str, help: &'static str) -> Metric {
    Metric { name, kind, labels, help }
}

use MetricKind::{Counter, Gauge};

/// All metrics of the daemon.
pub const METRICS: &[Metric] = &[
    metric("kvlane_pool_bytes", Gauge, "", "Bytes of the pool."),
    metric(
        "kvlane_pool_used_bytes",
        Gauge,
        "",
        "Bytes of the pool that hold blocks or are claimed for them.",
    ),
    metric("kvlane_blocks", Gauge, "", "Blocks in the pool that a lookup can find."),
    metric("kvlane_leased_blocks", Gauge, "", "Blocks that were promised to engines and may not be evicted."),
    metric("kvlane_claimed_blocks", Gauge, "", "Blocks that are being saved."),
    metric("kvlane_leases", Gauge, "", "Leases that engines hold."),
    metric("kvlane_seal_queue_blocks", Gauge, "", "Blocks that are saved and wait for their checksum."),
    metric(
        "kvlane_connections_turned_away_total",
        Counter,
        "door",
        "Connections over TCP and HTTP that were closed at once because as many as may be were open.",
    ),
    metric("kvlane_sessions", Gauge, "role", "Connected schedulers, workers and tools."),
    metric(
        "kvlane_limbo_sessions",
        Gauge,
        "",
        "Processes whose connection was lost and that are still alive.",
    ),
    metric("kvlane_sealed_blocks_total", Counter, "", "Blocks that became visible."),
    metric("kvlane_evicted_blocks_total", Counter, "", "Blocks that made room for others."),
    metric("kvlane_evicted_bytes_total", Counter, "", "Bytes of evicted blocks."),
    metric(
        "kvlane_replacement_policy",
        Gauge,
        "policy",
        "1 for the policy that decides which blocks make room for others, else 0.",
    ),
    metric(
        "kvlane_policy_shadow_hit_ratio",
        Gauge,
        "policy",
        "With --policy auto, recent prefix hits of the shadow cache that runs this policy, of its block references.",
    ),
    metric(
        "kvlane_policy_switches_total",
        Counter,
        "",
        "With --policy auto, how often another policy took over.",
    ),
    metric(
        "kvlane_policy_left_out_total",
        Counter,
        "",
        "With --policy auto, sampled lookups that the shadow caches did not get, since too many came at once.",
    ),
    metric("kvlane_hit_blocks_total", Counter, "namespace, name", "Blocks that lookups found."),
    metric("kvlane_missed_blocks_total", Counter, "namespace, name", "Blocks that lookups did not find."),
    metric(
        "kvlane_hit_ceiling_ratio",
        Gauge,
        "window",
        "Share of the blocks looked up in the last 15m, 1h or 24h that a cache without limit could have hit, estimated.",
    ),
    metric(
        "kvlane_namespace_hit_ceiling_ratio",
        Gauge,
        "namespace, name, window",
        "The same for each of the 16 namespaces first heard of, until one of them is silent for an hour.",
    ),
    metric(
        "kvlane_hit_ceiling_left_out_total",
        Counter,
        "",
        "Lookups that the ceilings do not count, since too many came at once.",
    ),
    metric("kvlane_namespace_blocks", Gauge, "namespace, name", "Blocks of a namespace."),
    metric("kvlane_namespace_bytes", Gauge, "namespace, name", "Bytes of a namespace."),
    metric("kvlane_save_present_blocks_total", Counter, "", "Blocks not copied because the pool had them."),
    metric("kvlane_ssd_blocks", Gauge, "", "Blocks that the SSD tier has."),
    metric("kvlane_ssd_bytes", Gauge, "", "Bytes of the blocks that the SSD tier has."),
    metric("kvlane_ssd_index_bytes", Gauge, "", "Memory that the index of the SSD tier takes, about."),
    metric("kvlane_ssd_backlog_bytes", Gauge, "device", "Bytes on their way to an SSD."),
    metric("kvlane_ssd_degraded", Gauge, "device", "1 while an SSD takes no writes after errors."),
    metric("kvlane_ssd_waiting_blocks", Gauge, "", "Blocks that wait for their turn to go to the SSD."),
    metric("kvlane_ssd_written_blocks_total", Counter, "", "Blocks written to the SSD tier."),
    metric("kvlane_ssd_written_bytes_total", Counter, "", "Bytes written to the SSD tier for blocks."),
    metric(
        "kvlane_ssd_unwritten_blocks_total",
        Counter,
        "",
        "Blocks that the SSD tier did not get: evicted before their turn, too many, or refused by it.",
    ),
    metric("kvlane_ssd_fetched_blocks_total", Counter, "", "Blocks brought back from the SSD tier."),
    metric("kvlane_ssd_fetched_bytes_total", Counter, "", "Bytes brought back from the SSD tier."),
    metric(
        "kvlane_ssd_failed_fetches_total",
        Counter,
        "",
        "Blocks that could not be brought back: gone meanwhile, damaged, or too slow.",
    ),
    metric("kvlane_ssd_damaged_blocks_total", Counter, "", "Blocks of the SSD tier dropped for wrong bytes."),
    metric(
        "kvlane_ssd_dropped_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier that made room for others.",
    ),
    metric(
        "kvlane_ssd_kept_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier copied on, since they had been read, when their place was needed.",
    ),
    metric(
        "kvlane_save_in_flight_blocks_total",
        Counter,
        "",
        "Blocks not copied because another engine was saving them.",
    ),
    metric(
        "kvlane_save_no_room_blocks_total",
        Counter,
        "",
        "Blocks not saved because everything was leased or in flight.",
    ),
    metric(
        "kvlane_save_not_admitted_blocks_total",
        Counter,
        "",
        "Blocks not saved because the policy found them not worth what they would displace.",
    ),
    metric(
        "kvlane_stale_commits_total",
        Counter,
        "",
        "Commits that came after their claim had died; discarded.",
    ),
    metric(
        "kvlane_lease_expired_total",
        Counter,
        "",
        "Leases freed because their living owner no longer named them.",
    ),
    metric(
        "kvlane_loaded_over_rails_bytes_total",
        Counter,
        "",
        "Bytes that loads for one GPU moved over the links of others.",
    ),
    metric(
        "kvlane_loaded_staged_bytes_total",
        Counter,
        "",
        "Bytes of short pieces that loads brought in long runs to a ring on their GPU, and scattered there.",
    ),
    metric(
        "kvlane_loads_unstaged_total",
        Counter,
        "",
        "Loads of short pieces that came piece by piece, since the ring on their GPU was in use or had failed.",
    ),
    metric(
        "kvlane_gpu_engine_bytes",
        Gauge,
        "direction",
        "Runs from this length on are left to copy engines while a GPU is idle; measured at start.",
    ),
    metric(
        "kvlane_loaded_by_link_bytes_total",
        Counter,
        "gpu",
        "Bytes that loads brought from the host over the link of each GPU, by its ordinal in the daemon.",
    ),
    metric("kvlane_scrub_blocks_total", Counter, "", "Blocks whose checksum was verified again."),
    metric("kvlane_scrub_bad_blocks_total", Counter, "", "Blocks dropped because their bytes had changed."),
    metric(
        "kvlane_workers_registered_total",
        Counter,
        "method",
        "Worker registrations by how their saves travel.",
    ),
    metric(
        "kvlane_bad_frames_total",
        Counter,
        "",
        "Connections closed because they did not speak the protocol.",
    ),
    metric("kvlane_requests_refused_total", Counter, "call", "Requests that were refused."),
    metric(
        "kvlane_request_duration_seconds",
        MetricKind::Histogram,
        "call",
        "From reading a request to its answer.",
    ),
];

/// The daemon's recorder, apart from any global one.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    durations: Vec<Histogram>,
}

impl Metrics {
    pub(crate) fn install() -> Self {
        let buckets =
            [10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0, 5.0];
        let builder = PrometheusBuilder::new();
        let builder = builder
            .set_buckets_for_metric(Matcher::Full("kvlane_request_duration_seconds".into()), &buckets)
            .unwrap_or_else(|_| PrometheusBuilder::new());
        let recorder = builder.build_recorder();
        let durations = with_local_recorder(&recorder, || {
            for metric in METRICS {
                match metric.kind {
                    MetricKind::Counter => metrics::describe_counter!(metric.name, metric.help),
                    MetricKind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
                    MetricKind::Histogram => {
                        metrics::describe_histogram!(metric.name, Unit::Seconds, metric.help)
                    }
                }
            }
            CALLS
                .iter()
                .map(|call| histogram!("kvlane_request_duration_seconds", "call" => call.name))
                .collect()
        });
        let handle = recorder.handle();
        Self { recorder, handle, durations }
    }

    pub(crate) fn answered(&self, call: Call, took: Duration, refused: bool) {
        self.durations[call as usize].record(took);
        if refused {
            let name = call.row().name;
            with_local_recorder(&self.recorder, || {
                counter!("kvlane_requests_refused_total", "call" => name).increment(1)
            });
        }
    }

    pub(crate) fn bad_frame(&self) {
        with_local_recorder(&self.recorder, || counter!("kvlane_bad_frames_total").increment(1));
    }

    pub(crate) fn worker_registered(&self, method: &'static str) {
        with_local_recorder(&self.recorder, || {
            counter!("kvlane_workers_registered_total", "method" => method).increment(1);
        });
    }

    /// Sorts what was recorded into buckets. Until then it is kept one by one: to be called now and then, whether or
    /// not anybody reads the page.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// The page that Prometheus reads.
    pub(crate) fn render(&self, shared: &Shared) -> String {
        let ceilings = shared.ceilings.read();
        with_local_recorder(&self.recorder, || record(shared, &ceilings));
        self.upkeep();
        let mut page = self.handle.render();
        of_namespaces(&shared.store.spaces(), &ceilings, &mut page);
        page
    }
}

fn record(shared: &Shared, ceilings: &[Reading]) {
    let stats = shared.store.stats();
    for (name, value) in [
        ("kvlane_pool_bytes", stats.pool_bytes),
        ("kvlane_pool_used_bytes", stats.used_bytes),
        ("kvlane_blocks", stats.blocks),
        ("kvlane_leased_blocks", stats.leased_blocks),
        ("kvlane_claimed_blocks", stats.claimed_blocks),
        ("kvlane_leases", stats.leases),
        ("kvlane_seal_queue_blocks", stats.seal_queue),
    ] {
        gauge!(name).set(value as f64);
    }
    for (name, value) in [
        ("kvlane_sealed_blocks_total", stats.counters.sealed_blocks),
        ("kvlane_evicted_blocks_total", stats.counters.evicted_blocks),
        ("kvlane_evicted_bytes_total", stats.counters.evicted_bytes),
        ("kvlane_save_present_blocks_total", stats.counters.dedup_present),
        ("kvlane_save_in_flight_blocks_total", stats.counters.dedup_in_flight),
        ("kvlane_save_no_room_blocks_total", stats.counters.no_room),
        ("kvlane_save_not_admitted_blocks_total", stats.counters.not_admitted),
        ("kvlane_stale_commits_total", stats.counters.stale_commits),
        ("kvlane_lease_expired_total", stats.counters.expired_leases),
        ("kvlane_loaded_over_rails_bytes_total", shared.gpus.as_ref().map_or(0, Gpus::relayed_bytes)),
        ("kvlane_loaded_staged_bytes_total", shared.gpus.as_ref().map_or(0, Gpus::staged_bytes)),
        ("kvlane_loads_unstaged_total", shared.gpus.as_ref().map_or(0, Gpus::unstaged_loads)),
        ("kvlane_scrub_blocks_total", stats.counters.scrub_checked),
        ("kvlane_scrub_bad_blocks_total", stats.counters.scrub_bad),
    ] {
        counter!(name).absolute(value);
    }
    for (gpu, bytes) in shared.gpus.as_ref().map_or_else(BTreeMap::new, Gpus::bytes_by_link) {
        counter!("kvlane_loaded_by_link_bytes_total", "gpu" => gpu.to_string()).absolute(bytes);
    }
    if let Some(ssd) = &shared.ssd {
        record_ssd(ssd, &stats);
    }
    record_policy(&shared.store.policy());
    for Reading { window, ratio, .. } in ceilings.iter().filter(|reading| reading.namespace.is_none()) {
        gauge!("kvlane_hit_ceiling_ratio", "window" => *window).set(*ratio);
    }
    counter!("kvlane_hit_ceiling_left_out_total").absolute(shared.ceilings.left_out());
    for (direction, bytes) in shared.gpus.iter().flat_map(Gpus::engine_bytes) {
        gauge!("kvlane_gpu_engine_bytes", "direction" => direction).set(bytes as f64);
    }
    for (door, slots) in [("tcp", &shared.tcp_slots), ("http", &shared.http_slots)] {
        counter!("kvlane_connections_turned_away_total", "door" => door).absolute(slots.turned_away());
    }
    let sessions = shared.sessions.list();
    for role in ["scheduler", "worker", "tool"] {
        let count = sessions
            .iter()
            .filter(|(_, info, _, limbo)| !limbo && crate::status::role_name(info.role) == role);
        gauge!("kvlane_sessions", "role" => role).set(count.count() as f64);
    }
    gauge!("kvlane_limbo_sessions").set(sessions.iter().filter(|(.., limbo)| *limbo).count() as f64);
}

/// What is told of each namespace that the daemon knows now. A recorder would keep the labels of each that there ever was.
fn of_namespaces(spaces: &[SpaceStats], ceilings: &[Reading], page: &mut String) {
    // A namespace has a space for each cut; its metrics are their sum.
    let mut namespaces: BTreeMap<(Namespace, &str), [u64; 4]> = BTreeMap::new();
    for space in spaces {
        let sums = namespaces.entry((space.namespace, &space.name)).or_default();
        let parts = [space.hit_blocks, space.missed_blocks, space.blocks, space.bytes];
        sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
    let label = |namespace: Namespace, name: &str| {
        let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("namespace=\"{namespace}\",name=\"{name}\"")
    };
    let of_each = [
        "kvlane_hit_blocks_total",
        "kvlane_missed_blocks_total",
        "kvlane_namespace_blocks",
        "kvlane_namespace_bytes",
    ];
    for (at, metric) in of_each.into_iter().enumerate() {
        let values =
            namespaces.iter().map(|((namespace, name), sums)| (label(*namespace, name), sums[at] as f64));
        write_metric(page, metric, values);
    }
    let names: BTreeMap<Namespace, &str> = namespaces.keys().copied().collect();
    let apart = ceilings.iter().filter_map(|reading| {
        let namespace = reading.namespace?;
        let labels = label(namespace, names.get(&namespace).copied().unwrap_or_default());
        Some((format!("{labels},window=\"{}\"", reading.window), reading.ratio))
    });
    write_metric(page, "kvlane_namespace_hit_ceiling_ratio", apart);
}

/// One metric of [`METRICS`] as Prometheus reads it; nothing where it has no value.
fn write_metric(page: &mut String, name: &str, values: impl Iterator<Item = (String, f64)>) {
    let mut values = values.peekable();
    let Some(metric) = METRICS.iter().find(|metric| metric.name == name) else { return };
    if values.peek().is_none() {
        return;
    }
    let kind = if metric.kind == Counter { "counter" } else { "gauge" };
    page.push_str(&format!("# HELP {name} {}\n# TYPE {name} {kind}\n", metric.help));
    values.for_each(|(labels, value)| page.push_str(&format!("{name}{{{labels}}} {value}\n")));
    page.push('\n');
}

fn record_policy(report: &PolicyReport) {
    for kind in PolicyKind::ALL {
        let at_work = if kind == report.active { 1.0 } else { 0.0 };
        gauge!("kvlane_replacement_policy", "policy" => kind.name()).set(at_work);
    }
    if report.choice == Choice::Auto {
        for (kind, rate) in &report.shadow_hit_rates {
            gauge!("kvlane_policy_shadow_hit_ratio", "policy" => kind.name()).set(*rate);
        }
        counter!("kvlane_policy_switches_total").absolute(report.switches);
        counter!("kvlane_policy_left_out_total").absolute(report.left_out);
    }
}

fn record_ssd(ssd: &Ssd, store: &StoreStats) {
    let tier = ssd.tier.stats();
    for (name, value) in [
        ("kvlane_ssd_blocks", tier.blocks),
        ("kvlane_ssd_bytes", tier.block_bytes),
        ("kvlane_ssd_index_bytes", tier.index_bytes),
        ("kvlane_ssd_waiting_blocks", store.spill_queue),
    ] {
        gauge!(name).set(value as f64);
    }
    for (name, value) in [
        ("kvlane_ssd_written_blocks_total", tier.writes_stored),
        ("kvlane_ssd_written_bytes_total", tier.write_bytes),
        ("kvlane_ssd_unwritten_blocks_total", store.counters.unspilled_blocks),
        ("kvlane_ssd_fetched_blocks_total", store.counters.fetched_blocks),
        ("kvlane_ssd_fetched_bytes_total", store.counters.fetched_bytes),
        ("kvlane_ssd_failed_fetches_total", store.counters.failed_fetches),
        ("kvlane_ssd_damaged_blocks_total", tier.reads_damaged),
        ("kvlane_ssd_dropped_blocks_total", tier.blocks_dropped),
        ("kvlane_ssd_kept_blocks_total", tier.blocks_kept),
    ] {
        counter!(name).absolute(value);
    }
    for device in ssd.tier.status() {
        let labels = [("device", device.path.display().to_string())];
        gauge!("kvlane_ssd_backlog_bytes", &labels).set(device.backlog_bytes as f64);
        gauge!("kvlane_ssd_degraded", &labels).set(if device.degraded.is_some() { 1.0 } else { 0.0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_engines_call_themselves_stays_inside_its_label() {
        let space = |namespace: u8, name: &str| SpaceStats {
            namespace: Namespace([namespace; 16]),
            name: name.into(),
            cut: kvlane_block::CutDigest([0; 16]),
            shards: 1,
            blocks: 2,
            bytes: 8192,
            hit_blocks: 7,
            missed_blocks: 1,
        };
        let mut page = String::new();
        of_namespaces(&[], &[], &mut page);
        assert_eq!(page, "");
        let reading = Reading { namespace: Some(Namespace([1; 16])), window: "1h", ratio: 0.5 };
        of_namespaces(&[space(1, "a\"b\\c\nd"), space(2, "m"), space(2, "m")], &[reading], &mut page);
        let labels = format!("namespace=\"{}\",name=\"a\\\"b\\\\c\\nd\"", "01".repeat(16));
        for line in [
            "# TYPE kvlane_hit_blocks_total counter".to_owned(),
            format!("kvlane_namespace_bytes{{{labels}}} 8192"),
            format!("kvlane_hit_blocks_total{{namespace=\"{}\",name=\"m\"}} 14", "02".repeat(16)),
            format!("kvlane_namespace_hit_ceiling_ratio{{{labels},window=\"1h\"}} 0.5"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
    }

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
