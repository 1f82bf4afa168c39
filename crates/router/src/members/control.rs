//! What operators ask of a running router over its Unix socket: one line of JSON, and one for an answer.
//!
//! ```text
//!   {"call": "list"}                                        {"nodes": [...]}
//!   {"call": "drain", "node": "http://10.0.0.1:8100"}       {"nodes": [that one]}
//!   {"call": "remove", "node": ..., "now": false}           {"nodes": [that one]}, or none if it has gone
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

use crate::schedule::Condition;

/// Longest line that asks.
pub const CALL_BYTES_MAX: usize = 4096;
/// Longest line that answers.
pub const ANSWER_BYTES_MAX: usize = 8 << 20;
/// An answer has to come within this time.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// All nodes.
    List,
    /// A node finishes what it has and gets nothing new.
    Drain {
        /// Its name.
        node: String,
    },
    /// A node goes.
    Remove {
        /// Its name.
        node: String,
        /// Without finishing what it has first.
        now: bool,
    },
    /// A node joins, or gets requests again.
    Add {
        /// Where it is.
        url: String,
        /// What it is for.
        role: String,
        /// Whom it hands over to.
        group: Option<String>,
        /// How.
        connector: Option<String>,
        /// Where other engines reach its connector.
        connector_address: Option<String>,
    },
}

/// What comes back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Nodes that were asked for.
    #[serde(default)]
    pub nodes: Vec<Listed>,
    /// Why nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name.
    pub node: String,
    /// What it is for.
    pub role: String,
    /// Whom it hands over to.
    pub group: String,
    /// How.
    pub connector: String,
    /// Whether it gets requests.
    pub state: String,
    /// Who has named it.
    pub known_by: Vec<String>,
    /// Requests of this router that it works at.
    pub requests: u64,
    /// Recent failures of the node, as `/nodes` shows them. Empty if the router is of an earlier release.
    #[serde(default)]
    pub condition: Condition,
    /// Models and adapters; of many the first ones.
    pub models: Vec<String>,
}

/// A line that asks for nothing that there is.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the router does not understand this: {0}")]
pub struct CallError(String);

/// Reads what is asked.
///
/// # Errors
/// It is no call.
pub fn read_call(line: &[u8]) -> Result<Call, CallError> {
    if line.len() > CALL_BYTES_MAX {
        return Err(CallError(format!("a line has more than {CALL_BYTES_MAX} bytes")));
    }
    serde_json::from_slice(line).map_err(|error| CallError(error.to_string()))
}

/// Whether a process of this user may ask, or answer: it is this user's, or root's.
pub(super) fn is_trusted(stream: impl std::os::fd::AsFd) -> io::Result<bool> {
    let uid = PeerCredentials::of(stream)?.uid;
    Ok(uid == 0 || uid == rustix::process::geteuid().as_raw() && !own_user_is_unclear())
}

/// A router that could not be asked.
#[derive(Debug, Error)]
pub enum AskError {
    /// Nobody is there.
    #[error(
        "no router answers at {path}: {error}. Is `kvlane route` running, as this user, with this --socket?"
    )]
    Nobody {
        /// Where it was looked for.
        path: String,
        /// Why not.
        error: io::Error,
    },
    /// Somebody else is.
    #[error("another user listens at {0}: nothing was said")]
    Stranger(String),
    /// The folder may be somebody else's.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// No answer came, or no whole one.
    #[error("the router gave no answer: {0}")]
    Silent(io::Error),
    /// It does not do what was asked.
    #[error("{0}")]
    Refused(String),
}

/// Asks the router that listens there.
///
/// # Errors
/// It is not there, or refuses.
pub fn ask(path: &Path, call: &Call) -> Result<Vec<Listed>, AskError> {
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
    answer.error.map_or(Ok(answer.nodes), |sentence| Err(AskError::Refused(sentence)))
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
