//! Connections of the slow carrier, and what is under way on them.

use std::collections::BTreeMap;

use super::super::memory::{Whose, overlaps};
use crate::carrier::{SessionId, Touched};
use crate::transfers::{Completion, Op, PathId, PeerId, Token};

/// Connections and what is under way on them.
#[derive(Debug, Default)]
pub(in super::super) struct Links {
    pub(super) links: BTreeMap<u64, Link>,
    pub(super) moves: BTreeMap<u64, Move>,
    pub(super) happenings: BTreeMap<u64, Happening>,
    pub(super) made: u64,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) peer: PeerId,
    pub(super) path: PathId,
    pub(super) number: u32,
    pub(super) is_up: bool,
    /// The side that connected has not closed it.
    pub(super) ours: bool,
    /// The other side places what comes.
    pub(super) theirs: bool,
    /// That side has some of it in hand until then.
    pub(super) in_hand_until: u64,
    pub(super) is_broken: bool,
    /// Nothing is placed after that.
    pub(super) places_until: u64,
}

#[derive(Debug)]
pub(super) struct Move {
    pub(super) link: u64,
    pub(super) token: Token,
    pub(super) whose: Whose,
    pub(super) op: Op,
    pub(super) parts: Vec<Part>,
    /// The other side has begun it.
    pub(super) is_served: bool,
    pub(super) left: usize,
}

/// Some bytes.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) here: usize,
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: usize,
    /// Where that is, once the other side has looked.
    pub(super) there: usize,
    pub(super) len: usize,
    pub(super) bytes: Vec<u8>,
    pub(super) is_over: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Happening {
    /// A connection is made, or not.
    Dialled(u64),
    /// The side that connected notices that it is broken.
    Broke(u64),
    /// So does the other one.
    Left(u64),
    /// The bytes of a write go out.
    Sent(u64),
    /// What is asked for comes to the other side.
    Came(u64),
    /// Bytes of a write are placed there, or those of a read taken.
    Served(u64, usize),
    /// Bytes of a read are placed.
    Landed(u64, usize),
    Answered(u64, Completion),
    Ready(PathId),
    Considered(SessionId),
}

impl Links {
    /// A connection that whoever made it has not closed.
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
