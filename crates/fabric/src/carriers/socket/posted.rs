//! Posts of this process in flight on a socket carrier, and how far each is.

use crate::links::LinkId;
use crate::ranges::{Piece, Spot};
use crate::transfers::Completion;

#[derive(Debug)]
pub(super) struct SocketPost {
    pub(super) link: LinkId,
    pub(super) state: PostState,
}

#[derive(Debug)]
pub(super) enum PostState {
    /// Handed to the link. The number is the link's `written` count at which its bytes have left.
    Write(u64),
    /// A WRITE whose bytes are still being copied out of a GPU: nothing was sent.
    Staged,
    /// The destinations of the bytes that have not begun to arrive.
    Read(Vec<Piece>),
    /// A READ into a GPU's memory.
    ReadStaged(Box<StagedRead>),
}

/// A READ of this process into a GPU's memory.
#[derive(Debug)]
pub(super) struct StagedRead {
    /// The destinations of the bytes that have not begun to arrive.
    pub(super) left: Vec<Spot>,
    /// Frames whose bytes have begun to arrive and are not on the GPU yet.
    pub(super) coming: usize,
    /// `Placed`, or the last failure.
    pub(super) completion: Completion,
}

impl StagedRead {
    /// Whether all bytes have arrived and are in place.
    pub(super) fn is_over(&self) -> bool {
        self.left.is_empty() && self.coming == 0
    }
}
