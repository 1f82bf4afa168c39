//! What a worker's link is told, and what it wants done.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kvlane_block::Rank;
use kvlane_proto::{Address, v1};

use super::super::{
    flags::{FlagTable, Flags},
    group::{BlockPages, GroupMemory},
    ids::{ConnectionId, CopyId, JobKey, Life, NotConnected, ProcessId},
    promises::Promises,
    standing::Notice,
};
use super::failures::{NotCopied, NotMapped};
use crate::{
    boot::BootId,
    jobs::{Copied, Finished, Job, LoadGroup, SaveMethod},
};

/// What a link has to know of its worker.
#[derive(Debug, Clone)]
pub struct WorkerLinkOptions {
    /// Where the daemon is looked for; for sentences only.
    pub address: Address,
    /// Name of the engine instance.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// Names this process, in the greeting and in the fence.
    pub nonce: [u8; 16],
    /// Which of the engine's workers this is.
    pub rank: Rank,
    /// Number of the engine's workers.
    pub workers: u32,
    /// Groups in the scheduler's order.
    pub groups: Vec<GroupMemory>,
    /// As the user wants it: probed at each registration where that is `Auto`.
    pub save_method: SaveMethod,
    /// A save without an answer for so long is given up.
    pub save_timeout: Duration,
    /// Of the fence in host memory.
    pub fence_address: u64,
    /// The GPU that the blocks lie on; None for host memory.
    pub card: Option<Card>,
}

/// What a link has to know of the worker's GPU.
#[derive(Debug, Clone)]
pub struct Card {
    /// What the daemon is told of it.
    pub described: v1::WorkerGpu,
    /// Batches of chunks that are shared before registering.
    pub batches: usize,
    /// Where the flags of loads lie.
    pub flags: FlagTable,
}

/// Who listens, as the driver found when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Whether the end of its process will be told.
    pub life: Life,
    /// Its process; 0 where it is not visible.
    pub pid: u32,
}

/// What the engine has told of its steps. The driver takes it together with the queue of jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// A step began and is not over.
    pub in_step: bool,
    /// Of the last step, until they were seen once.
    pub promises: Option<Promises>,
    /// None as long as no two steps that compute followed each other.
    pub shortest_step: Option<Duration>,
}

/// What has happened.
#[derive(Debug)]
pub enum WorkerEvent {
    /// The engine asks for a save or a load.
    Start(Job),
    /// The answer to [`WorkerAction::Connect`].
    Connected {
        /// The number that the action named.
        connection: ConnectionId,
        /// The process at the other end, as far as the kernel names it.
        peer: Peer,
    },
    /// The other answer to [`WorkerAction::Connect`].
    NotConnected {
        /// The number that the action named.
        connection: ConnectionId,
        /// Whether nobody answers, or somebody else than the daemon that is wanted.
        why: NotConnected,
    },
    /// The daemon has answered.
    Reply {
        /// The one that the reply came over: one of a former connection is left alone.
        connection: ConnectionId,
        /// Its id says which question it is the answer to.
        reply: v1::Reply,
    },
    /// The connection has ended, or could not take a request.
    Lost {
        /// The one that ended: that of a former one changes nothing.
        connection: ConnectionId,
        /// The reason, for people.
        why: String,
    },
    /// The answer to [`WorkerAction::ShareChunks`] where the chunks could not be exported.
    NotShared {
        /// Over which connection they were to go.
        connection: ConnectionId,
        /// The reason, for people.
        why: String,
    },
    /// The answer to [`WorkerAction::MapPool`].
    Mapped {
        /// The number that the action named.
        connection: ConnectionId,
        /// Whose pool it is. The connection may be over by now.
        boot: BootId,
        /// It is, or why it is not.
        mapped: Result<(), NotMapped>,
    },
    /// The answer to [`WorkerAction::CopyIn`] and [`WorkerAction::CopyOut`].
    Copied {
        /// As the action named it. Each is answered once.
        copy: CopyId,
        /// What it brought, or why it did not.
        copied: Result<Copied, NotCopied>,
    },
    /// A daemon's process has ended.
    ProcessEnded(ProcessId),
    /// What the engine has told since the last turn.
    Step(Seen),
    /// Time has passed. Also the end of every turn.
    Tick,
    /// The engine wants nothing any more.
    Close,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum WorkerAction {
    /// Answered by `Connected` or `NotConnected`.
    Connect(ConnectionId),
    /// A failure is told by `Lost`.
    Send {
        /// The link's present one.
        connection: ConnectionId,
        /// With the id by which its reply is known.
        request: v1::Request,
    },
    /// Exports a batch of chunks and sends it under this number, with its descriptors. Where they cannot be exported,
    /// `NotShared` tells so.
    ShareChunks {
        /// The link's present one, whose descriptors these become.
        connection: ConnectionId,
        /// The number that the request gets, and its reply has.
        id: u64,
        /// Index of the batch.
        batch: usize,
    },
    /// Lets the daemon's process read this one, where the kernel wants that to be said. Before `RegisterWorker`.
    AllowReads {
        /// Process id of the daemon, as the kernel names the peer.
        pid: u32,
    },
    /// Maps the pool whose descriptor came last, in place of a former mapping of the same boot. Answered by `Mapped`.
    MapPool {
        /// Over which connection it came.
        connection: ConnectionId,
        /// Whose pool it is.
        boot: BootId,
        /// As many bytes as the daemon says that the pool has.
        bytes: u64,
        /// Whether this process writes saves into it.
        writable: bool,
    },
    /// Lets a mapped pool go. Copies under way keep their view.
    Unmap(BootId),
    /// From here on no copy that was asked for under a former epoch can be committed. Over when it returns, in the GPU's memory
    /// too.
    RaiseFence {
        /// Above all that were raised before, and named in later requests.
        epoch: u64,
    },
    /// Copies from the mapped pool of that boot into the engine. Answered by `Copied`, once every byte has arrived.
    CopyIn {
        /// Names the copy in the answer.
        copy: CopyId,
        /// The run of the daemon in whose pool the blocks lie.
        boot: BootId,
        /// What, and where to.
        groups: Arc<[LoadGroup]>,
        /// On a GPU: the copy begins after it.
        event: Option<u32>,
    },
    /// Copies from the engine into the present pool. Answered by `Copied`.
    CopyOut {
        /// Names the copy in the answer.
        copy: CopyId,
        /// By index of the group.
        places: Vec<(u32, BlockPages)>,
    },
    /// Writes all flags of a load, so that no stream waits for them.
    WriteFlags(Flags),
    /// The request of a load may compute. With flags, streams are to wait for them.
    Release {
        /// The load that is released; its end is told later.
        key: JobKey,
        /// What the engine hears.
        told: Finished,
        /// What its streams wait for.
        flags: Option<Flags>,
    },
    /// A job is over; exactly once for each. Its flags are forgotten and its event is given back.
    End {
        /// Not used again by another job of this process.
        key: JobKey,
        /// What the engine hears.
        told: Finished,
    },
    /// The worker is registered, and the daemon serves it.
    Registered {
        /// By which of the two ways saves travel until the connection ends; never `Auto`.
        method: SaveMethod,
        /// The daemon's sentence where it could not take the other way; else empty.
        reason: String,
    },
    /// There is no connection any more.
    Unregistered {
        /// The worker was registered, so this is a loss.
        was_open: bool,
    },
    /// Why the daemon cannot be used, or refused. Whoever waits for the registration hears it.
    Refused(String),
    /// So many saves were given up because the daemon was silent.
    CountTimeouts(u64),
    /// Hangs up.
    Close(ConnectionId),
    /// A sentence for the log.
    Log(Notice),
}

/// What is to be done, in that order.
pub type Actions = VecDeque<WorkerAction>;
