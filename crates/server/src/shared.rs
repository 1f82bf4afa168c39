//! What all sessions share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use kvlane_door::Slots;
use kvlane_engine_memory::{Gpus, Meetings};
use kvlane_memory::Arena;
use kvlane_store::Store;

use crate::{
    ceilings::HitCeilings, engines::Engines, hand_offs::HandOffs, metrics::events::Events,
    refusal_log::Refusals, sessions::Sessions, ssd::Ssd, unreachable::Unreachable,
};

/// What all sessions share.
pub(crate) struct Shared {
    pub(crate) boot: [u8; 16],
    pub(crate) started: Instant,
    pub(crate) arena: Arc<Arena>,
    pub(crate) store: Arc<Store>,
    pub(crate) engines: Engines,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) refusals: Arc<Refusals>,
    /// Lookups that wait for what other engines save.
    pub(crate) hand_offs: Arc<HandOffs>,
    pub(crate) metrics: Arc<Events>,
    pub(crate) ceilings: HitCeilings,
    /// None without a GPU.
    pub(crate) gpus: Option<Gpus>,
    /// Loads into GPUs of ranks that hold the same blocks.
    pub(crate) meetings: Meetings,
    /// None without an SSD.
    pub(crate) ssd: Option<Ssd>,
    /// Of a GPU's link, what a save takes while no other save is queued behind it and no other engine waits for it; 1
    /// for all.
    pub(crate) save_link_share: f64,
    pub(crate) unreachable: Unreachable,
    /// Connections over TCP.
    pub(crate) tcp_slots: Arc<Slots>,
    /// Connections over HTTP.
    pub(crate) http_slots: Arc<Slots>,
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
