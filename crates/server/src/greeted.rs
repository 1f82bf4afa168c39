//! The state of a session that has said Hello.

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

/// Made by the Hello, dropped by the Bye or the end of the connection.
pub(crate) struct Greeted {
    pub(crate) id: SessionId,
    pub(crate) info: Info,
    /// Drawn by the process; the same over all its connections.
    pub(crate) nonce: [u8; 16],
    /// See [`Sessions::now_ms`](crate::sessions::Sessions::now_ms).
    pub(crate) last_heard_ms: Arc<AtomicU64>,
    pub(crate) said_bye: bool,
    /// The negotiated version of the wire.
    pub(crate) wire: u32,
    /// The engine that a scheduler has opened.
    pub(crate) opened: Option<OwnerId>,
    /// The thread of a scheduler's late lookups. It starts with the first one.
    pub(crate) late: Option<LateLookups>,
    /// GPU memory that a worker has shared and not yet registered.
    pub(crate) chunks: SharedChunks,
    /// Set while a worker is registered.
    pub(crate) worker: Option<WorkerState>,
}

pub(crate) struct WorkerState {
    pub(crate) registered: Arc<Registered>,
    /// Carries out the saves of a worker on a GPU. None for others.
    pub(crate) saves: Option<SaveThread>,
    /// Claims that a mapped worker has not committed yet, by claim number.
    pub(crate) granted: HashMap<u64, Granted>,
    pub(crate) next_claim: u64,
}

/// The memory that a worker registered.
pub(crate) struct Registered {
    pub(crate) owner: OwnerId,
    pub(crate) rank: Rank,
    /// The regions of its shard, group by group.
    pub(crate) regions: Vec<Vec<Region>>,
    /// The regions of each slice that a load brings, group by group. One slice, the shard, if no other rank holds the block.
    pub(crate) slices: Vec<Vec<Vec<Region>>>,
    /// None if the worker copies by itself.
    pub(crate) memory: Option<PeerBlocks>,
}
