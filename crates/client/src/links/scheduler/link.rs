//! What a scheduler's link knows.

use std::time::Instant;

use super::{
    cancelling::Cancelling, former::FormerRuns, journal::Following, leases::Leases, lookups::Lookups,
    messages::SchedulerLinkOptions, stats::SchedulerStats, up::Up,
};
use crate::links::{backoff::Backoff, connection::Connection, standing::Standing};

/// The scheduler's side of one engine. Whoever drives it carries its actions out and tells it what happens.
#[derive(Debug)]
pub struct SchedulerLink {
    pub(super) options: SchedulerLinkOptions,
    pub(super) backoff: Backoff,
    pub(super) connection: Connection<Up>,
    pub(super) last_connection: u64,
    /// Ids count over all connections, so that an answer of a former one fits nothing.
    pub(super) last_request: u64,
    pub(super) lookups: Lookups,
    pub(super) leases: Leases,
    pub(super) former: FormerRuns,
    /// Saves below it are cancelled; said again whenever the engine is opened.
    pub(super) cancelled_below: u64,
    pub(super) cancelling: Option<Cancelling>,
    pub(super) journal: Following,
    pub(super) standing: Standing,
    /// Sentence of the last refusal, until the engine is open.
    pub(super) refusal: Option<String>,
    pub(super) stats: SchedulerStats,
    pub(super) is_closed: bool,
}

impl SchedulerLink {
    /// Nothing was tried yet; the first `Tick` connects.
    pub fn new(options: SchedulerLinkOptions, now: Instant) -> Self {
        let standing = Standing::new("the scheduler".into(), options.address.clone(), now);
        let journal = Following::new(options.follows_journal, now);
        Self {
            options,
            backoff: Backoff::new(now),
            connection: Connection::Down,
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
