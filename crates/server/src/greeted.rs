//! What the daemon knows of a session that has said Hello.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU64},
};

use kvlane_block::{Rank, Region};
use kvlane_engine_memory::{PeerBlocks, SharedChunks};
use kvlane_store::OwnerId;

use crate::{
    calls::{late::LateLookups, save_thread::SaveThread, saver::Granted},
    engines::SessionId,
    sessions::Info,
};

/// What is known after the greeting.
pub(crate) struct Greeted {
    pub(crate) id: SessionId,
    pub(crate) info: Info,
    pub(crate) nonce: [u8; 16],
    pub(crate) heard: Arc<AtomicU64>,
    pub(crate) said_bye: bool,
    /// A scheduler that has opened its engine.
    pub(crate) opened: Option<OwnerId>,
    /// A scheduler some of whose lookups had to wait.
    pub(crate) late: Option<LateLookups>,
    /// Of a worker that is about to register.
    pub(crate) chunks: SharedChunks,
    /// A worker that has registered.
    pub(crate) worker: Option<WorkerState>,
}

pub(crate) struct WorkerState {
    pub(crate) registered: Arc<Registered>,
    /// For a worker on a GPU.
    pub(crate) saves: Option<SaveThread>,
    pub(crate) granted: HashMap<u64, Granted>,
    pub(crate) next_claim: u64,
}

/// What a worker registered.
pub(crate) struct Registered {
    pub(crate) owner: OwnerId,
    pub(crate) rank: Rank,
    /// Of its shards, group by group.
    pub(crate) regions: Vec<Vec<Region>>,
    /// What a load brings, group by group.
    pub(crate) slices: Vec<Vec<Vec<Region>>>,
    /// None where the worker copies by itself.
    pub(crate) memory: Option<PeerBlocks>,
}
