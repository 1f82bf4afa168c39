//! The document that the page shows, from the same snapshot that `/metrics` is written from.

use std::collections::{BTreeMap, HashMap};

use kvlane_block::Namespace;
use kvlane_door::Problems;
use serde_json::{Value, json};

use crate::{
    health::{hex, state},
    metrics::scrape::{ROLES, Scrape},
    observer::Reading,
    shared::Shared,
};

pub(super) fn document(shared: &Shared, scrape: &Scrape, problems: Problems, history: Value) -> Value {
    let stats = &scrape.stats;
    let (_, state) = state(shared);
    json!({
        "run": hex(&shared.boot),
        "version": concat!("kvlane ", env!("CARGO_PKG_VERSION")),
        "state": state,
        "uptime_seconds": shared.started.elapsed().as_secs_f64(),
        "problems": problems.into_json(),
        "pool": {
            "bytes": stats.pool_bytes,
            "used_bytes": stats.used_bytes,
            "unused_bytes": stats.unused_bytes,
            "blocks": stats.blocks,
            "leased_blocks": stats.leased_blocks,
            "claimed_blocks": stats.claimed_blocks,
            "seal_queue_blocks": stats.seal_queue,
            "evicted_blocks": stats.counters.evicted_blocks,
            "saved_bytes": stats.counters.sealed_bytes,
            "policy": scrape.policy.active.name(),
        },
        "windows": scrape.ceilings.iter().filter(|reading| reading.namespace.is_none()).map(window).collect::<Vec<_>>(),
        "hit_bytes": scrape.events.hit_bytes().into_iter().map(|(tier, bytes)| (tier.concat(), bytes.into()))
            .collect::<serde_json::Map<_, _>>(),
        "models": models(scrape),
        "sessions": ROLES.map(|role| (role.to_owned(), scrape.connected(role).into())).into_iter()
            .chain([("lost".to_owned(), scrape.lost_sessions().into())]).collect::<serde_json::Map<_, _>>(),
        "ssd": scrape.ssd.as_ref().map(|ssd| json!({
            "blocks": ssd.tier.blocks,
            "bytes": ssd.tier.block_bytes,
            "capacity_bytes": ssd.devices.iter().map(|device| device.capacity).sum::<u64>(),
            "backlog_bytes": ssd.devices.iter().map(|device| device.backlog_bytes).sum::<u64>(),
            "waiting_blocks": stats.spill_queue,
            "unwritten_blocks": stats.counters.unspilled_blocks,
        })),
        "cluster": scrape.cluster.as_ref().map(|cluster| json!({
            "members": cluster.members.len(),
            "members_reached": cluster.members.iter().filter(|member| member.is_reached).count(),
            "replicas": cluster.replicas.len(),
            "replicas_reached": cluster.replicas.iter().filter(|member| member.is_reached).count(),
            "announced_blocks": cluster.announced_blocks,
            "lent_bytes_now": cluster.lent_bytes_now,
        })),
        "links": scrape.gpus.bytes_by_link.iter().map(|(gpu, bytes)| json!({ "gpu": gpu, "bytes": bytes }))
            .collect::<Vec<_>>(),
        "hand_offs": { "waiting": scrape.waiting_lookups, "blocks": scrape.watched_blocks },
        "history": history,
    })
}

fn window(reading: &Reading) -> Value {
    json!({
        "window": reading.window.to_string(),
        "hit_ratio": reading.hit_ratio,
        "ceiling": reading.ceiling,
        "blocks": reading.references,
    })
}

/// A row for each namespace: its name, its engines, its blocks and hits. The one with the most engines comes first, then the
/// one with the most bytes.
fn models(scrape: &Scrape) -> Vec<Value> {
    #[derive(Default)]
    struct Model<'a> {
        name: &'a str,
        blocks: u64,
        bytes: u64,
        hit_blocks: u64,
        missed_blocks: u64,
    }
    let engines: HashMap<Namespace, u64> =
        scrape.engines.iter().map(|(namespace, _, count)| (*namespace, *count)).collect();
    let mut models: BTreeMap<Namespace, Model<'_>> = BTreeMap::new();
    for (namespace, name, _) in &scrape.engines {
        models.entry(*namespace).or_default().name = name;
    }
    for space in &scrape.spaces {
        let model = models.entry(space.namespace).or_default();
        model.name = &space.name;
        model.blocks += space.blocks;
        model.bytes += space.bytes;
        model.hit_blocks += space.hit_blocks;
        model.missed_blocks += space.missed_blocks;
    }
    let mut rows: Vec<_> = models.into_iter().collect();
    let engines_of = |namespace: &Namespace| engines.get(namespace).copied().unwrap_or_default();
    rows.sort_by_key(|(namespace, model)| std::cmp::Reverse((engines_of(namespace), model.bytes)));
    let row = |(namespace, model): (Namespace, Model<'_>)| {
        json!({
            "name": model.name,
            "namespace": namespace.to_string(),
            "engines": engines_of(&namespace),
            "blocks": model.blocks,
            "bytes": model.bytes,
            "hit_blocks": model.hit_blocks,
            "missed_blocks": model.missed_blocks,
        })
    };
    rows.into_iter().map(row).collect()
}
