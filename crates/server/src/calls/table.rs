//! Every call, in one row each: who may use it, over what, and whether a daemon that is stopping still serves it. Who
//! admits calls, the metrics, and the test that walks all calls read it here.

use kvlane_proto::v1::request::Body as Ask;

/// Who may use a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// Any role.
    Anybody,
    /// Only tools.
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

/// Over which connections a call is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// Only where the kernel says who the peer is.
    UnixOnly,
    /// Over TCP too.
    Any,
}

/// What becomes of a call while the daemon is stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhileStopping {
    /// It ends what was begun, or brings what was promised.
    Served,
    /// It would begin something.
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
}

/// What holds for a call, whatever it asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) call: Call,
    /// As in the .proto file.
    pub(crate) name: &'static str,
    pub(crate) who: Who,
    /// What those hear who may not use it.
    pub(crate) others_hear: &'static str,
    pub(crate) over: Over,
    pub(crate) stopping: WhileStopping,
}

const fn row(
    call: Call,
    name: &'static str,
    (who, others_hear): (Who, &'static str),
    over: Over,
    stopping: WhileStopping,
) -> Row {
    Row { call, name, who, others_hear, over, stopping }
}

use Over::{Any, UnixOnly};
use WhileStopping::{Refused, Served};

const ANYBODY: (Who, &str) = (Who::Anybody, "");
const TOOL: (Who, &str) = (Who::Tool, "engines drop nothing that others may share: use a tool");
const SCHEDULER: (Who, &str) = (Who::Scheduler, "only the scheduler opens an engine");
const OPENED: (Who, &str) = (Who::OpenedEngine, "open the engine's groups first");
const SHARING: (Who, &str) = (Who::Worker, "only workers share memory");
const REGISTERING: (Who, &str) = (Who::Worker, "only workers register memory");
const REGISTERED: (Who, &str) = (Who::RegisteredWorker, "register the worker's memory first");

/// The table. Hello is admitted by the session itself, which knows nobody before.
pub(crate) const CALLS: [Row; 19] = [
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
    // Also while stopping: it was promised.
    row(Call::Load, "Load", REGISTERED, UnixOnly, Served),
    row(Call::ShareChunks, "ShareChunks", SHARING, UnixOnly, Refused),
    row(Call::CancelSaves, "CancelSaves", OPENED, UnixOnly, Served),
    row(Call::ReadJournal, "ReadJournal", OPENED, UnixOnly, Served),
];

const _: () = {
    let mut at = 0;
    while at < CALLS.len() {
        assert!(CALLS[at].call as usize == at, "each call's row stands in the call's place");
        at += 1;
    }
};

impl Call {
    /// What holds for it.
    pub(crate) const fn row(self) -> &'static Row {
        &CALLS[self as usize]
    }

    /// Of a request.
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
        }
    }
}
