//! How a lookup that waits for another engine ends.

use crate::hand_offs::End;

/// What became of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ready,
    Complete,
    Stalled,
    TooLong,
    Failed,
    Gone,
    OtherBlocks,
    TooMany,
    Stopping,
    Abandoned,
}

impl Outcome {
    /// All of them, in their order.
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

    /// As metrics have it.
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

    /// Why the prompt has to be computed, or a part of it; None where that is nobody's fault.
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

impl From<End> for Outcome {
    fn from(end: End) -> Self {
        match end {
            End::Complete => Self::Complete,
            End::Failed => Self::Failed,
            End::Gone => Self::Gone,
            End::Stopping => Self::Stopping,
        }
    }
}
