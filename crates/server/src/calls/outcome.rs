//! The outcomes of lookups that await another engine's saves.

use crate::awaited_saves::End;

/// The outcome of one lookup's wait. Its number is its index in metrics and its bit in the log's mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// All blocks were visible already: there was no wait.
    Ready,
    /// All blocks became visible.
    Complete,
    /// No progress within the wait that the engine allows.
    Stalled,
    /// There was progress until the longest wait was over.
    TooLong,
    /// A block will not come.
    Failed,
    /// The saver is not connected, or went meanwhile.
    Gone,
    /// The saver does not save blocks of these groups.
    OtherBlocks,
    /// Too many lookups wait already, or too many blocks are watched.
    TooMany,
    /// The daemon stops.
    Stopping,
    /// The session of the lookup ended first.
    Abandoned,
}

impl WaitOutcome {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 10] = [
        Self::Ready,
        Self::Complete,
        Self::Stalled,
        Self::TooLong,
        Self::Failed,
        Self::Gone,
        Self::OtherBlocks,
        Self::TooMany,
        Self::Stopping,
        Self::Abandoned,
    ];

    /// The label in the metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Complete => "complete",
            Self::Stalled => "stalled",
            Self::TooLong => "too_long",
            Self::Failed => "failed",
            Self::Gone => "gone",
            Self::OtherBlocks => "other_blocks",
            Self::TooMany => "too_many",
            Self::Stopping => "stopping",
            Self::Abandoned => "abandoned",
        }
    }

    /// Why at least a part of the prompt has to be computed. None if that is no fault.
    pub(super) fn complaint(self) -> Option<&'static str> {
        match self {
            Self::Ready | Self::Complete | Self::Stopping | Self::Abandoned => None,
            Self::Stalled => Some("nothing was heard of its saves for as long as kvlane.wait_ms allows"),
            Self::TooLong => Some("its saves took longer than 30 s"),
            Self::Failed => Some("a block was not saved: look for failed saves in the log of that engine"),
            Self::Gone => Some("that engine is not connected to this daemon, or was restarted"),
            Self::OtherBlocks => {
                Some("that engine's blocks are of another model or layout: start both engines alike")
            }
            Self::TooMany => Some("too many blocks are waited for already"),
        }
    }
}

impl From<End> for WaitOutcome {
    fn from(end: End) -> Self {
        match end {
            End::Complete => Self::Complete,
            End::Failed => Self::Failed,
            End::Gone => Self::Gone,
            End::Stopping => Self::Stopping,
        }
    }
}
