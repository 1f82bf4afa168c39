//! Parts of this process's transfers that are under way, and how far each is.

use crate::links::LinkId;
use crate::ranges::{Piece, Spot};
use crate::transfers::Completion;

#[derive(Debug)]
pub(super) struct Posted {
    pub(super) link: LinkId,
    pub(super) what: Asked,
}

#[derive(Debug)]
pub(super) enum Asked {
    /// And what the link has written when its bytes have left.
    Write(u64),
    /// A write of bytes that are being copied out of a GPU's memory: nothing was sent yet.
    Staged,
    /// And where what has not begun to come belongs.
    Read(Vec<Piece>),
    /// A read into a GPU's memory.
    ReadStaged(Box<StagedRead>),
}

/// A read of ours into a GPU's memory.
#[derive(Debug)]
pub(super) struct StagedRead {
    /// What has not begun to come.
    pub(super) left: Vec<Spot>,
    /// Frames whose bytes are not in place.
    pub(super) coming: usize,
    /// What was worst so far.
    pub(super) completion: Completion,
}

impl StagedRead {
    /// Nothing more is to come.
    pub(super) fn is_over(&self) -> bool {
        self.left.is_empty() && self.coming == 0
    }
}
