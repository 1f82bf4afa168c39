//! The state of a scheduler's link.

use std::time::Instant;

use super::{
    cancelling::Cancelling, former::FormerRuns, journal::JournalReader, leases::Leases, lookups::Lookups,
    messages::SchedulerLinkOptions, stats::SchedulerStats, up::SchedulerUp,
};
use crate::links::{backoff::Backoff, connection::ConnectionState, standing::Standing};

/// The scheduler's link. [`links`](crate::links) has the rules between it and its driver.
#[derive(Debug)]
pub struct SchedulerLink {
    pub(super) options: SchedulerLinkOptions,
    pub(super) backoff: Backoff,
    pub(super) connection: ConnectionState<SchedulerUp>,
    pub(super) last_connection: u64,
    /// Ids count over all connections, so that an answer over a former one fits no request.
    pub(super) last_request: u64,
    pub(super) lookups: Lookups,
    pub(super) leases: Leases,
    pub(super) former: FormerRuns,
    /// Saves below this job are cancelled. OpenEngine repeats it on each connection.
    pub(super) cancelled_below: u64,
    pub(super) cancelling: Option<Cancelling>,
    pub(super) journal: JournalReader,
    pub(super) standing: Standing,
    /// Sentence of the last refusal; None again once the engine is open.
    pub(super) refusal: Option<String>,
    pub(super) stats: SchedulerStats,
    pub(super) is_closed: bool,
}

impl SchedulerLink {
    /// Unconnected; the first `Tick` connects.
    pub fn new(options: SchedulerLinkOptions, now: Instant) -> Self {
        let standing = Standing::new("the scheduler".into(), options.address.clone(), now);
        let journal = JournalReader::new(options.follows_journal, now);
        Self {
            options,
            backoff: Backoff::new(now),
            connection: ConnectionState::Down,
            last_connection: 0,
            last_request: 0,
            lookups: Lookups::default(),
            leases: Leases::default(),
            former: FormerRuns::default(),
            cancelled_below: 0,
            cancelling: None,
            journal,
            standing,
            refusal: None,
            stats: SchedulerStats::default(),
            is_closed: false,
        }
    }
}
