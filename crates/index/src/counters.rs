//! Totals since the index began.

use crate::owner::Why;

/// Counts of everything that the index refuses, drops or repeats. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Announced keys that did not fit.
    pub keys_refused: u64,
    /// Deltas that were applied before.
    pub deltas_repeated: u64,
    /// Waiting deltas that were dropped above a limit.
    pub deltas_dropped: u64,
    /// Parts of snapshots that had come before.
    pub parts_repeated: u64,
    /// Snapshots requested.
    pub snapshots_requested: u64,
    /// An owner needed a snapshot because a delta did not come, or was dropped.
    pub lost_by_gap: u64,
    /// An owner needed a snapshot because count or digest differed.
    pub lost_by_difference: u64,
    /// An owner needed a snapshot because there was room again for keys that did not fit.
    pub lost_by_room: u64,
    /// Snapshots of which a part did not come in time.
    pub snapshots_failed: u64,
    /// Owners forgotten after a long silence or some time after their goodbye.
    pub owners_forgotten: u64,
}

impl Counters {
    pub(crate) fn lost(&mut self, why: Why) -> &mut u64 {
        match why {
            Why::Gap => &mut self.lost_by_gap,
            Why::Differs => &mut self.lost_by_difference,
            Why::Room => &mut self.lost_by_room,
            Why::SnapshotFailed => &mut self.snapshots_failed,
        }
    }
}
