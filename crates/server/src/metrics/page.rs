//! The metrics page that Prometheus scrapes.

use std::sync::Arc;

use kvlane_door::{Metric, PROCESS_METRICS, Process, write_metrics};
use kvlane_engine_memory::Gpus;
use kvlane_otlp::{Metrics, OTLP_METRICS, metrics_of};

use super::{
    scrape::{GpuScrape, Scrape, SsdScrape},
    table::METRICS,
};
use crate::{
    observer::Reading,
    sessions::{Info, role_name},
    shared::Shared,
    ssd::Ssd,
};

/// All metrics of the daemon, those of its process last.
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    let own = METRICS.iter().map(|row| &row.metric);
    let exporter = OTLP_METRICS.iter().map(|row| &row.metric);
    own.chain(exporter).chain(PROCESS_METRICS.iter().map(|row| &row.metric))
}

/// Takes a snapshot, and writes the page from it.
pub(crate) fn page(shared: &Shared) -> String {
    let mut page = write(&scrape_with(shared, shared.observer.ceilings()));
    if let Some(traces) = &shared.traces {
        write_metrics(&mut page, OTLP_METRICS, traces.counters());
    }
    page
}

/// The same metrics for an OpenTelemetry collector.
pub(crate) fn otlp_metrics(shared: &Shared) -> Metrics {
    let mut metrics = metrics_of(METRICS, &scrape_with(shared, shared.observer.ceilings()));
    metrics.append(metrics_of(PROCESS_METRICS, &Process::read()));
    if let Some(traces) = &shared.traces {
        metrics.append(metrics_of(OTLP_METRICS, traces.counters()));
    }
    metrics
}

fn write(scrape: &Scrape) -> String {
    let mut page = String::new();
    write_metrics(&mut page, METRICS, scrape);
    write_metrics(&mut page, PROCESS_METRICS, &Process::read());
    page
}

/// Takes a snapshot, with these hits by window.
pub(crate) fn scrape_with(shared: &Shared, ceilings: Vec<Reading>) -> Scrape {
    let of_gpus = |gpus: &Gpus| GpuScrape {
        relayed_bytes: gpus.relayed_bytes(),
        staged_bytes: gpus.staged_bytes(),
        unstaged_loads: gpus.unstaged_loads(),
        bytes_by_link: gpus.bytes_by_link(),
        engine_bytes: gpus.engine_bytes().to_vec(),
    };
    let of_ssd = |ssd: &Ssd| SsdScrape { tier: ssd.tier.stats(), devices: ssd.tier.status() };
    let session = |(_, info, _, is_lost): (_, Info, _, bool)| (role_name(info.role), is_lost);
    Scrape {
        stats: shared.store.stats(),
        policy: shared.store.policy(),
        spaces: shared.store.spaces(),
        engines: shared.engines.ready_by_namespace(),
        sessions: shared.sessions.list().into_iter().map(session).collect(),
        turned_away: [("tcp", shared.tcp_slots.turned_away()), ("http", shared.http_slots.turned_away())],
        waiting_lookups: shared.awaited_saves.len(),
        watched_blocks: shared.store.watched_blocks(),
        ceilings,
        ceilings_left_out: shared.observer.left_out(),
        gpus: shared.gpus.as_ref().map_or_else(GpuScrape::default, of_gpus),
        ssd: shared.ssd.as_ref().map(of_ssd),
        cluster: shared.cluster.as_ref().map(|cluster| cluster.status()),
        events: Arc::clone(&shared.metrics),
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::{CutDigest, Namespace};
    use kvlane_policy::{Choice, PolicyKind};
    use kvlane_store::{PolicyReport, SpaceStats, StoreStats};

    use super::*;

    fn scrape(spaces: Vec<SpaceStats>, ceilings: Vec<Reading>) -> Scrape {
        let (choice, active) = (Choice::default(), PolicyKind::default());
        Scrape {
            stats: StoreStats::default(),
            policy: PolicyReport {
                choice,
                active,
                shadow_hit_rates: Vec::new(),
                learnt: Vec::new(),
                switches: 0,
                left_out: 0,
            },
            engines: spaces.iter().map(|space| (space.namespace, space.name.clone(), 3)).take(1).collect(),
            spaces,
            sessions: Vec::new(),
            turned_away: [("tcp", 0), ("http", 0)],
            waiting_lookups: 0,
            watched_blocks: 0,
            ceilings,
            ceilings_left_out: 0,
            gpus: GpuScrape::default(),
            ssd: None,
            cluster: None,
            events: Arc::default(),
        }
    }

    #[test]
    fn what_engines_call_themselves_stays_inside_its_label() {
        let space = |namespace: u8, name: &str| SpaceStats {
            namespace: Namespace([namespace; 16]),
            name: name.into(),
            cut: CutDigest([0; 16]),
            shards: 1,
            blocks: 2,
            bytes: 8192,
            hit_blocks: 7,
            missed_blocks: 1,
        };
        assert!(!write(&scrape(Vec::new(), Vec::new())).contains("namespace"));
        let [_, window, _] = kvlane_policy::Window::DEFAULT;
        let namespace = Some(Namespace([1; 16]));
        let reading = Reading { namespace, window, references: 8, hit_ratio: 0.25, ceiling: 0.5 };
        let spaces = vec![space(1, "a\"b\\c\nd"), space(2, "m"), space(2, "m")];
        let page = write(&scrape(spaces, vec![reading]));
        let labels = format!("namespace=\"{}\",name=\"a\\\"b\\\\c\\nd\"", "01".repeat(16));
        for line in [
            "# TYPE kvlane_hit_blocks_total counter".to_owned(),
            format!("kvlane_namespace_bytes{{{labels}}} 8192"),
            format!("kvlane_engines{{{labels}}} 3"),
            format!("kvlane_hit_blocks_total{{namespace=\"{}\",name=\"m\"}} 14", "02".repeat(16)),
            format!("kvlane_namespace_hit_ratio{{{labels},window=\"1h\"}} 0.25"),
            format!("kvlane_namespace_hit_ceiling_ratio{{{labels},window=\"1h\"}} 0.5"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
    }
}
