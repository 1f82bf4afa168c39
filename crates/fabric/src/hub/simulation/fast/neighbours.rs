//! The words that fast carriers have sent, and their scheduled events.

use std::collections::BTreeMap;

use super::super::memory::TransferName;
use crate::carrier::SessionId;
use crate::transfers::{Completion, PathId, PeerId, Token};

#[derive(Debug, Default)]
pub(in super::super) struct Neighbours {
    /// Words, by the number that is sent in their place.
    pub(super) said: Vec<Said>,
    pub(super) events: BTreeMap<u64, FastEvent>,
    /// Ended connections of all processes, and when the connecting side ended them.
    pub(super) ended: BTreeMap<u64, u64>,
    pub(super) made: u64,
}

#[derive(Debug, Clone)]
pub(super) enum Said {
    /// Asks the peer to read these bytes.
    Pull {
        token: Token,
        whose: TransferName,
        runs: Vec<Range>,
    },
    /// Asks the peer to place these bytes.
    Inline {
        token: Token,
        whose: TransferName,
        runs: Vec<Range>,
        bytes: Vec<Vec<u8>>,
        connection: u64,
    },
    Done {
        token: Token,
        completion: Completion,
    },
}

/// Bytes of a peer's region, and their address in this process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) here: usize,
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: usize,
    pub(super) len: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum FastEvent {
    /// A session's process was probed.
    Probed(SessionId, u64),
    /// A peer's process was probed.
    Reached(PeerId, u64),
    /// A call has copied its bytes.
    Copied(u64),
    /// The card was read after the call.
    CardRead(u64),
    /// The path to a peer returns, or vanishes.
    Returns(PeerId),
    Vanishes(PeerId),
    Gone(u64),
    Ready(PathId),
}
