//! What the fast carriers of all processes have said, and what is going to happen to them.

use std::collections::BTreeMap;

use super::super::memory::Whose;
use crate::carrier::SessionId;
use crate::transfers::{Completion, PathId, PeerId, Token};

#[derive(Debug, Default)]
pub(in super::super) struct Neighbours {
    /// What was said, by its number in the words.
    pub(super) said: Vec<Said>,
    pub(super) happenings: BTreeMap<u64, Happening>,
    /// Connections of whichever process, and when they ended at the side that made them.
    pub(super) ended: BTreeMap<u64, u64>,
    pub(super) made: u64,
}

#[derive(Debug, Clone)]
pub(super) enum Said {
    /// Write this: its bytes are there to be read.
    Pull {
        token: Token,
        whose: Whose,
        runs: Vec<Range>,
    },
    /// Its bytes are these.
    Inline {
        token: Token,
        whose: Whose,
        runs: Vec<Range>,
        bytes: Vec<Vec<u8>>,
        connection: u64,
    },
    Done {
        token: Token,
        completion: Completion,
    },
}

/// Bytes of a peer's region, and where the others are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) here: usize,
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: usize,
    pub(super) len: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Happening {
    /// Whether a session's process can be read.
    Probed(SessionId, u64),
    /// Whether a peer can.
    Reached(PeerId, u64),
    /// A call of a copy is over.
    Copied(u64),
    /// The card has been looked at after it.
    Looked(u64),
    /// There is a way to a peer again, or no more.
    Returns(PeerId),
    Vanishes(PeerId),
    Gone(u64),
    Ready(PathId),
}
