//! Why the index refuses a message or a question. Nothing has changed then.

use thiserror::Error;

/// A refusal. The caller counts it, and answers the sender with its sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// A message of an owner that has not joined, or was forgotten.
    #[error("unknown owner; it must join first")]
    Unknown,
    /// A message of an earlier run of the owner.
    #[error("epoch {epoch} is over; this owner is in epoch {current}")]
    OldEpoch {
        /// The epoch of the message.
        epoch: u64,
        /// The epoch that the index follows.
        current: u64,
    },
    /// A message of a run that has not joined yet.
    #[error("epoch {epoch} has not joined; the index follows epoch {current}")]
    NotJoined {
        /// The epoch of the message.
        epoch: u64,
        /// The epoch that the index follows.
        current: u64,
    },
    /// A message of a run that has said goodbye.
    #[error("this owner has said goodbye; it must join with a greater epoch than {epoch}")]
    Gone {
        /// The epoch that has ended.
        epoch: u64,
    },
    /// The index follows as many owners as it may.
    #[error("the index follows {0} owners already, which is the limit")]
    TooManyOwners(usize),
    /// An owner's name or address is empty or too long.
    #[error("a name and an address have 1 to {most} bytes, this one has {bytes}")]
    NameLength {
        /// Its length in bytes.
        bytes: usize,
        /// Most bytes of a name or an address.
        most: usize,
    },
    /// A question, a delta or a part of a snapshot with too many keys.
    #[error("{keys} keys in one message; the limit is {most}")]
    TooManyKeys {
        /// Keys in the message.
        keys: usize,
        /// Most keys of such a message.
        most: usize,
    },
    /// Numbers that contradict each other, or an earlier part of the same snapshot.
    #[error("the numbers of this message contradict each other or the snapshot's other parts")]
    BadNumbers,
    /// A part of a snapshot that the index does not wait for, or no longer.
    #[error("the index does not wait for this snapshot")]
    OtherSnapshot,
    /// A snapshot that began before changes which the index has applied.
    #[error("the snapshot begins at change {base}, but change {applied} is applied already")]
    OldSnapshot {
        /// The snapshot's base.
        base: u64,
        /// Number of the latest change that was applied.
        applied: u64,
    },
    /// Each slot is in use or waits for the sweep.
    #[error("no slot is free for this snapshot until the sweep has removed older entries")]
    NoSlot,
}
