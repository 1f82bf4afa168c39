//! Events and actions of a worker's link.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kvlane_block::Rank;
use kvlane_proto::{Address, v1};

use super::super::{
    flags::{FlagTable, Flags},
    group::{BlockPages, GroupMemory},
    ids::{ConnectionId, CopyId, JobKey, Life, NotConnected, ProcessId},
    pace::ReleaseAhead,
    promises::Promises,
    standing::Notice,
};
use super::failures::{NotCopied, NotMapped};
use crate::{
    boot::BootId,
    jobs::{Copied, Finished, Job, LoadGroup, SaveMethod},
};

/// Arguments of [`WorkerLink::new`](super::WorkerLink::new).
#[derive(Debug, Clone)]
pub struct WorkerLinkOptions {
    /// The daemon's address, for log lines only.
    pub address: Address,
    /// Name of the engine instance; its scheduler uses the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// Random; identifies this process in the greeting and in the fence.
    pub nonce: [u8; 16],
    /// This worker's rank.
    pub rank: Rank,
    /// Number of the engine's workers.
    pub workers: u32,
    /// Groups in the scheduler's order.
    pub groups: Vec<GroupMemory>,
    /// The user's choice. For `Auto` the daemon probes at each registration.
    pub save_method: SaveMethod,
    /// A save without an answer for this long is given up.
    pub save_timeout: Duration,
    /// When loads beside other requests are released.
    pub release_ahead: ReleaseAhead,
    /// Address of the fence in host memory.
    pub fence_address: u64,
    /// The GPU that holds the blocks; None for host memory.
    pub card: Option<Card>,
}

/// The GPU that holds a worker's blocks.
#[derive(Debug, Clone)]
pub struct Card {
    /// As RegisterWorker describes it to the daemon.
    pub described: v1::WorkerGpu,
    /// Batches of chunks to share before registering.
    pub batches: usize,
    /// Assigns flags to loads.
    pub flags: FlagTable,
}

/// The process that listens, as the driver found when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Whether the end of the process will be reported.
    pub life: Life,
    /// Its process id; 0 if it is not visible here.
    pub pid: u32,
}

/// The engine's steps. The driver takes this together with the queue of jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepState {
    /// A step began and is not over.
    pub in_step: bool,
    /// The last step's promises, in the first turn after it began.
    pub promises: Option<Promises>,
    /// As [`StepClock::shortest`](super::super::pace::StepClock::shortest).
    pub shortest_step: Option<Duration>,
}

/// An event, or a call of the engine, that the driver feeds to the link.
#[derive(Debug)]
pub enum WorkerEvent {
    /// The engine requests a save or a load.
    Start(Job),
    /// An answer to [`WorkerAction::Connect`]: the connection is up.
    Connected {
        /// As the action named it.
        connection: ConnectionId,
        /// The process at the other end, as far as the kernel names it.
        peer: Peer,
    },
    /// The other answer to [`WorkerAction::Connect`].
    NotConnected {
        /// As the action named it.
        connection: ConnectionId,
        /// No daemon answers, or another user's process does.
        why: NotConnected,
    },
    /// The daemon answered a request.
    Reply {
        /// The connection that the reply came over. Replies over a former one are ignored.
        connection: ConnectionId,
        /// Carries the id of its request.
        reply: v1::Reply,
    },
    /// The connection ended, or could not take a request.
    Lost {
        /// The end of a former connection is ignored.
        connection: ConnectionId,
        /// The reason, for the log.
        why: String,
    },
    /// The answer to [`WorkerAction::ShareChunks`] if the chunks could not be exported.
    NotShared {
        /// As the action named it.
        connection: ConnectionId,
        /// The reason, for the log.
        why: String,
    },
    /// The answer to [`WorkerAction::MapPool`].
    Mapped {
        /// As the action named it. The connection may be over by now.
        connection: ConnectionId,
        /// The run of the daemon whose pool it is.
        boot: BootId,
        /// Ok if the pool is mapped.
        mapped: Result<(), NotMapped>,
    },
    /// The answer to [`WorkerAction::CopyIn`] and [`WorkerAction::CopyOut`].
    Copied {
        /// As the action named it. Each copy is answered once.
        copy: CopyId,
        /// Blocks and bytes copied, or why the copy failed.
        copied: Result<Copied, NotCopied>,
    },
    /// A daemon's process ended.
    ProcessEnded(ProcessId),
    /// The engine's steps, once a turn.
    Step(StepState),
    /// Time has passed. The driver ends every turn with it.
    Tick,
    /// The engine closes the worker.
    Close,
}

/// An action for the driver. The driver carries actions out in their order.
#[derive(Debug, Clone, PartialEq)]
pub enum WorkerAction {
    /// Answered by `Connected` or `NotConnected`.
    Connect(ConnectionId),
    /// Hand a request to the connection. A failure is reported as `Lost`.
    Send {
        /// The link's present connection.
        connection: ConnectionId,
        /// The request; its reply has the same id.
        request: v1::Request,
    },
    /// Export a batch of chunks and send it with its descriptors. If the chunks cannot be exported, `NotShared` follows.
    ShareChunks {
        /// The link's present connection.
        connection: ConnectionId,
        /// Id of the request and of its reply.
        id: u64,
        /// Index of the batch.
        batch: usize,
    },
    /// Let the daemon's process read this one's memory, if the kernel (Yama) wants that declared. Comes before
    /// `RegisterWorker`.
    AllowReads {
        /// Process id of the daemon, as the kernel names the peer.
        pid: u32,
    },
    /// Map the pool whose descriptor came last, in place of a former mapping of the same boot. Answered by `Mapped`.
    MapPool {
        /// The connection that the descriptor came over.
        connection: ConnectionId,
        /// The run of the daemon whose pool it is.
        boot: BootId,
        /// Size of the pool, as the daemon names it.
        bytes: u64,
        /// Whether this process writes saves into the pool.
        writable: bool,
    },
    /// Unmap a pool. Copies in flight keep their view of it.
    Unmap(BootId),
    /// Raise the fence: from here on, no copy that was requested under a former epoch can be committed. The fence in GPU memory
    /// is written before this returns, too.
    RaiseFence {
        /// Higher than all epochs before; later requests name it.
        epoch: u64,
    },
    /// Copy from the mapped pool of that boot into the engine. Answered by `Copied`, once every byte has arrived.
    CopyIn {
        /// Names the copy in its answer.
        copy: CopyId,
        /// The run of the daemon whose pool holds the blocks.
        boot: BootId,
        /// The blocks to copy, and their pages in the pool.
        groups: Arc<[LoadGroup]>,
        /// On a GPU: the event after which the copy begins.
        event: Option<u32>,
    },
    /// Copy from the engine into the present pool. Answered by `Copied`.
    CopyOut {
        /// Names the copy in its answer.
        copy: CopyId,
        /// Blocks and their pages, by index of the group.
        places: Vec<(u32, BlockPages)>,
    },
    /// Write all flags of a load, so that no stream waits for them.
    WriteFlags(Flags),
    /// Release a load: its request may compute. With flags, the engine's streams wait for them.
    Release {
        /// The load. `End` follows later.
        key: JobKey,
        /// Reported to the engine.
        finished: Finished,
        /// The flags that the engine's streams wait for.
        flags: Option<Flags>,
    },
    /// End a job, exactly once. The driver forgets its flags and takes its event back.
    End {
        /// No other job of this process gets this key.
        key: JobKey,
        /// Reported to the engine.
        finished: Finished,
    },
    /// The worker is registered, and the daemon serves it.
    Registered {
        /// How saves travel until the connection ends; never `Auto`.
        method: SaveMethod,
        /// Why the daemon chose this method, in its words.
        reason: String,
    },
    /// The connection has ended.
    Unregistered {
        /// The worker was registered, so this counts as a loss.
        was_open: bool,
    },
    /// Why the daemon cannot be used, or refuses: for callers that wait for the registration.
    Refused(String),
    /// This many saves were given up because the daemon was silent.
    CountTimeouts(u64),
    /// Close the connection; no event of it follows.
    Close(ConnectionId),
    /// Write a line to the log.
    Log(Notice),
}

/// Actions in the order in which the driver carries them out.
pub type Actions = VecDeque<WorkerAction>;
