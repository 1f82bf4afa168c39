//! A load that the daemon carries out: when its request may compute, and when this process steps in.

use std::time::{Duration, Instant};

use crate::{
    jobs::{Finished, Job, JobKind, Release, Work},
    links::{flags::Flags, pace::LoadPace},
    shared::Shared,
};

/// A released load holds up what the engine computes, so a silent daemon is not waited for long: it was idle when it was
/// asked, or is near the load's end, and needs only the time of the copy.
const TAKE_OVER_RELEASED: Duration = Duration::from_millis(300);
/// Other loads hold up only their request, and may stand behind saves and long steps.
const TAKE_OVER_WAITING: Duration = Duration::from_secs(5);
/// Bytes a second that any link brings.
const SLOW_LINK: f64 = 4e9;

/// A load that the daemon was asked for.
pub(crate) struct Loading {
    pub(crate) job: Job,
    /// What the engine's streams wait for, once it is released.
    pub(crate) flags: Option<Flags>,
    pub(crate) takeover: Takeover,
    /// When it is released, if it is to be and was not yet.
    pub(crate) release_at: Option<Instant>,
    /// The engine computes already, or may: everything is there.
    pub(crate) released: bool,
    bytes: u64,
    asked: Instant,
    /// No others were under way.
    alone: bool,
}

/// What becomes of a load whose daemon is silent. The daemon may still come to it, so its blocks are not free before the
/// daemon has answered or is gone; but the same bytes written twice do no harm, so this process writes them first.
pub(crate) enum Takeover {
    /// At that time.
    Due(Instant),
    /// It could not be carried out here: only the daemon is left.
    Failed,
    /// The engine has everything. This is the end of the job, for when the daemon has answered or is gone.
    Done(Finished),
}

impl Loading {
    /// Of a job that the daemon has just been asked for; `alone` tells that no other load is under way, `near` when it is
    /// predicted to be near its end. Releases it if it is time.
    pub(crate) fn asked(
        job: Job,
        flags: Option<Flags>,
        bytes: u64,
        now: Instant,
        alone: bool,
        near: Option<Instant>,
        shared: &Shared,
    ) -> Self {
        let release_at = match job.work {
            Work::Load { release: Release::WhenNear, .. } => near,
            Work::Load { release: Release::AtOnce, .. } => Some(now),
            _ => None,
        };
        let release_at = release_at.filter(|_| flags.is_some());
        let takeover = Takeover::Due(job.queued + patience(TAKE_OVER_WAITING, bytes));
        let mut load = Self { job, flags, takeover, release_at, released: false, bytes, asked: now, alone };
        load.release_if_due(now, shared);
        load
    }

    /// Tells the engine that it may compute, if it is time.
    pub(crate) fn release_if_due(&mut self, now: Instant, shared: &Shared) {
        let (Some(at), Some(flags)) = (self.release_at, &self.flags) else { return };
        if now < at {
            return;
        }
        self.release_at = None;
        self.released = true;
        // From now on it may hold up what the engine computes.
        self.takeover = Takeover::Due(now + patience(TAKE_OVER_RELEASED, self.bytes));
        let told = Finished { ok: true, kind: JobKind::Released, ..self.job.failed("", now) };
        shared.release(self.job.key, told, Some(flags.clone()));
    }

    /// The daemon has carried it out: what is learned of how long loads take.
    pub(crate) fn note_pace(&self, pace: &mut LoadPace, now: Instant) {
        if self.alone {
            pace.ended(self.bytes, now.saturating_duration_since(self.asked));
        }
    }
}

/// How long a daemon may be silent about a load of so many bytes.
fn patience(beside_the_copy: Duration, bytes: u64) -> Duration {
    beside_the_copy + Duration::from_secs_f64(bytes as f64 / SLOW_LINK)
}
