//! The slow carrier's connections, and what is in flight on them.

use std::collections::BTreeMap;

use super::super::memory::{TransferName, overlaps};
use crate::carrier::{SessionId, Touched};
use crate::transfers::{Completion, Op, PathId, PeerId, Token};

/// Connections of all processes, by id, and what is in flight on them.
#[derive(Debug, Default)]
pub(in super::super) struct SlowLinks {
    pub(super) links: BTreeMap<u64, SlowLink>,
    pub(super) moves: BTreeMap<u64, Move>,
    pub(super) events: BTreeMap<u64, SlowEvent>,
    pub(super) made: u64,
}

#[derive(Debug)]
pub(super) struct SlowLink {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) peer: PeerId,
    pub(super) path: PathId,
    pub(super) number: u32,
    pub(super) is_up: bool,
    /// The connecting side has not closed it.
    pub(super) ours: bool,
    /// The listening side places what arrives.
    pub(super) theirs: bool,
    /// The listening side has bytes of it in hand until then.
    pub(super) in_hand_until: u64,
    pub(super) is_broken: bool,
    /// Nothing is placed after that.
    pub(super) places_until: u64,
}

#[derive(Debug)]
pub(super) struct Move {
    pub(super) link: u64,
    pub(super) token: Token,
    pub(super) whose: TransferName,
    pub(super) op: Op,
    pub(super) parts: Vec<Part>,
    /// The listening side has begun it.
    pub(super) is_served: bool,
    pub(super) left: usize,
}

/// Contiguous bytes of a move.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) here: usize,
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: usize,
    /// Address at the listening side, once that has looked it up.
    pub(super) there: usize,
    pub(super) len: usize,
    pub(super) bytes: Vec<u8>,
    pub(super) is_over: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum SlowEvent {
    /// The attempt to connect succeeds or fails.
    Dialled(u64),
    /// The connecting side notices the break.
    Broke(u64),
    /// The listening side notices the break.
    Left(u64),
    /// The bytes of a WRITE leave.
    Sent(u64),
    /// A request arrives at the listening side.
    Requested(u64),
    /// The listening side places bytes of a WRITE, or reads those for a READ.
    Served(u64, usize),
    /// The connecting side places bytes of a READ.
    Landed(u64, usize),
    Answered(u64, Completion),
    Ready(PathId),
    Considered(SessionId),
}

impl SlowLinks {
    /// A connection that its maker has not closed, if there is one.
    pub(in super::super) fn left_over(&self, is_dead: impl Fn(usize) -> bool) -> Option<String> {
        self.links.values().find(|link| link.ours && !is_dead(link.from)).map(|link| format!("{link:?}"))
    }

    pub(super) fn is_touched(&self, process: usize, memory: Touched, now: u64) -> bool {
        let of_other = |of: &Move| {
            let link = &self.links[&of.link];
            let places = link.theirs && (now <= link.places_until || link.in_hand_until > now);
            link.to == process && of.is_served && places
        };
        self.moves
            .values()
            .filter(|of| of_other(of))
            .flat_map(|of| &of.parts)
            .any(|part| !part.is_over && overlaps(memory, part.there, part.len))
    }
}
