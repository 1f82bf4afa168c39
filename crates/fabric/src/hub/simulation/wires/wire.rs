//! The control connections of all processes, and the frames in flight on them.

use std::collections::{BTreeMap, VecDeque};

use crate::fences::Broken;
use crate::frames::Frame;
use crate::identity::Identity;
use crate::served::Served;
use crate::transfers::PathId;

/// Indexes of a connection's two ends.
pub(super) const CONNECTING: usize = 0;
pub(super) const LISTENING: usize = 1;

#[derive(Debug, Default)]
pub(in super::super) struct Wires {
    pub(super) all: BTreeMap<u64, Wire>,
    pub(super) made: u64,
    pub(super) fences: Vec<FenceAsked>,
}

#[derive(Debug)]
pub(super) struct Wire {
    /// The processes at its ends.
    pub(super) ends: [usize; 2],
    pub(super) path: PathId,
    pub(super) number: u32,
    pub(super) to: Option<Identity>,
    pub(super) served: Served,
    /// Whether each end has it: from when it is made or arrives, until it ends there.
    pub(super) has: [bool; 2],
    pub(super) is_up: bool,
    /// No further frame enters it.
    pub(super) is_cut: bool,
    /// Frames in flight to each end, and when the last of them arrives.
    pub(super) frames: [VecDeque<Frame<Vec<u8>>>; 2],
    pub(super) last: [u64; 2],
}

/// A fence asked for over a connection of its own.
#[derive(Debug)]
pub(super) struct FenceAsked {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) broken: Broken,
}
