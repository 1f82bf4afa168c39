//! The table of calls, with one row each: which sessions may use it, over which transports, and whether a daemon that is
//! stopping still serves it. Read by `admit`, by the metrics, and by the test that walks all calls (session_table.rs).

use kvlane_proto::v1::request::Body as Ask;

/// The sessions that may use a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allowed {
    /// Sessions of any role.
    Anybody,
    /// Tools, which engines are not.
    Tool,
    /// An engine's scheduler.
    Scheduler,
    /// A scheduler whose engine is open.
    OpenedEngine,
    /// A worker of an engine.
    Worker,
    /// A worker whose memory is registered.
    RegisteredWorker,
}

/// The transports over which a call is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transports {
    /// Only the Unix socket, because there the kernel names the peer.
    UnixOnly,
    /// The Unix socket and TCP.
    Any,
}

/// Whether a call is served while the daemon is stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhileStopping {
    /// It ends work, or keeps a promise.
    Served,
    /// It would begin new work.
    Refused,
}

/// The calls, in the order of the .proto file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Call {
    Hello,
    OpenEngine,
    RegisterWorker,
    MapPool,
    PoolMapped,
    Lookup,
    Release,
    Save,
    Claim,
    Commit,
    Heartbeat,
    Settle,
    DropNamespaces,
    GetStatus,
    Bye,
    Load,
    ShareChunks,
    CancelSaves,
    ReadJournal,
    RequestsEnded,
    ReadRecording,
}

/// The rules of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) call: Call,
    /// As in the .proto file.
    pub(crate) name: &'static str,
    pub(crate) allowed: Allowed,
    /// The sentence for sessions that are not allowed.
    pub(crate) refusal: &'static str,
    pub(crate) transports: Transports,
    pub(crate) stopping: WhileStopping,
}

const fn row(
    call: Call,
    name: &'static str,
    (allowed, refusal): (Allowed, &'static str),
    transports: Transports,
    stopping: WhileStopping,
) -> Row {
    Row { call, name, allowed, refusal, transports, stopping }
}

use Transports::{Any, UnixOnly};
use WhileStopping::{Refused, Served};

const ANYBODY: (Allowed, &str) = (Allowed::Anybody, "");
const TOOL: (Allowed, &str) = (Allowed::Tool, "engines drop nothing that others may share: use a tool");
const RECORDING: (Allowed, &str) = (Allowed::Tool, "engines read nothing of others' requests: use a tool");
const SCHEDULER: (Allowed, &str) = (Allowed::Scheduler, "only the scheduler opens an engine");
const OPENED: (Allowed, &str) = (Allowed::OpenedEngine, "open the engine's groups first");
const SHARING: (Allowed, &str) = (Allowed::Worker, "only workers share memory");
const REGISTERING: (Allowed, &str) = (Allowed::Worker, "only workers register memory");
const REGISTERED: (Allowed, &str) = (Allowed::RegisteredWorker, "register the worker's memory first");

/// The rows, in the order of [`Call`]. The session admits Hello itself, because it has no role before.
pub(crate) const CALLS: [Row; 21] = [
    row(Call::Hello, "Hello", ANYBODY, Any, Refused),
    row(Call::OpenEngine, "OpenEngine", SCHEDULER, UnixOnly, Refused),
    row(Call::RegisterWorker, "RegisterWorker", REGISTERING, UnixOnly, Refused),
    row(Call::MapPool, "MapPool", ANYBODY, UnixOnly, Served),
    row(Call::PoolMapped, "PoolMapped", ANYBODY, UnixOnly, Refused),
    row(Call::Lookup, "Lookup", OPENED, UnixOnly, Refused),
    row(Call::Release, "Release", OPENED, UnixOnly, Served),
    row(Call::Save, "Save", REGISTERED, UnixOnly, Refused),
    row(Call::Claim, "Claim", REGISTERED, UnixOnly, Refused),
    row(Call::Commit, "Commit", REGISTERED, UnixOnly, Served),
    row(Call::Heartbeat, "Heartbeat", OPENED, UnixOnly, Served),
    row(Call::Settle, "Settle", ANYBODY, UnixOnly, Served),
    row(Call::DropNamespaces, "DropNamespaces", TOOL, UnixOnly, Served),
    row(Call::GetStatus, "GetStatus", ANYBODY, Any, Served),
    row(Call::Bye, "Bye", ANYBODY, Any, Served),
    // Served while stopping, because its blocks were promised.
    row(Call::Load, "Load", REGISTERED, UnixOnly, Served),
    row(Call::ShareChunks, "ShareChunks", SHARING, UnixOnly, Refused),
    row(Call::CancelSaves, "CancelSaves", OPENED, UnixOnly, Served),
    row(Call::ReadJournal, "ReadJournal", OPENED, UnixOnly, Served),
    row(Call::RequestsEnded, "RequestsEnded", OPENED, UnixOnly, Served),
    row(Call::ReadRecording, "ReadRecording", RECORDING, UnixOnly, Served),
];

const _: () = {
    let mut at = 0;
    while at < CALLS.len() {
        assert!(CALLS[at].call as usize == at, "each call's row stands at the call's index");
        at += 1;
    }
};

impl Call {
    /// Panics if the table has no row for it.
    pub(crate) const fn row(self) -> &'static Row {
        &CALLS[self as usize]
    }

    /// The call that a request makes.
    pub(crate) const fn of(ask: &Ask) -> Self {
        match ask {
            Ask::Hello(_) => Self::Hello,
            Ask::OpenEngine(_) => Self::OpenEngine,
            Ask::RegisterWorker(_) => Self::RegisterWorker,
            Ask::MapPool(_) => Self::MapPool,
            Ask::PoolMapped(_) => Self::PoolMapped,
            Ask::Lookup(_) => Self::Lookup,
            Ask::Release(_) => Self::Release,
            Ask::Save(_) => Self::Save,
            Ask::Claim(_) => Self::Claim,
            Ask::Commit(_) => Self::Commit,
            Ask::Heartbeat(_) => Self::Heartbeat,
            Ask::Settle(_) => Self::Settle,
            Ask::DropNamespaces(_) => Self::DropNamespaces,
            Ask::GetStatus(_) => Self::GetStatus,
            Ask::Bye(_) => Self::Bye,
            Ask::Load(_) => Self::Load,
            Ask::ShareChunks(_) => Self::ShareChunks,
            Ask::CancelSaves(_) => Self::CancelSaves,
            Ask::ReadJournal(_) => Self::ReadJournal,
            Ask::RequestsEnded(_) => Self::RequestsEnded,
            Ask::ReadRecording(_) => Self::ReadRecording,
        }
    }
}
