//! One load: the state of its two copies, the daemon's and this process's, and when its request may compute.

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

/// How long a daemon may be silent about a released load, which holds up the engine's stream. The daemon was idle when the load
/// was requested, or is near the load's end, so it needs only the time of the copy.
const TAKE_OVER_RELEASED: Duration = Duration::from_millis(300);
/// The same for other loads. They hold up only their own request, and may be queued behind saves and long steps.
pub(super) const TAKE_OVER_WAITING: Duration = Duration::from_secs(5);
/// Bytes a second that even a slow link copies.
const SLOW_LINK: f64 = 4e9;

#[derive(Debug)]
pub(super) struct Loading {
    pub(super) job: Job,
    pub(super) bytes: u64,
    /// The engine's streams wait for them once the load is released.
    pub(super) flags: Option<Flags>,
    pub(super) release: ReleaseAt,
    pub(super) requested_at: Instant,
    /// No other load was pending at the daemon when this one was requested.
    pub(super) alone: bool,
    pub(super) daemon: DaemonCopy,
    pub(super) own: OwnCopy,
}

/// When the request of a load may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReleaseAt {
    /// The next `Tick` decides, because it knows the engine's last steps.
    Unknown,
    /// At this time, or at the end of the load if that comes first.
    At(Instant),
    /// At the end of the load.
    Never,
    /// The request was released.
    Released,
}

/// The daemon's copy into the engine.
#[derive(Debug)]
pub(super) enum DaemonCopy {
    /// Requested; the daemon may write.
    Pending,
    /// The connection is over, and the daemon may still write: until its process ends, its run greets us again, or `until`.
    Leaving { boot: BootId, life: Life, until: Instant },
    /// The daemon has copied every byte.
    Done { blocks: u64, bytes: u64 },
    /// The daemon does not write: it refused, is gone, or got no request.
    Out,
}

/// This process's copy from its mapping of the pool.
#[derive(Debug)]
pub(super) enum OwnCopy {
    /// Begins at this time if the daemon is silent.
    Due(Instant),
    /// Begins when it is its turn.
    Waiting,
    Copying(CopyId),
    /// Every byte is copied. The job ends with this once the daemon's copy is over, too.
    Done(Finished),
    /// Failed while the daemon might still answer.
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
        matches!(self.own, OwnCopy::Copying(_))
    }

    /// Whether the engine's stream may wait for flags of this load that are not written. Events of later jobs stand behind them.
    pub(super) fn holds_up_the_stream(&self) -> bool {
        let are_written = matches!(self.own, OwnCopy::Done(_));
        self.release == ReleaseAt::Released && self.flags.is_some() && !are_written
    }

    pub(super) fn needs(&self, process: ProcessId) -> bool {
        matches!(self.daemon, DaemonCopy::Leaving { life, .. } if life.needs(process))
    }

    /// When the load needs a `Tick`. After the worker is closed, only the end of a daemon's copy matters.
    pub(super) fn wake_at(&self, is_closing: bool) -> Option<Instant> {
        let leaving = match self.daemon {
            DaemonCopy::Leaving { until, .. } => Some(until),
            _ => None,
        };
        let due = match self.own {
            OwnCopy::Due(due) if !is_closing => Some(due),
            _ => None,
        };
        let release = match self.release {
            ReleaseAt::At(at) if !is_closing => Some(at),
            _ => None,
        };
        [leaving, due, release].into_iter().flatten().min()
    }

    /// When the request may compute; `near` is when the load is predicted to be near its end.
    pub(super) fn release_time(&self, near: Option<Instant>) -> ReleaseAt {
        let release = match self.job.work {
            Work::Load { release, .. } if self.flags.is_some() => release,
            _ => Release::AtEnd,
        };
        match (release, near) {
            (Release::AtOnce, _) => ReleaseAt::At(self.requested_at),
            (Release::WhenNear, Some(near)) => ReleaseAt::At(near),
            _ => ReleaseAt::Never,
        }
    }

    pub(super) fn release_if_due(&mut self, now: Instant, actions: &mut Actions) {
        if !matches!(self.release, ReleaseAt::At(at) if now >= at) {
            return;
        }
        // From now on the load may hold up the engine's stream.
        self.own = OwnCopy::Due(now + patience(TAKE_OVER_RELEASED, self.bytes));
        let flags = self.flags.clone();
        self.release(flags, now, actions);
    }

    /// Releases the load: the engine may compute its request.
    pub(super) fn release(&mut self, flags: Option<Flags>, now: Instant, actions: &mut Actions) {
        self.release = ReleaseAt::Released;
        let finished = Finished { ok: true, kind: JobKind::Released, ..self.job.failed("", now) };
        actions.push_back(WorkerAction::Release { key: self.job.key, finished, flags });
    }
}

/// How long a daemon may be silent about a load of this size: the time of the copy on a slow link, and `beside_the_copy`.
pub(super) fn patience(beside_the_copy: Duration, bytes: u64) -> Duration {
    beside_the_copy + Duration::from_secs_f64(bytes as f64 / SLOW_LINK)
}
