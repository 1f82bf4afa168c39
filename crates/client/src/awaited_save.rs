//! Lets a lookup wait for blocks that another engine has computed and is saving.

use std::time::Duration;

use kvlane_proto::v1;

/// Longest wait without progress; the daemon has the same bound.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The saves that a lookup waits for, and how long it waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwaitedSave {
    /// The engine that saves, as its scheduler and workers name it to the daemon.
    pub engine_id: String,
    /// [`Scheduler::run`](crate::Scheduler::run) of its scheduler. The daemon does not wait for another process of this name.
    pub run: [u8; 16],
    /// Number of tokens, from the prompt's start, that the engine saves.
    pub tokens: u64,
    /// After so many milliseconds without progress of these saves, the daemon answers with the blocks that it has.
    pub wait_ms: u32,
}

impl AwaitedSave {
    /// How long the daemon waits without progress.
    pub(crate) fn wait(&self) -> Duration {
        Duration::from_millis(self.wait_ms.into()).min(WAIT_MAX)
    }

    pub(crate) fn into_wire(self) -> v1::HandOff {
        let Self { engine_id, run, tokens, wait_ms } = self;
        v1::HandOff { engine_id, run: run.to_vec().into(), tokens, wait_ms }
    }
}
