//! What a device's thread is doing: taking orders or closing, and syncing.

/// Whether orders still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Callers read and write.
    Accepting,
    /// No order comes any more. The thread writes what it has, then the tables.
    Closing,
}

/// Whether the tables that were written have reached the media.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sync {
    /// All have.
    Done,
    /// Tables were written after the last sync.
    Due,
    /// A sync is in flight.
    InFlight,
    /// A sync is in flight, and tables were written after it began.
    InFlightAndDue,
}

impl Sync {
    /// A table was written.
    pub(super) fn table_written(&mut self) {
        *self = match self {
            Self::Done | Self::Due => Self::Due,
            Self::InFlight | Self::InFlightAndDue => Self::InFlightAndDue,
        };
    }

    /// A sync has ended.
    pub(super) fn ended(&mut self) {
        *self = match self {
            Self::Done | Self::InFlight => Self::Done,
            Self::Due | Self::InFlightAndDue => Self::Due,
        };
    }

    /// Whether tables were written that no sync covers.
    pub(super) fn is_due(self) -> bool {
        matches!(self, Self::Due | Self::InFlightAndDue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_written_during_a_sync_needs_another_one() {
        let mut sync = Sync::Done;
        sync.table_written();
        assert_eq!(sync, Sync::Due);
        sync = Sync::InFlight;
        sync.table_written();
        sync.table_written();
        assert!(sync == Sync::InFlightAndDue && sync.is_due());
        sync.ended();
        assert_eq!(sync, Sync::Due);
        sync = Sync::InFlight;
        assert!(!sync.is_due());
        sync.ended();
        assert_eq!(sync, Sync::Done);
    }
}
