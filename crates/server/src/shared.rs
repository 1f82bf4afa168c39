//! [`Shared`]: the state of a running daemon, which all sessions and threads share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_cluster::Cluster;
use kvlane_door::Slots;
use kvlane_engine_memory::{Gpus, Meetings};
use kvlane_memory::Arena;
use kvlane_store::Store;

use crate::{
    awaited_saves::AwaitedSaves, engines::Engines, metrics::events::Events, observer::Observer,
    refusal_log::Refusals, sessions::Sessions, ssd::Ssd, traces::Traces, unreachable::Unreachable,
};

/// One for each run of the daemon.
pub(crate) struct Shared {
    /// The boot id of this run, drawn at random.
    pub(crate) boot: [u8; 16],
    pub(crate) started: Instant,
    pub(crate) arena: Arc<Arena>,
    pub(crate) store: Arc<Store>,
    pub(crate) engines: Engines,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) awaited_saves: Arc<AwaitedSaves>,
    pub(crate) metrics: Arc<Events>,
    pub(crate) observer: Observer,
    /// None without a GPU.
    pub(crate) gpus: Option<Gpus>,
    /// Joins the loads of ranks that hold the same blocks.
    pub(crate) meetings: Meetings,
    /// None without an SSD.
    pub(crate) ssd: Option<Ssd>,
    /// None without other daemons.
    pub(crate) cluster: Option<Arc<Cluster>>,
    /// None if spans and metrics are not exported.
    pub(crate) traces: Option<Traces>,
    /// How long a lookup may wait for blocks that only a source has.
    pub(crate) fetch_wait: Duration,
    /// See [`ServeOptions::save_link_share`](crate::ServeOptions::save_link_share).
    pub(crate) save_link_share: f64,
    pub(crate) unreachable: Unreachable,
    /// One slot a connection over TCP.
    pub(crate) tcp_slots: Arc<Slots>,
    /// One slot a connection over HTTP.
    pub(crate) http_slots: Arc<Slots>,
    /// Read it with [`phase`](Self::phase).
    pub(crate) stopping: AtomicBool,
}

/// Whether the daemon takes new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Serving,
    /// From the first moment of [`Daemon::stop`](crate::Daemon::stop) on.
    Stopping,
}

impl Shared {
    pub(crate) fn phase(&self) -> Phase {
        if self.stopping.load(Ordering::Acquire) { Phase::Stopping } else { Phase::Serving }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.phase() == Phase::Stopping
    }
}
