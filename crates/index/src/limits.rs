//! Bounds of the index, in numbers and in time.

use std::time::Duration;

/// Most of everything that an owner or a reader can make the index keep or do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Entries, one for each key of each owner, those that wait for the sweep included.
    pub entries: usize,
    /// Entries of one owner.
    pub entries_an_owner: u64,
    /// Owners, those included that are hidden or have said goodbye. At most [`Limits::OWNERS_MOST`].
    pub owners: usize,
    /// Bytes of an owner's name, and of its address.
    pub name_bytes: usize,
    /// Keys in a question.
    pub keys_a_question: usize,
    /// Keys in one delta or in one part of a snapshot. Each space in a delta counts as a key, too.
    pub keys_a_message: usize,
    /// Deltas of one owner that wait for earlier ones or for a snapshot.
    pub waiting_deltas: usize,
    /// Keys in these deltas, and one for each space in each of them.
    pub waiting_keys: usize,
    /// Parts of one snapshot.
    pub snapshot_parts: u32,
    /// Snapshots that are requested or received at a time, of all owners.
    pub snapshots: usize,
    /// Latest withdrawals of one owner that are remembered during its snapshot, because a part of it may come after them.
    pub late_withdrawals: usize,
}

impl Limits {
    /// More owners than this would run out of slots.
    pub const OWNERS_MOST: usize = 1024;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 64 << 20,
            entries_an_owner: 16 << 20,
            owners: 512,
            name_bytes: 255,
            keys_a_question: 64 << 10,
            keys_a_message: 64 << 10,
            waiting_deltas: 1 << 10,
            waiting_keys: 64 << 10,
            snapshot_parts: 16 << 20,
            snapshots: 8,
            late_withdrawals: 64 << 10,
        }
    }
}

/// How long the index waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Owners send a heartbeat this often. An owner is hidden once three are overdue.
    pub heartbeat: Duration,
    /// The index forgets an owner that has been silent this long, or that said goodbye this long ago.
    pub forget: Duration,
    /// A delta that is missing for longer counts as lost.
    pub gap: Duration,
    /// A snapshot fails if no part of it comes for this long.
    pub snapshot: Duration,
    /// Least time between the first and the second request for an owner's snapshot. It doubles with each snapshot after
    /// which the heartbeats still differ, up to 64 times this.
    pub pause: Duration,
}

impl Timing {
    /// Missed heartbeats after which an owner is hidden.
    pub const MISSED: u32 = 3;
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(1),
            forget: Duration::from_secs(90),
            gap: Duration::from_millis(500),
            snapshot: Duration::from_secs(2),
            pause: Duration::from_secs(1),
        }
    }
}
