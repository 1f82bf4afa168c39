//! A prompt that another engine hands over: it has computed it, and saves its blocks.

use std::time::Duration;

use kvlane_proto::v1;

/// No daemon waits longer without progress.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Whom a lookup waits for, and how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandOff {
    /// The engine that saves, as its scheduler and workers name it to the daemon.
    pub engine_id: String,
    /// [`Scheduler::run`](crate::Scheduler::run) of its scheduler: another process under this name is not waited for.
    pub run: [u8; 16],
    /// Tokens from the prompt's start that it stores.
    pub tokens: u64,
    /// Milliseconds without progress of their saves after which the lookup is answered with what is there.
    pub wait_ms: u32,
}

impl HandOff {
    /// How long the daemon waits without progress.
    pub(crate) fn wait(&self) -> Duration {
        Duration::from_millis(self.wait_ms.into()).min(WAIT_MAX)
    }

    pub(crate) fn into_wire(self) -> v1::HandOff {
        let Self { engine_id, run, tokens, wait_ms } = self;
        v1::HandOff { engine_id, run: run.to_vec().into(), tokens, wait_ms }
    }
}
