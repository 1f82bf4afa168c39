//! One load: what its two hands are at, and when its request may compute.

use std::time::{Duration, Instant};

use super::{
    super::{
        flags::Flags,
        ids::{CopyId, Life, ProcessId},
    },
    event::{Actions, WorkerAction},
};
use crate::{
    boot::BootId,
    jobs::{Finished, Job, JobKind, Release, Work},
};

/// A released load holds up what the engine computes, so a silent daemon is not waited for long: it was idle when it was
/// asked, or is near the load's end, and needs only the time of the copy.
const TAKE_OVER_RELEASED: Duration = Duration::from_millis(300);
/// Other loads hold up only their request, and may stand behind saves and long steps.
pub(super) const TAKE_OVER_WAITING: Duration = Duration::from_secs(5);
/// Bytes a second that any link brings.
const SLOW_LINK: f64 = 4e9;
/// One load.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) job: Job,
    pub(super) bytes: u64,
    /// What the engine's streams wait for, once it is released.
    pub(super) flags: Option<Flags>,
    pub(super) release: ReleaseAt,
    pub(super) asked: Instant,
    /// No other was with the daemon when it was asked.
    pub(super) alone: bool,
    pub(super) daemon: Daemon,
    pub(super) own: Own,
}

/// When the request of a load may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReleaseAt {
    /// The next `Tick` says when, as it knows the engine's last steps.
    Unknown,
    /// At that time, if the load is not over before.
    At(Instant),
    /// At its end.
    Never,
    /// It may already.
    Released,
}

#[derive(Debug)]
pub(super) enum Daemon {
    /// It may still write.
    Asked,
    /// The connection is over; it counts as gone when its process ends, its run greets us anew, or then.
    Leaving { boot: BootId, life: Life, until: Instant },
    /// It has brought everything.
    Done { blocks: u64, bytes: u64 },
    /// Refused, gone, or never asked.
    Out,
}

#[derive(Debug)]
pub(super) enum Own {
    /// Begun at that time if the daemon is silent.
    Due(Instant),
    /// Begun when it is its turn.
    Waiting,
    Copying(CopyId),
    /// The end of the job, for when the daemon has answered or is gone.
    Done(Finished),
    /// Tried while the daemon might still answer.
    Failed,
}

impl Loading {
    pub(super) fn boot(&self) -> BootId {
        match self.job.work {
            Work::Load { boot, .. } => boot,
            Work::Save(_) => [0; 16],
        }
    }

    pub(super) fn is_copying(&self) -> bool {
        matches!(self.own, Own::Copying(_))
    }

    /// What the engine asked for later may stand behind the flags of this load, which nobody has written yet.
    pub(super) fn holds_up_the_stream(&self) -> bool {
        let are_written = matches!(self.own, Own::Done(_));
        self.release == ReleaseAt::Released && self.flags.is_some() && !are_written
    }

    pub(super) fn needs(&self, process: ProcessId) -> bool {
        matches!(self.daemon, Daemon::Leaving { life, .. } if life.needs(process))
    }

    /// When `Tick` has something to do for it. One that is closed is only watched to its end.
    pub(super) fn wake_at(&self, is_closing: bool) -> Option<Instant> {
        let leaving = match self.daemon {
            Daemon::Leaving { until, .. } => Some(until),
            _ => None,
        };
        let due = match self.own {
            Own::Due(due) if !is_closing => Some(due),
            _ => None,
        };
        let release = match self.release {
            ReleaseAt::At(at) if !is_closing => Some(at),
            _ => None,
        };
        [leaving, due, release].into_iter().flatten().min()
    }

    /// When the request may compute, if the load is predicted to be near its end at `near`.
    pub(super) fn when(&self, near: Option<Instant>) -> ReleaseAt {
        let release = match self.job.work {
            Work::Load { release, .. } if self.flags.is_some() => release,
            _ => Release::AtEnd,
        };
        match (release, near) {
            (Release::AtOnce, _) => ReleaseAt::At(self.asked),
            (Release::WhenNear, Some(near)) => ReleaseAt::At(near),
            _ => ReleaseAt::Never,
        }
    }

    pub(super) fn release_if_due(&mut self, now: Instant, actions: &mut Actions) {
        if !matches!(self.release, ReleaseAt::At(at) if now >= at) {
            return;
        }
        // From now on it may hold up what the engine computes.
        self.own = Own::Due(now + patience(TAKE_OVER_RELEASED, self.bytes));
        let flags = self.flags.clone();
        self.release(flags, now, actions);
    }

    /// Tells the engine that it may compute.
    pub(super) fn release(&mut self, flags: Option<Flags>, now: Instant, actions: &mut Actions) {
        self.release = ReleaseAt::Released;
        let told = Finished { ok: true, kind: JobKind::Released, ..self.job.failed("", now) };
        actions.push_back(WorkerAction::Release { key: self.job.key, told, flags });
    }
}

/// How long a daemon may be silent about a load of so many bytes.
pub(super) fn patience(beside_the_copy: Duration, bytes: u64) -> Duration {
    beside_the_copy + Duration::from_secs_f64(bytes as f64 / SLOW_LINK)
}
