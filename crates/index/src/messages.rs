//! The messages of owners. They may arrive late, twice, in any order, or never.
//!
//! ```text
//!   changes of the owner    1  2  3 | 4  5 | 6  7  8  9 | 10 ...
//!   deltas                  <  1-3 > <4-5>  <   6-9    >
//!   heartbeat                               ^ number 5: its count and digest after change 5
//!   parts of a snapshot                  ^ base 5     ^ read at 8: the keys of this part after change 8
//! ```

use kvlane_block::{BlockHash, Space};

use crate::keys::KeySet;

/// Consecutive changes of an owner's keys. It states how each key that changed ended up, so a delta may hold fewer keys
/// than numbers, and may be applied after one that it overlaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// Number of its first change. An owner numbers its changes from 1 in each epoch.
    pub first: u64,
    /// Number of its last change.
    pub last: u64,
    /// The keys that changed, by space.
    pub changes: Vec<Changes>,
}

impl Delta {
    /// Keys in the delta.
    pub fn keys(&self) -> usize {
        self.changes.iter().map(|each| each.announced.len() + each.withdrawn.len()).sum()
    }

    /// What limits count: its keys, and one for each space, because a list without keys takes memory, too.
    pub(crate) fn size(&self) -> usize {
        self.keys() + self.changes.len()
    }
}

/// Changed keys of one space. A key is in one of the two lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// The space of all these keys.
    pub space: Space,
    /// Keys that lookups find at the owner.
    pub announced: Vec<BlockHash>,
    /// Keys that they do not find any more, or never did.
    pub withdrawn: Vec<BlockHash>,
}

/// Shows that an owner lives, and lets the index compare. It compares where a delta ends with the same number, so an owner
/// sends its pending changes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Number of the owner's latest change.
    pub number: u64,
    /// All of its keys after that change.
    pub keys: KeySet,
}

/// A part of a snapshot. All parts together hold each key that the owner had throughout the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The request that this snapshot answers.
    pub ticket: u64,
    /// Counts the snapshot's parts, from 0.
    pub number: u32,
    /// No part has a greater number.
    pub is_last: bool,
    /// Number of the owner's latest change when it began the snapshot. Equal in all parts.
    pub base: u64,
    /// Number of the owner's latest change when it read the keys of this part. At least `base`.
    pub read_at: u64,
    /// The space of all these keys.
    pub space: Space,
    /// Keys that the owner had at that moment.
    pub hashes: Vec<BlockHash>,
}
