//! Carries loads to their end. A promised load must not fail, so two sides can copy it: the daemon, and this process from its
//! mapping of the pool, if the daemon cannot or is silent. Both write the same bytes, so writing twice does no harm. The later
//! copy may write a prompt's last token over the engine's: the same token, whose last bits may differ.
//!
//! ```text
//!   the daemon:    Pending --LoadResult--> Done                  the request resumes with the first copy that is done;
//!                    | lost                                      the job ends when neither side can write any more,
//!                  Leaving --its end, 10 s--> Out                because only then its blocks are free (`settle`)
//!                    refused, not requested --^
//!   this process:  Due --silence, loss, Out--> Waiting --its turn--> Copying --> Done, Failed
//! ```
//!
//! On a GPU a copy waits for the load's event. That event may stand behind flags, because the engine's stream waits for the
//! flags of loads that were released before. So this process copies loads one at a time in the order in which they were
//! queued, and writes the flags of one load before it begins the next. It also copies loads that hold up the stream although
//! the daemon may still write them, because a thread that waits for an event cannot see the daemon die.

use std::time::{Duration, Instant};

use kvlane_proto::{WIRE_OF_GROUPS_FLAGS, v1::reply::Body as Answer};

use super::{
    super::ids::{CopyId, JobKey, Life},
    event::{Actions, Card, WorkerAction},
    failures::NotCopied,
    link::{WorkerLink, end, warn},
    load::{DaemonCopy, Loading, OwnCopy, ReleaseAt, TAKE_OVER_WAITING, patience},
    messages,
    up::PendingRequest,
};
use crate::{
    boot::BootId,
    jobs::{Copied, Finished, Job, LoadGroup, Release, SaveMethod, Work},
};

/// How long after the end of a connection the blocks of its loads may still be written. A daemon that dies takes its GPU work
/// with it, but unpinning a large pool takes a while before its end is visible. A daemon that lives on has ended the session,
/// and has waited for its copies before that.
const PEERS_END: Duration = Duration::from_secs(10);

impl WorkerLink {
    pub(super) fn start_load(&mut self, job: Job, now: Instant, actions: &mut Actions) {
        let Work::Load { boot, groups, release } = &job.work else { return };
        let block_bytes =
            |group: u32| self.options.groups.get(group as usize).map_or(0, |memory| memory.block_bytes());
        let bytes = groups.iter().map(|group| group.block_ids.len() as u64 * block_bytes(group.group)).sum();
        let (key, release, epoch) = (job.key, *release, self.epoch);
        let due = OwnCopy::Due(job.queued + patience(TAKE_OVER_WAITING, bytes));
        let up = self.open().filter(|up| up.method == SaveMethod::Gpu && up.boot == *boot);
        let (is_served, wire) = (up.is_some(), up.map_or(0, |up| up.wire));
        if !is_served {
            let (daemon, release) = (DaemonCopy::Out, ReleaseAt::Never);
            let load = Loading {
                bytes,
                flags: None,
                release,
                requested_at: now,
                alone: false,
                daemon,
                own: due,
                job,
            };
            self.loads.insert(key, load);
            return self.settle(key, now, actions);
        }
        let flags = match (release, job.event, &mut self.options.card) {
            (Release::WhenNear | Release::AtOnce, Some(event), Some(Card { flags, .. }))
                if groups.len() == 1 || wire >= WIRE_OF_GROUPS_FLAGS =>
            {
                let memory = |group: &LoadGroup| {
                    self.options.groups.get(group.group as usize).map(|memory| (group.group, memory))
                };
                let memories: Option<Vec<_>> = groups.iter().map(memory).collect();
                memories.and_then(|memories| flags.next(event, &memories))
            }
            _ => None,
        };
        let blocks = groups.iter().map(|group| group.block_ids.len() as u64).sum();
        let ask = messages::load(groups, epoch, job.event, flags.as_ref(), release);
        let alone = !self.loads.values().any(|load| matches!(load.daemon, DaemonCopy::Pending));
        if alone {
            self.pace.reset();
        }
        let daemon = DaemonCopy::Pending;
        let load = Loading {
            bytes,
            flags,
            release: ReleaseAt::Unknown,
            requested_at: now,
            alone,
            daemon,
            own: due,
            job,
        };
        self.loads.insert(key, load);
        self.ask(ask, PendingRequest::Load { key, blocks }, actions);
        if release == Release::AtOnce {
            self.predict(key);
            self.loads.get_mut(&key).into_iter().for_each(|load| load.release_if_due(now, actions));
        }
    }

    /// Predicts when a load is near its end, if that is open.
    fn predict(&mut self, key: JobKey) {
        let ahead = self.step.shortest_step.map(|step| self.options.release_ahead.of(step));
        if let Some(load) = self.loads.get_mut(&key).filter(|load| load.release == ReleaseAt::Unknown) {
            let near = self.pace.schedule(load.requested_at, load.bytes, ahead);
            load.release = load.release_time(near);
        }
    }

    /// Handles the daemon's answer to a load.
    pub(super) fn load_answered(
        &mut self,
        key: JobKey,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) {
        // If the answer came before the next `Tick`, the engine still gets a release that is due before the end.
        self.predict(key);
        let Some(load) = self.loads.get_mut(&key) else { return };
        match answer {
            Some(Answer::LoadResult(result)) => {
                load.release_if_due(now, actions);
                if load.alone {
                    self.pace.record(load.bytes, now.saturating_duration_since(load.requested_at));
                }
                load.daemon = DaemonCopy::Done { blocks: result.blocks, bytes: result.bytes };
            }
            Some(Answer::Refused(_)) => load.daemon = DaemonCopy::Out,
            _ => return,
        }
        self.settle(key, now, actions);
    }

    /// Handles the end of this process's copy into the engine.
    pub(super) fn copied_in(
        &mut self,
        copy: CopyId,
        copied: Result<Copied, NotCopied>,
        now: Instant,
        actions: &mut Actions,
    ) {
        let of_copy =
            |(_, load): &(&JobKey, &mut Loading)| matches!(load.own, OwnCopy::Copying(of) if of == copy);
        let Some((&key, load)) = self.loads.iter_mut().find(of_copy) else { return };
        match (copied, &load.daemon) {
            (_, DaemonCopy::Done { .. }) => load.own = OwnCopy::Failed,
            (Ok(Copied { blocks, bytes }), _) => {
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                load.own = OwnCopy::Done(Finished { ok: true, blocks, bytes, ..load.job.failed("", now) });
                let has_daemon = !matches!(load.daemon, DaemonCopy::Out);
                if has_daemon && load.release != ReleaseAt::Released {
                    load.release(None, now, actions);
                }
            }
            (Err(why), DaemonCopy::Out) => {
                // Even after a failure, because a stream that waits for ever would stop the engine.
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                end(&load.job, &why.to_string(), now, actions);
                self.loads.remove(&key);
            }
            (Err(why), _) => {
                load.own = OwnCopy::Failed;
                let number = load.job.number;
                warn(
                    format!("kvlane: the worker could not copy a load itself (job {number}): {why}"),
                    actions,
                );
            }
        }
        self.settle(key, now, actions);
    }

    /// Ends a load if neither the daemon nor this process can write its blocks any more. If the daemon is out and this process
    /// has not copied, that copy begins: no other can complete the load.
    fn settle(&mut self, key: JobKey, now: Instant, actions: &mut Actions) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        match (&load.daemon, &load.own) {
            // The own copy writes the same bytes, but the blocks are not free before it ends.
            (DaemonCopy::Done { .. } | DaemonCopy::Out, OwnCopy::Copying(_)) => {}
            (DaemonCopy::Pending | DaemonCopy::Leaving { .. }, _) => {}
            (&DaemonCopy::Done { blocks, bytes }, _) => {
                let finished = Finished { ok: true, blocks, bytes, ..load.job.failed("", now) };
                actions.push_back(WorkerAction::End { key, finished });
                self.loads.remove(&key);
            }
            (DaemonCopy::Out, OwnCopy::Done(finished)) => {
                actions.push_back(WorkerAction::End { key, finished: finished.clone() });
                self.loads.remove(&key);
            }
            (DaemonCopy::Out, OwnCopy::Due(_) | OwnCopy::Waiting | OwnCopy::Failed) if self.is_closing => {
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                end(&load.job, "the worker is closed", now, actions);
                self.loads.remove(&key);
            }
            (DaemonCopy::Out, OwnCopy::Waiting) => {}
            (DaemonCopy::Out, OwnCopy::Due(_) | OwnCopy::Failed) => self.copy_in(key, actions),
        }
    }

    /// Queues a load for this process's copy.
    fn copy_in(&mut self, key: JobKey, actions: &mut Actions) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        load.own = OwnCopy::Waiting;
        if load.release != ReleaseAt::Released {
            load.release = ReleaseAt::Never;
        }
        self.begin_next_copy(actions);
    }

    /// Begins the next copy of this process, unless one is in flight.
    pub(super) fn begin_next_copy(&mut self, actions: &mut Actions) {
        let is_waiting = |load: &Loading| matches!(load.own, OwnCopy::Waiting);
        if self.is_closing || self.loads.values().any(Loading::is_copying) {
            return;
        }
        let Some(key) = self.loads.iter().find(|(_, load)| is_waiting(load)).map(|(key, _)| *key) else {
            return;
        };
        // Its event may stand behind the flags of an earlier load, which is then copied first.
        let before = self.loads.range(..key).find(|(_, load)| load.holds_up_the_stream());
        let key = match before {
            // This process could not copy the earlier load. Only the daemon's answer, or its end, frees the stream.
            Some((_, Loading { own: OwnCopy::Failed, .. })) => return,
            Some((&before, _)) => before,
            None => key,
        };
        let copy = self.next_copy();
        let Some(load) = self.loads.get_mut(&key) else { return };
        let Work::Load { boot, groups, .. } = &load.job.work else { return };
        load.own = OwnCopy::Copying(copy);
        let (boot, groups, event) = (*boot, groups.clone(), load.job.event);
        actions.push_back(WorkerAction::CopyIn { copy, boot, groups, event });
    }

    /// The connection is over: this process copies the loads that were pending at the daemon.
    pub(super) fn leave_loads(&mut self, boot: BootId, life: Life, now: Instant, actions: &mut Actions) {
        let pending = self.loads.iter().filter(|(_, load)| matches!(load.daemon, DaemonCopy::Pending));
        let pending: Vec<JobKey> = pending.map(|(key, _)| *key).collect();
        self.leave_daemon(boot, life, now);
        for key in pending {
            if self.loads.get(&key).is_some_and(|load| matches!(load.own, OwnCopy::Due(_))) {
                self.copy_in(key, actions);
            }
            self.settle(key, now, actions);
        }
    }

    /// Marks the copies of former daemons as out, if `is_out` says that the daemon cannot write any more.
    pub(super) fn retire_daemons(
        &mut self,
        now: Instant,
        actions: &mut Actions,
        is_out: impl Fn(&BootId, Life, Instant) -> bool,
    ) {
        let leaving = |load: &Loading| match &load.daemon {
            DaemonCopy::Leaving { boot, life, until } => is_out(boot, *life, *until),
            _ => false,
        };
        let out = self.loads.iter().filter(|(_, load)| leaving(load)).map(|(key, _)| *key);
        let out: Vec<JobKey> = out.collect();
        for key in out {
            if let Some(load) = self.loads.get_mut(&key) {
                load.daemon = DaemonCopy::Out;
            }
            self.settle(key, now, actions);
        }
    }

    /// Releases loads that are near their end, and takes over loads of a silent daemon.
    pub(super) fn tick_loads(&mut self, now: Instant, actions: &mut Actions) {
        if self.loads.is_empty() {
            return;
        }
        let new = self.loads.iter().filter(|(_, load)| load.release == ReleaseAt::Unknown);
        let new: Vec<JobKey> = new.map(|(key, _)| *key).collect();
        new.into_iter().for_each(|key| self.predict(key));
        if !self.is_closing {
            for load in self.loads.values_mut() {
                load.release_if_due(now, actions);
            }
            let due = |load: &Loading| matches!(load.own, OwnCopy::Due(due) if now >= due);
            let due: Vec<JobKey> =
                self.loads.iter().filter(|(_, load)| due(load)).map(|(key, _)| *key).collect();
            for key in due {
                let number = self.loads.get(&key).map_or(0, |load| load.job.number);
                warn(
                    format!(
                        "kvlane: the daemon has not ended a load in time; the worker copies it itself (job {number})"
                    ),
                    actions,
                );
                self.copy_in(key, actions);
            }
        }
        self.retire_daemons(now, actions, |_, _, until| now >= until);
    }

    /// The connection is over, or soon will be. Its daemon may still write pending loads until it ends.
    pub(super) fn leave_daemon(&mut self, boot: BootId, life: Life, now: Instant) {
        for load in self.loads.values_mut().filter(|load| matches!(load.daemon, DaemonCopy::Pending)) {
            load.daemon = match life {
                // A daemon whose end the kernel does not report has the same time.
                Life::Watched(_) | Life::Unknown => {
                    DaemonCopy::Leaving { boot, life, until: now + PEERS_END }
                }
                Life::Ended => DaemonCopy::Out,
            };
        }
    }

    /// The worker is closed: ends the loads that neither side can write any more. A run that has answered our goodbye writes
    /// none.
    pub(super) fn end_loads(&mut self, answered: Option<BootId>, now: Instant, actions: &mut Actions) {
        self.loads.retain(|_, load| {
            if matches!(load.daemon, DaemonCopy::Leaving { boot, .. } if answered == Some(boot)) {
                load.daemon = DaemonCopy::Out;
            }
            if load.is_copying() {
                return true;
            }
            // In any case, because a stream that waits for ever would stop the engine.
            actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
            let may_write = matches!(load.daemon, DaemonCopy::Leaving { .. });
            if !may_write {
                end(&load.job, "the worker is closed", now, actions);
            }
            may_write
        });
    }
}
