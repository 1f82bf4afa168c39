//! The table of the daemon's metrics, with one row each: name, kind, help, and where the value comes from.

use kvlane_block::Namespace;
use kvlane_door::{
    MetricKind::{Counter, Gauge},
    Row, distributions, each, total,
};
use kvlane_policy::PolicyKind;

use super::scrape::{ROLES, Scrape, by_label, by_namespace, of_auto, of_cluster, of_reached, of_ssd};

/// A new metric is a row here; `make docs` puts it onto the reference page.
pub(crate) const METRICS: &[Row<Scrape>] = &[
    total("kvlane_pool_bytes", Gauge, "Bytes of the pool.", |s| s.stats.pool_bytes),
    total(
        "kvlane_pool_used_bytes",
        Gauge,
        "Bytes of the pool that hold blocks or are claimed for them.",
        |s| s.stats.used_bytes,
    ),
    total(
        "kvlane_pool_unused_bytes",
        Gauge,
        "Bytes of the pool that are free for blocks of any size. The other free bytes only blocks of the sizes that are there can take.",
        |s| s.stats.unused_bytes,
    ),
    each(
        "kvlane_pool_free_extents",
        Gauge,
        "size",
        "Free places for shards of this size in bytes, beside the unused bytes; the 32 sizes with the most free bytes.",
        |s| by_label(s.stats.free_extents.iter().copied()),
    ),
    total("kvlane_blocks", Gauge, "Blocks in the pool that a lookup can find.", |s| s.stats.blocks),
    total(
        "kvlane_leased_blocks",
        Gauge,
        "Blocks that were promised to engines and may not be evicted.",
        |s| s.stats.leased_blocks,
    ),
    total("kvlane_claimed_blocks", Gauge, "Blocks that are being saved.", |s| s.stats.claimed_blocks),
    total("kvlane_leases", Gauge, "Leases that engines hold.", |s| s.stats.leases),
    total("kvlane_seal_queue_blocks", Gauge, "Blocks that are saved and wait for their checksum.", |s| {
        s.stats.seal_queue
    }),
    each(
        "kvlane_connections_turned_away_total",
        Counter,
        "door",
        "Connections over TCP and HTTP that were closed because the connection limit was reached.",
        |s| by_label(s.turned_away),
    ),
    each("kvlane_sessions", Gauge, "role", "Connected schedulers, workers and tools.", |s| {
        by_label(ROLES.map(|role| (role, s.connected(role))))
    }),
    each(
        "kvlane_engines",
        Gauge,
        "namespace, name",
        "Engines whose scheduler and workers are all connected, by the namespace of their first KV cache group.",
        |s| {
            let row = |(namespace, name, count): &(Namespace, String, u64)| {
                (vec![namespace.to_string(), name.clone()], *count as f64)
            };
            s.engines.iter().map(row).collect()
        },
    ),
    total(
        "kvlane_limbo_sessions",
        Gauge,
        "Processes whose connection was lost and that are still alive.",
        |s| s.lost_sessions(),
    ),
    total("kvlane_sealed_blocks_total", Counter, "Blocks that engines saved and that became visible.", |s| {
        s.stats.counters.sealed_blocks
    }),
    total("kvlane_saved_bytes_total", Counter, "Bytes of these blocks.", |s| s.stats.counters.sealed_bytes),
    total("kvlane_evicted_blocks_total", Counter, "Blocks that made room for others.", |s| {
        s.stats.counters.evicted_blocks
    }),
    total("kvlane_evicted_bytes_total", Counter, "Bytes of evicted blocks.", |s| {
        s.stats.counters.evicted_bytes
    }),
    distributions(
        "kvlane_evicted_residence_seconds",
        "",
        "How long evicted blocks had been in the pool since they were saved or fetched.",
        |s| vec![(Vec::new(), s.residence())],
    ),
    each(
        "kvlane_replacement_policy",
        Gauge,
        "policy",
        "1 for the policy that decides which blocks make room for others, else 0.",
        |s| by_label(PolicyKind::ALL.map(|kind| (kind.name(), u64::from(kind == s.policy.active)))),
    ),
    each(
        "kvlane_policy_shadow_hit_ratio",
        Gauge,
        "policy",
        "With --policy auto, recent prefix hits of the shadow cache that runs this policy, of its block references.",
        |s| {
            by_label(
                s.auto()
                    .into_iter()
                    .flat_map(|auto| &auto.shadow_hit_rates)
                    .map(|(kind, rate)| (kind.name(), *rate)),
            )
        },
    ),
    each(
        "kvlane_policy_learned_hit_density",
        Gauge,
        "blocks",
        "With --policy learned, or auto while that one decides: hits that a block of this kind, just asked for, is expected to bring for each block reference that passes while it is kept.",
        |s| by_label(s.policy.learnt.iter().map(|class| (class.blocks.as_str(), class.density(0)))),
    ),
    each(
        "kvlane_policy_switches_total",
        Counter,
        "",
        "With --policy auto, how often another policy took over.",
        |s| of_auto(s, |auto| auto.switches),
    ),
    each(
        "kvlane_policy_left_out_total",
        Counter,
        "",
        "With --policy auto, sampled lookups that the shadow caches did not get, because too many came at once.",
        |s| of_auto(s, |auto| auto.left_out),
    ),
    each("kvlane_hit_blocks_total", Counter, "namespace, name", "Blocks that lookups found.", |s| {
        by_namespace(&s.spaces, |space| space.hit_blocks)
    }),
    each(
        "kvlane_missed_blocks_total",
        Counter,
        "namespace, name",
        "Blocks that lookups did not find.",
        |s| by_namespace(&s.spaces, |space| space.missed_blocks),
    ),
    each(
        "kvlane_hit_bytes_total",
        Counter,
        "tier",
        "Bytes of the blocks that lookups found, by where they were: ram, ssd, or peers for other hosts.",
        |s| s.events.hit_bytes(),
    ),
    each(
        "kvlane_hit_ratio",
        Gauge,
        "window",
        "Share of the blocks looked up in the last 15m, 1h or 24h (--hit-windows) that were hits.",
        |s| s.of_windows(|reading| reading.hit_ratio),
    ),
    each(
        "kvlane_hit_ceiling_ratio",
        Gauge,
        "window",
        "Share of these blocks that a cache without limit could have hit, estimated.",
        |s| s.of_windows(|reading| reading.ceiling),
    ),
    each("kvlane_hit_window_blocks", Gauge, "window", "Blocks that were looked up in that time.", |s| {
        s.of_windows(|reading| reading.references as f64)
    }),
    each(
        "kvlane_namespace_hit_ratio",
        Gauge,
        "namespace, name, window",
        "kvlane_hit_ratio of each of the first 16 namespaces, until one of them is silent for an hour.",
        |s| s.of_namespace_windows(|reading| reading.hit_ratio),
    ),
    each(
        "kvlane_namespace_hit_ceiling_ratio",
        Gauge,
        "namespace, name, window",
        "kvlane_hit_ceiling_ratio of the same namespaces.",
        |s| s.of_namespace_windows(|reading| reading.ceiling),
    ),
    total(
        "kvlane_hit_ceiling_left_out_total",
        Counter,
        "Lookups that the ceilings do not count, because too many came at once.",
        |s| s.ceilings_left_out,
    ),
    each("kvlane_namespace_blocks", Gauge, "namespace, name", "Blocks of a namespace.", |s| {
        by_namespace(&s.spaces, |space| space.blocks)
    }),
    each("kvlane_namespace_bytes", Gauge, "namespace, name", "Bytes of a namespace.", |s| {
        by_namespace(&s.spaces, |space| space.bytes)
    }),
    total("kvlane_save_present_blocks_total", Counter, "Blocks not copied because the pool had them.", |s| {
        s.stats.counters.dedup_present
    }),
    each("kvlane_cluster_members", Gauge, "state", "Other daemons of the cluster.", |s| {
        of_reached(s, |cluster| &cluster.members)
    }),
    each("kvlane_cluster_replicas", Gauge, "state", "Replicas of the cluster's index.", |s| {
        of_reached(s, |cluster| &cluster.replicas)
    }),
    each("kvlane_cluster_announced_blocks", Gauge, "", "Blocks of this daemon that the index knows.", |s| {
        of_cluster(s, |cluster| cluster.announced_blocks)
    }),
    each(
        "kvlane_cluster_unresolved_names",
        Gauge,
        "",
        "Names of --peers or --index that lead nowhere.",
        |s| of_cluster(s, |cluster| cluster.unresolved.len() as u64),
    ),
    each("kvlane_cluster_fetched_blocks_total", Counter, "", "Blocks that other daemons brought.", |s| {
        of_cluster(s, |cluster| cluster.fetched_blocks)
    }),
    each("kvlane_cluster_fetched_bytes_total", Counter, "", "Bytes of those blocks.", |s| {
        of_cluster(s, |cluster| cluster.fetched_bytes)
    }),
    each(
        "kvlane_cluster_failed_blocks_total",
        Counter,
        "",
        "Blocks that other daemons did not bring: gone meanwhile, too slow, or the daemon was lost.",
        |s| of_cluster(s, |cluster| cluster.failed_blocks),
    ),
    each(
        "kvlane_cluster_damaged_blocks_total",
        Counter,
        "",
        "Blocks of other daemons discarded for wrong bytes.",
        |s| of_cluster(s, |cluster| cluster.damaged_blocks),
    ),
    each("kvlane_cluster_lent_blocks_total", Counter, "", "Blocks lent to other daemons.", |s| {
        of_cluster(s, |cluster| cluster.lent_blocks)
    }),
    each("kvlane_cluster_lent_bytes_total", Counter, "", "Bytes of those blocks.", |s| {
        of_cluster(s, |cluster| cluster.lent_bytes)
    }),
    each("kvlane_cluster_lent_bytes", Gauge, "", "Bytes that other daemons may read now.", |s| {
        of_cluster(s, |cluster| cluster.lent_bytes_now)
    }),
    each(
        "kvlane_cluster_copied_blocks",
        Gauge,
        "",
        "Blocks in the pool that are copies of other daemons'.",
        |s| of_cluster(s, |_| s.stats.copied_blocks),
    ),
    each("kvlane_cluster_copied_bytes", Gauge, "", "Bytes of those blocks.", |s| {
        of_cluster(s, |_| s.stats.copied_bytes)
    }),
    each("kvlane_cluster_evicted_copies_total", Counter, "", "Copies that made room for others.", |s| {
        of_cluster(s, |_| s.stats.counters.evicted_copies)
    }),
    each(
        "kvlane_cluster_adopted_copies_total",
        Counter,
        "",
        "Copies that became blocks like any other at their second hit.",
        |s| of_cluster(s, |_| s.stats.counters.adopted_copies),
    ),
    each(
        "kvlane_cluster_refused_loans_total",
        Counter,
        "",
        "Requests of other daemons that were refused whole: the blocks were gone, or too much is lent.",
        |s| of_cluster(s, |cluster| cluster.refused_loans),
    ),
    each(
        "kvlane_cluster_expired_loans_total",
        Counter,
        "",
        "Loans that another daemon did not return in time.",
        |s| of_cluster(s, |cluster| cluster.expired_loans),
    ),
    each(
        "kvlane_cluster_stranger_messages_total",
        Counter,
        "",
        "Messages of daemons that --peers does not name.",
        |s| of_cluster(s, |cluster| cluster.strangers),
    ),
    each("kvlane_ssd_blocks", Gauge, "", "Blocks that the SSD tier has.", |s| {
        of_ssd(s, |ssd| ssd.tier.blocks)
    }),
    each("kvlane_ssd_bytes", Gauge, "", "Bytes of the blocks that the SSD tier has.", |s| {
        of_ssd(s, |ssd| ssd.tier.block_bytes)
    }),
    each("kvlane_ssd_index_bytes", Gauge, "", "Memory that the index of the SSD tier takes, about.", |s| {
        of_ssd(s, |ssd| ssd.tier.index_bytes)
    }),
    each("kvlane_ssd_backlog_bytes", Gauge, "device", "Bytes on their way to an SSD.", |s| {
        by_label(s.ssd_devices().map(|device| (device.path.display(), device.backlog_bytes)))
    }),
    each("kvlane_ssd_staged", Gauge, "device", "1 if transfers of an SSD go through staging memory.", |s| {
        by_label(s.ssd_devices().map(|device| (device.path.display(), u64::from(device.path_taken.staged))))
    }),
    each("kvlane_ssd_staging_bytes", Gauge, "device", "Staging memory of an SSD.", |s| {
        by_label(s.ssd_devices().map(|device| (device.path.display(), device.path_taken.staging_bytes)))
    }),
    each(
        "kvlane_ssd_path_bytes_per_second",
        Gauge,
        "device, path",
        "Rate of an SSD's reads as measured at the start: direct, or staged. 0 if it was not.",
        Scrape::ssd_path_rates,
    ),
    each("kvlane_ssd_degraded", Gauge, "device", "1 while an SSD takes no writes after errors.", |s| {
        by_label(s.ssd_devices().map(|device| (device.path.display(), u64::from(device.degraded.is_some()))))
    }),
    each("kvlane_ssd_waiting_blocks", Gauge, "", "Blocks that wait for their turn to go to the SSD.", |s| {
        of_ssd(s, |_| s.stats.spill_queue)
    }),
    each("kvlane_ssd_written_blocks_total", Counter, "", "Blocks written to the SSD tier.", |s| {
        of_ssd(s, |ssd| ssd.tier.writes_stored)
    }),
    each("kvlane_ssd_written_bytes_total", Counter, "", "Bytes written to the SSD tier for blocks.", |s| {
        of_ssd(s, |ssd| ssd.tier.write_bytes)
    }),
    each(
        "kvlane_ssd_unwritten_blocks_total",
        Counter,
        "",
        "Blocks that the SSD tier did not get: evicted before their turn, too many, or refused by it.",
        |s| of_ssd(s, |_| s.stats.counters.unspilled_blocks),
    ),
    each("kvlane_ssd_fetched_blocks_total", Counter, "", "Blocks brought back from the SSD tier.", |s| {
        of_ssd(s, |_| s.stats.counters.fetched_blocks - s.stats.counters.fetched_copies)
    }),
    each("kvlane_ssd_fetched_bytes_total", Counter, "", "Bytes brought back from the SSD tier.", |s| {
        of_ssd(s, |_| s.stats.counters.fetched_bytes - s.stats.counters.fetched_copy_bytes)
    }),
    distributions(
        "kvlane_ssd_operation_seconds",
        "device, operation",
        "From the request to read or write a block to its end; those that succeeded.",
        Scrape::ssd_latencies,
    ),
    each(
        "kvlane_ssd_failed_fetches_total",
        Counter,
        "",
        "Blocks that could not be brought back: gone meanwhile, damaged, or too slow.",
        |s| of_ssd(s, |_| s.stats.counters.failed_fetches - s.stats.counters.failed_copies),
    ),
    each(
        "kvlane_ssd_damaged_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier dropped for wrong bytes.",
        |s| of_ssd(s, |ssd| ssd.tier.reads_damaged),
    ),
    each(
        "kvlane_ssd_dropped_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier that made room for others.",
        |s| of_ssd(s, |ssd| ssd.tier.blocks_dropped),
    ),
    each(
        "kvlane_ssd_kept_blocks_total",
        Counter,
        "",
        "Blocks of the SSD tier written again when their space was needed: those read since they were written, or those of which --policy learned expects the most hits.",
        |s| of_ssd(s, |ssd| ssd.tier.blocks_kept),
    ),
    total(
        "kvlane_save_in_flight_blocks_total",
        Counter,
        "Blocks not copied because another engine was saving them.",
        |s| s.stats.counters.dedup_in_flight,
    ),
    total(
        "kvlane_save_no_room_blocks_total",
        Counter,
        "Blocks not saved because everything was leased or in flight.",
        |s| s.stats.counters.no_room,
    ),
    total(
        "kvlane_save_not_admitted_blocks_total",
        Counter,
        "Blocks not saved because the policy found them not worth what they would displace.",
        |s| s.stats.counters.not_admitted,
    ),
    total(
        "kvlane_stale_commits_total",
        Counter,
        "Commits that came after their claim had died; discarded.",
        |s| s.stats.counters.stale_commits,
    ),
    total(
        "kvlane_lease_expired_total",
        Counter,
        "Leases freed because their living owner no longer named them.",
        |s| s.stats.counters.expired_leases,
    ),
    total(
        "kvlane_loaded_over_rails_bytes_total",
        Counter,
        "Bytes that loads for one GPU moved over the links of others.",
        |s| s.gpus.relayed_bytes,
    ),
    total(
        "kvlane_loaded_staged_bytes_total",
        Counter,
        "Bytes of short pieces that loads brought in long runs to the staging ring of their GPU, and scattered there.",
        |s| s.gpus.staged_bytes,
    ),
    total(
        "kvlane_loads_unstaged_total",
        Counter,
        "Loads of short pieces that came piece by piece, because the staging ring was in use or had failed.",
        |s| s.gpus.unstaged_loads,
    ),
    each(
        "kvlane_gpu_engine_bytes",
        Gauge,
        "direction",
        "Runs from this length on are left to copy engines while a GPU is idle; measured at start.",
        |s| by_label(s.gpus.engine_bytes.iter().copied()),
    ),
    each(
        "kvlane_loaded_by_link_bytes_total",
        Counter,
        "gpu",
        "Bytes that loads brought from the host over the link of each GPU, by its ordinal in the daemon.",
        |s| by_label(s.gpus.bytes_by_link.iter().map(|(gpu, bytes)| (gpu, *bytes))),
    ),
    total("kvlane_scrub_blocks_total", Counter, "Blocks whose checksum was verified again.", |s| {
        s.stats.counters.scrub_checked
    }),
    total("kvlane_scrub_bad_blocks_total", Counter, "Blocks dropped because their bytes had changed.", |s| {
        s.stats.counters.scrub_bad
    }),
    total(
        "kvlane_journal_entries_total",
        Counter,
        "Blocks that became visible or died, since an engine first read the journal.",
        |s| s.stats.counters.journal_entries,
    ),
    total(
        "kvlane_journal_restarts_total",
        Counter,
        "Times that an engine read the journal too late to get all changes, and took back all blocks that it had reported.",
        |s| s.stats.counters.journal_restarts,
    ),
    each(
        "kvlane_workers_registered_total",
        Counter,
        "method",
        "Worker registrations by how their saves travel.",
        |s| s.events.registered(),
    ),
    total(
        "kvlane_bad_frames_total",
        Counter,
        "Connections closed because they did not speak the protocol.",
        |s| s.events.bad_frames(),
    ),
    each("kvlane_requests_refused_total", Counter, "call", "Requests that were refused.", |s| {
        s.events.refused()
    }),
    total("kvlane_hand_offs_waiting", Gauge, "Lookups that await another engine's saves.", |s| {
        s.waiting_lookups as u64
    }),
    total(
        "kvlane_hand_off_blocks",
        Gauge,
        "Blocks that these lookups await. A block that two lookups await counts twice.",
        |s| s.watched_blocks as u64,
    ),
    each(
        "kvlane_hand_offs_total",
        Counter,
        "outcome",
        "Lookups of prompts that another engine was to save, by the outcome of their wait.",
        |s| s.events.awaited_saves(),
    ),
    distributions(
        "kvlane_hand_off_wait_seconds",
        "outcome",
        "How long lookups waited for another engine's saves.",
        |s| s.events.save_waits(),
    ),
    distributions("kvlane_request_duration_seconds", "call", "From reading a request to its answer.", |s| {
        s.events.durations()
    }),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_prometheus_and_are_unique() {
        let mut names: Vec<_> = METRICS.iter().map(|row| row.metric.name).collect();
        assert!(METRICS.iter().map(|row| row.metric).all(|metric| {
            (metric.kind == Counter) == metric.name.ends_with("_total") && metric.help.ends_with('.')
        }));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }
}
