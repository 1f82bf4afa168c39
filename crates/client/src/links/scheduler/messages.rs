//! The requests by which a scheduler's link presents its engine to the daemon.

use std::time::Duration;

use bytes::Bytes;
use kvlane_proto::{Address, WIRE_MAX, WIRE_MIN, v1, v1::request::Body as Ask};

use crate::group_spec::GroupSpec;

/// Bytes of one block's hash.
const HASH_BYTES: usize = 16;

/// Arguments of [`SchedulerLink::new`](super::SchedulerLink::new).
#[derive(Debug, Clone)]
pub struct SchedulerLinkOptions {
    /// The daemon's address, for log lines only.
    pub address: Address,
    /// Name of the engine instance; its workers use the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// Random; identifies this process and role over all its connections.
    pub nonce: [u8; 16],
    /// The index of a group in this list is its number everywhere.
    pub groups: Vec<GroupSpec>,
    /// Number of the engine's workers.
    pub workers: u32,
    /// Timeout of probes. Each lookup brings its own.
    pub lookup_timeout: Duration,
    /// Whether to read the daemon's journal, for [`take_changes`](super::SchedulerLink::take_changes).
    pub follows_journal: bool,
}

impl SchedulerLinkOptions {
    /// `live_leases` are those of every run, because the run that answers is not known yet. It ignores those of other runs.
    pub(super) fn hello(&self, live_leases: Vec<u64>) -> Ask {
        Ask::Hello(v1::Hello {
            wire_min: WIRE_MIN,
            wire_max: WIRE_MAX,
            client: self.client.clone(),
            role: v1::hello::Role::Scheduler.into(),
            engine_id: self.engine_id.clone(),
            process_nonce: Bytes::copy_from_slice(&self.nonce),
            live_leases,
        })
    }

    pub(super) fn open_engine(&self, cancelled_below: u64) -> Ask {
        let groups = self.groups.iter().map(|group| v1::Group {
            namespace: Bytes::copy_from_slice(&group.namespace),
            name: group.name.clone(),
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            crosses_hosts: group.crosses_hosts,
        });
        Ask::OpenEngine(v1::OpenEngine { groups: groups.collect(), workers: self.workers, cancelled_below })
    }

    /// A lookup of nothing, whose answer says whether the workers are ready.
    pub(super) fn probe(&self) -> Ask {
        let nothing = |group| v1::LookupGroup { group, hashes: Bytes::new() };
        let groups = (0..self.groups.len() as u32).map(nothing).collect();
        Ask::Lookup(v1::Lookup { groups, ..Default::default() })
    }

    /// The most tokens that the answer to a lookup may have: its hashes and its own bound limit it.
    pub(super) fn most_tokens(&self, ask: &v1::Lookup) -> u64 {
        let blocks = ask.groups.iter().map(|group| group.hashes.len() / HASH_BYTES);
        let tokens = self.groups.iter().zip(blocks);
        let tokens =
            tokens.map(|(group, blocks)| (blocks as u64).saturating_mul(group.tokens_per_block.into()));
        tokens.min().unwrap_or(0).min(ask.max_tokens)
    }
}
