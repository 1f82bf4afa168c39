//! Two state machines of a device's thread: whether it accepts jobs, and whether its tables are synced.

/// Whether callers still queue jobs. Goes from accepting to closing once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Callers queue reads and writes.
    Accepting,
    /// No job comes any more. The thread writes its backlog, then the tables.
    Closing,
}

/// Whether an fdatasync covers all tables that were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncState {
    /// A sync covers every table.
    Done,
    /// Tables were written after the last sync.
    Due,
    /// A sync is in flight.
    InFlight,
    /// A sync is in flight, and tables were written after it began.
    InFlightAndDue,
}

impl SyncState {
    /// Called when a foot, and with it a table, was written.
    pub(super) fn table_written(&mut self) {
        *self = match self {
            Self::Done | Self::Due => Self::Due,
            Self::InFlight | Self::InFlightAndDue => Self::InFlightAndDue,
        };
    }

    /// Called when a sync has ended, also when it failed: the next table makes another one due.
    pub(super) fn ended(&mut self) {
        *self = match self {
            Self::Done | Self::InFlight => Self::Done,
            Self::Due | Self::InFlightAndDue => Self::Due,
        };
    }

    /// Whether a table was written that no sync, done or in flight, covers.
    pub(super) fn is_due(self) -> bool {
        matches!(self, Self::Due | Self::InFlightAndDue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_written_during_a_sync_needs_another_one() {
        let mut sync = SyncState::Done;
        sync.table_written();
        assert_eq!(sync, SyncState::Due);
        sync = SyncState::InFlight;
        sync.table_written();
        sync.table_written();
        assert!(sync == SyncState::InFlightAndDue && sync.is_due());
        sync.ended();
        assert_eq!(sync, SyncState::Due);
        sync = SyncState::InFlight;
        assert!(!sync.is_due());
        sync.ended();
        assert_eq!(sync, SyncState::Done);
    }
}
