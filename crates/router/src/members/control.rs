//! Operators' calls to a running router over its Unix socket: one line of JSON for the call, one for the answer. [`ask`] is the
//! client's side, for `kvlane route list` and its like.
//!
//! ```text
//!   {"call": "list"}                                        {"nodes": [...]}
//!   {"call": "drain", "node": "http://10.0.0.1:8100"}       {"nodes": [that one]}
//!   {"call": "remove", "node": ..., "now": false}           {"nodes": [that one]}, or none if it has gone
//!   {"call": "record", "cursor": 0}                         {"nodes": [], "recorded": {...}}
//!   {"call": "add", "url": ..., "role": "decode", ...}      {"nodes": [that one]}
//!                                                           {"error": "a sentence"}
//! ```

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use kvlane_memory::{FolderFault, FolderRefused, PeerCredentials, RuntimeFolder, own_user_is_unclear};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{recording::RecordedPage, schedule::Condition};

/// Longest line of a call.
pub const CALL_BYTES_MAX: usize = 4096;
/// Longest line of an answer.
pub const ANSWER_BYTES_MAX: usize = 8 << 20;
/// Time for an answer to come.
const PATIENCE: Duration = Duration::from_secs(10);

/// An operator's call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// Lists all nodes.
    List,
    /// Drains a node: it finishes its requests and gets no new ones.
    Drain {
        /// The node's name, which is its address.
        node: String,
    },
    /// Removes a node, at once or when it is idle.
    Remove {
        /// The node's name, which is its address.
        node: String,
        /// Whether it leaves before its requests have ended.
        now: bool,
    },
    /// Reads the recorded requests since the answer that gave `cursor`; 0 begins a recording, which ends 10 s after the last
    /// read.
    Record {
        /// 0 at first, then the cursor of the last answer.
        cursor: u64,
    },
    /// Adds a node, or ends its draining.
    Add {
        /// The node's address.
        url: String,
        /// As in flags: prefill, decode or worker.
        role: String,
        /// Only nodes of one group pair. None: the default group.
        group: Option<String>,
        /// As in flags. None leaves it to the node's pings.
        connector: Option<String>,
        /// Where other engines reach its connector.
        connector_address: Option<String>,
    },
}

/// The answer to a call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The nodes that the call was about, as they are afterwards.
    #[serde(default)]
    pub nodes: Vec<Listed>,
    /// The answer to [`Call::Record`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordedPage>,
    /// Why the router refused the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A node in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name, which is its address.
    pub node: String,
    /// As [`Role::name`](crate::schedule::Role::name).
    pub role: String,
    /// Only nodes of one group pair.
    pub group: String,
    /// As [`Connector::name`](crate::schedule::Connector::name).
    pub connector: String,
    /// As [`NodeState::name`](crate::schedule::NodeState::name).
    pub state: String,
    /// As [`KnownBy::names`](crate::schedule::KnownBy::names).
    pub known_by: Vec<String>,
    /// Legs of this router that have not ended.
    pub requests: u64,
    /// Recent failures of the node, as `/nodes` shows them. Empty if the router is of an earlier release.
    #[serde(default)]
    pub condition: Condition,
    /// Models and adapters; at most the first 16.
    pub models: Vec<String>,
}

/// A line that is no call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the router does not understand this: {0}")]
pub struct CallError(String);

/// Parses the line of a call.
///
/// # Errors
/// It is no call, or too long.
pub fn read_call(line: &[u8]) -> Result<Call, CallError> {
    if line.len() > CALL_BYTES_MAX {
        return Err(CallError(format!("a line has more than {CALL_BYTES_MAX} bytes")));
    }
    serde_json::from_slice(line).map_err(|error| CallError(error.to_string()))
}

/// Whether the peer of a connection is this user's process, or root's. Both ends check it.
pub(super) fn is_trusted(stream: impl std::os::fd::AsFd) -> io::Result<bool> {
    let uid = PeerCredentials::of(stream)?.uid;
    Ok(uid == 0 || uid == rustix::process::geteuid().as_raw() && !own_user_is_unclear())
}

/// Why a call got no answer, or was refused.
#[derive(Debug, Error)]
pub enum AskError {
    /// No process listens at the socket.
    #[error(
        "no router answers at {path}: {error}. Is `kvlane route` running, as this user, with this --socket?"
    )]
    Nobody {
        /// The socket's path.
        path: String,
        /// The failed connection's error.
        error: io::Error,
    },
    /// Another user's process listens there.
    #[error("another user listens at {0}: nothing was said")]
    Stranger(String),
    /// The runtime folder may be another user's.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// No whole answer came.
    #[error("the router gave no answer: {0}")]
    Silent(io::Error),
    /// The router refused the call.
    #[error("{0}")]
    Refused(String),
}

/// Sends a call to the router that listens at this path, and waits for its answer.
///
/// # Errors
/// No trusted router answers, or it refuses.
pub fn ask(path: &Path, call: &Call) -> Result<Answer, AskError> {
    let shown = || path.display().to_string();
    let runtime = RuntimeFolder::of_this_user();
    if runtime.holds(path) {
        match runtime.open() {
            Err(FolderRefused { why: FolderFault::Missing, .. }) => {}
            opened => drop(opened?),
        }
    }
    let mut stream = UnixStream::connect(path).map_err(|error| AskError::Nobody { path: shown(), error })?;
    if !is_trusted(&stream).map_err(AskError::Silent)? {
        return Err(AskError::Stranger(shown()));
    }
    let answer = exchange(&mut stream, call).map_err(AskError::Silent)?;
    match answer.error {
        None => Ok(answer),
        Some(sentence) => Err(AskError::Refused(sentence)),
    }
}

fn exchange(stream: &mut UnixStream, call: &Call) -> io::Result<Answer> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(call)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(ANSWER_BYTES_MAX as u64)).read_until(b'\n', &mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}
