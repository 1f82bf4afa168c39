//! The status of the daemon, for people and tools: pool, sessions, namespaces, SSD and policy.

use std::collections::BTreeMap;

use bytes::Bytes;
use kvlane_cluster::{ClusterStatus, MemberStatus};
use kvlane_policy::{LearntClass, PolicyKind};
use kvlane_proto::v1;
use kvlane_store::SpaceStats;

use crate::{sessions::role_name, shared::Shared, ssd::Ssd};

/// Everything, for peers of the Unix socket.
pub(crate) fn collect(shared: &Shared) -> v1::Status {
    let stats = shared.store.stats();
    let policy = shared.store.policy();
    let sessions = shared
        .sessions
        .list()
        .into_iter()
        .map(|(session_id, info, silent_ms, limbo)| v1::SessionStatus {
            session_id,
            engine_id: info.engine_id,
            role: if limbo {
                format!("{} (lost)", role_name(info.role))
            } else {
                role_name(info.role).into()
            },
            pid: info.pid,
            client: info.client,
            silent_ms,
            method: info.method,
            reason: info.reason,
        })
        .collect();
    v1::Status {
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_ms: shared.started.elapsed().as_millis() as u64,
        pool_bytes: stats.pool_bytes,
        used_bytes: stats.used_bytes,
        blocks: stats.blocks,
        leased_blocks: stats.leased_blocks,
        claimed_blocks: stats.claimed_blocks,
        page_size: shared.arena.page_size().into(),
        sessions,
        ssds: shared.ssd.iter().flat_map(Ssd::status).collect(),
        ssd_blocks: shared.ssd.as_ref().map_or(0, |ssd| ssd.tier.stats().blocks),
        policy: policy.choice.to_string(),
        active_policy: policy.active.to_string(),
        shadow_hit_ratios: policy.shadow_hit_rates.into_iter().map(shadow).collect(),
        namespaces: namespaces(shared),
        is_partial: false,
        not_admitted_blocks: stats.counters.not_admitted,
        learnt: learnt(policy.learnt),
        cluster: shared.cluster.as_ref().map(|cluster| of_cluster(cluster.status())),
    }
}

fn of_cluster(status: ClusterStatus) -> v1::ClusterStatus {
    let member = |member: MemberStatus| v1::MemberStatus {
        address: member.address.to_string(),
        name: member.name,
        software: member.software,
        is_reached: member.is_reached,
        round_trip_us: member.round_trip.as_micros() as u64,
        trouble: member.trouble.unwrap_or_default(),
    };
    v1::ClusterStatus {
        members: status.members.into_iter().map(member).collect(),
        replicas: status.replicas.into_iter().map(member).collect(),
        announced_blocks: status.announced_blocks,
        unresolved: status.unresolved.into_iter().map(|(name, why)| format!("{name}: {why}")).collect(),
        fetched_blocks: status.fetched_blocks,
        fetched_bytes: status.fetched_bytes,
        failed_blocks: status.failed_blocks,
        damaged_blocks: status.damaged_blocks,
        lent_blocks: status.lent_blocks,
        lent_bytes: status.lent_bytes,
        lent_bytes_now: status.lent_bytes_now,
        refused_loans: status.refused_loans,
        expired_loans: status.expired_loans,
        strangers: status.strangers,
    }
}

/// The part that a stranger may read: without sessions, namespaces, other daemons, and the classes learnt from blocks.
pub(crate) fn for_anybody(shared: &Shared) -> v1::Status {
    let all = collect(shared);
    v1::Status {
        sessions: Vec::new(),
        namespaces: Vec::new(),
        learnt: Vec::new(),
        cluster: None,
        is_partial: true,
        ..all
    }
}

/// The spaces of the pool, then those of which only the SSD has blocks.
fn namespaces(shared: &Shared) -> Vec<v1::NamespaceStatus> {
    let on_ssd = shared.ssd.iter().flat_map(|ssd| ssd.tier.spaces());
    let mut on_ssd: BTreeMap<_, _> =
        on_ssd.map(|found| ((found.space.namespace, found.space.cut), (found.blocks, found.bytes))).collect();
    let mut all: Vec<v1::NamespaceStatus> = Vec::new();
    for space in shared.store.spaces() {
        let (ssd_blocks, ssd_bytes) = on_ssd.remove(&(space.namespace, space.cut)).unwrap_or_default();
        let layout = shared.engines.layout_in_short(space.namespace, space.cut);
        all.push(v1::NamespaceStatus { ssd_blocks, ssd_bytes, layout, ..namespace(space) });
    }
    let only_there = on_ssd.into_iter().map(|((namespace, _), (ssd_blocks, ssd_bytes))| {
        let namespace = Bytes::copy_from_slice(&namespace.0);
        v1::NamespaceStatus { namespace, ssd_blocks, ssd_bytes, ..Default::default() }
    });
    all.extend(only_there);
    all
}

fn learnt(classes: Vec<LearntClass>) -> Vec<v1::LearntKind> {
    let kind = |LearntClass { blocks, seen, densities }: LearntClass| {
        let (ages, hit_densities) = densities.into_iter().unzip();
        v1::LearntKind { blocks, seen, ages, hit_densities }
    };
    classes.into_iter().map(kind).collect()
}

fn shadow((kind, hit_ratio): (PolicyKind, f64)) -> v1::ShadowHitRatio {
    v1::ShadowHitRatio { policy: kind.to_string(), hit_ratio }
}

fn namespace(space: SpaceStats) -> v1::NamespaceStatus {
    v1::NamespaceStatus {
        namespace: Bytes::copy_from_slice(&space.namespace.0),
        name: space.name,
        blocks: space.blocks,
        bytes: space.bytes,
        shards: space.shards,
        hit_blocks: space.hit_blocks,
        missed_blocks: space.missed_blocks,
        ..Default::default()
    }
}
