//! Tracks runs of the daemon that the link has left: they may still read the engine's blocks for saves.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{
    boot::BootId,
    links::ids::{Life, ProcessId},
};

/// After this time no save is in flight that the run has accepted: longer than any save timeout.
const SAVES_END: Duration = Duration::from_secs(60);
/// Most former runs that are remembered, for the workers.
const GONE_MAX: usize = 8;

/// A run whose process may still read for saves.
#[derive(Debug)]
struct LeftRun {
    boot: BootId,
    at: Instant,
    life: Life,
}

impl LeftRun {
    /// Whether the run can read for no save of this engine any more.
    fn is_over(&self, now: Instant) -> bool {
        match self.life {
            Life::Watched(_) => false,
            Life::Unknown => now.saturating_duration_since(self.at) >= SAVES_END,
            Life::Ended => true,
        }
    }
}

/// Former runs, and those of them that may still read.
#[derive(Debug, Default)]
pub(super) struct FormerRuns {
    /// In the order in which they were left.
    gone: VecDeque<BootId>,
    left: Vec<LeftRun>,
}

impl FormerRuns {
    /// The connection to this run has ended.
    pub(super) fn leave(&mut self, boot: BootId, life: Life, now: Instant) {
        if life != Life::Ended {
            self.left.push(LeftRun { boot, at: now, life });
        }
        self.gone.push_back(boot);
        if self.gone.len() > GONE_MAX {
            self.gone.pop_front();
        }
    }

    /// This run has welcomed the engine again, so it is not a former one.
    pub(super) fn welcome(&mut self, boot: &BootId) {
        self.gone.retain(|of| of != boot);
        self.left.retain(|left| left.boot != *boot);
    }

    pub(super) fn process_ended(&mut self, process: ProcessId) {
        self.left.retain(|left| !left.life.needs(process));
    }

    /// Forgets runs that can read for no save any more.
    pub(super) fn forget_over(&mut self, now: Instant) {
        self.left.retain(|left| !left.is_over(now));
    }

    /// Whether no run is tracked that may still read.
    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Whether no former run can read for a save any more.
    pub(super) fn are_over(&self, now: Instant) -> bool {
        self.left.iter().all(|left| left.is_over(now))
    }

    /// When the next run is over whose end the kernel does not report.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let unknown = self.left.iter().filter(|left| left.life == Life::Unknown);
        unknown.map(|left| left.at + SAVES_END).min()
    }

    pub(super) fn needs(&self, process: ProcessId) -> bool {
        self.left.iter().any(|left| left.life.needs(process))
    }

    /// Runs in `gone` that the link cannot connect to again: their processes have ended, as far as the kernel reports it.
    pub(super) fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        let lives = |left: &LeftRun| matches!(left.life, Life::Watched(_));
        self.gone().filter(move |boot| !self.left.iter().any(|left| left.boot == *boot && lives(left)))
    }

    /// Whether the driver has not yet reported the end of a former run's process.
    pub(super) fn awaits_an_end(&self) -> bool {
        self.left.iter().any(|left| matches!(left.life, Life::Watched(_)))
    }

    /// The last eight former runs, in the order in which they were left.
    pub(super) fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.gone.iter().copied()
    }
}
