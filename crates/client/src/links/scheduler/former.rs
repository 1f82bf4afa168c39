//! Runs of the daemon that this was connected to and is no more.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    boot::BootId,
    links::ids::{Life, ProcessId},
};

/// How long saves of a worker may last, and then some: longer than any save timeout.
const SAVES_END: Duration = Duration::from_secs(60);
/// Former runs that are remembered, for the workers.
const GONE_MAX: usize = 8;

/// A run whose process may still read for saves.
#[derive(Debug)]
struct Left {
    boot: BootId,
    at: Instant,
    life: Life,
}

impl Left {
    /// Nothing of it can become a block of this engine's any more.
    fn is_over(&self, now: Instant) -> bool {
        match self.life {
            Life::Watched(_) => false,
            Life::Unknown => now.saturating_duration_since(self.at) >= SAVES_END,
            Life::Ended => true,
        }
    }
}

/// Former runs: which they were, and which may still read.
#[derive(Debug, Default)]
pub(super) struct FormerRuns {
    /// The last one last.
    gone: VecDeque<BootId>,
    left: Vec<Left>,
}

impl FormerRuns {
    /// The connection to this run is over.
    pub(super) fn leave(&mut self, boot: BootId, life: Life, now: Instant) {
        if life != Life::Ended {
            self.left.push(Left { boot, at: now, life });
        }
        self.gone.push_back(boot);
        if self.gone.len() > GONE_MAX {
            self.gone.pop_front();
        }
    }

    /// This run has greeted: it is not a former one.
    pub(super) fn welcome(&mut self, boot: &BootId) {
        self.gone.retain(|of| of != boot);
        self.left.retain(|left| left.boot != *boot);
    }

    pub(super) fn process_ended(&mut self, process: ProcessId) {
        self.left.retain(|left| !left.life.needs(process));
    }

    /// Forgets those whose time is over.
    pub(super) fn forget_over(&mut self, now: Instant) {
        self.left.retain(|left| !left.is_over(now));
    }

    /// None that may read is left.
    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// None of them can read for a save any more.
    pub(super) fn are_over(&self, now: Instant) -> bool {
        self.left.iter().all(|left| left.is_over(now))
    }

    /// When the next one of those is over that the kernel tells nothing about.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let unknown = self.left.iter().filter(|left| left.life == Life::Unknown);
        unknown.map(|left| left.at + SAVES_END).min()
    }

    pub(super) fn needs(&self, process: ProcessId) -> bool {
        self.left.iter().any(|left| left.life.needs(process))
    }

    /// Those of `gone` that this can never be connected to again, as far as the kernel tells: their processes have ended.
    pub(super) fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        let lives = |left: &Left| matches!(left.life, Life::Watched(_));
        self.gone().filter(move |boot| !self.left.iter().any(|left| left.boot == *boot && lives(left)))
    }

    /// There is one whose process lives, or has ended unseen.
    pub(super) fn awaits_an_end(&self) -> bool {
        self.left.iter().any(|left| matches!(left.life, Life::Watched(_)))
    }

    /// The last eight, the last one last.
    pub(super) fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.gone.iter().copied()
    }
}
