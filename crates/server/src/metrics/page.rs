//! The page that Prometheus reads.

use std::collections::BTreeMap;

use kvlane_block::Namespace;
use kvlane_door::{escape_label, write_metric};
use kvlane_engine_memory::Gpus;
use kvlane_store::SpaceStats;

use super::{
    scrape::{GpuScrape, Scrape, SsdScrape},
    table::{METRICS, Source},
};
use crate::{
    ceilings::Reading,
    sessions::{Info, role_name},
    shared::Shared,
    ssd::Ssd,
};

/// Asks everything once, and writes it down.
pub(crate) fn page(shared: &Shared) -> String {
    let scrape = scrape(shared);
    shared.metrics.keep(&scrape);
    let mut page = shared.metrics.render();
    of_namespaces(&scrape.spaces, &scrape.ceilings, &mut page);
    page
}

fn scrape(shared: &Shared) -> Scrape {
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
        sessions: shared.sessions.list().into_iter().map(session).collect(),
        turned_away: [("tcp", shared.tcp_slots.turned_away()), ("http", shared.http_slots.turned_away())],
        hand_offs: shared.hand_offs.len(),
        watched_blocks: shared.store.watched_blocks(),
        ceilings: shared.ceilings.read(),
        ceilings_left_out: shared.ceilings.left_out(),
        gpus: shared.gpus.as_ref().map_or_else(GpuScrape::default, of_gpus),
        ssd: shared.ssd.as_ref().map(of_ssd),
    }
}

/// What is told of each namespace that the daemon knows now. A recorder would keep the labels of each that there ever was.
fn of_namespaces(spaces: &[SpaceStats], ceilings: &[Reading], page: &mut String) {
    // A namespace has a space for each cut; its metrics are their sum.
    let mut namespaces: BTreeMap<(Namespace, &str), Vec<&SpaceStats>> = BTreeMap::new();
    for space in spaces {
        namespaces.entry((space.namespace, &space.name)).or_default().push(space);
    }
    let names: BTreeMap<Namespace, &str> = namespaces.keys().copied().collect();
    for metric in METRICS {
        match metric.source {
            Source::OfNamespace(value) => {
                let sum =
                    |spaces: &[&SpaceStats]| spaces.iter().map(|space| value(space)).sum::<u64>() as f64;
                let values = namespaces
                    .iter()
                    .map(|((namespace, name), spaces)| (label(*namespace, name), sum(spaces)));
                write_metric(page, metric.name, metric.kind, metric.help, values);
            }
            Source::NamespaceCeilings => {
                let values = ceilings.iter().filter_map(|reading| {
                    let namespace = reading.namespace?;
                    let labels = label(namespace, names.get(&namespace).copied().unwrap_or_default());
                    Some((format!("{labels},window=\"{}\"", reading.window), reading.ratio))
                });
                write_metric(page, metric.name, metric.kind, metric.help, values);
            }
            Source::Counted(_) | Source::Read(_) => {}
        }
    }
}

fn label(namespace: Namespace, name: &str) -> String {
    format!("namespace=\"{namespace}\",name=\"{}\"", escape_label(name))
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
}
