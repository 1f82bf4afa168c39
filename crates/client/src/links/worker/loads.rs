//! Loads. Once a load was promised it can only succeed, so it has two hands: the daemon, and this process, which copies
//! from its mapping of the pool when the daemon cannot, or is silent. The same bytes written twice do no harm.
//!
//! ```text
//!   the daemon:    Asked ----LoadResult----> Done                the request goes on with whoever is first;
//!                    | lost                                      the job ends when both rest, since only then
//!                  Leaving --its end, 10 s--> Out                are its blocks free (`settle`)
//!                    refused, never asked --^
//!   this process:  Due --silence, loss, Out--> Waiting --its turn--> Copying --> Done, Failed
//! ```
//!
//! On a GPU a copy waits for the load's event, and the event may stand behind flags: the engine's stream waits for those of
//! loads that were released before. So this process copies one load after the other, in the order in which they were
//! queued, and writes the flags of one before it begins the next. Those that hold up the stream are copied too, although
//! the daemon may still write them: a thread that waits for an event cannot see the daemon die.

use std::time::{Duration, Instant};

use kvlane_proto::v1::reply::Body as Answer;

use super::{
    super::ids::{CopyId, JobKey, Life},
    event::{Actions, Card, WorkerAction},
    failures::NotCopied,
    link::{WorkerLink, end, warn},
    load::{Daemon, Loading, Own, ReleaseAt, TAKE_OVER_WAITING, patience},
    messages,
    up::Asked,
};
use crate::{
    boot::BootId,
    jobs::{Copied, Finished, Job, Release, SaveMethod, Work},
};

/// How long a daemon whose connection ended is watched for its end, before the blocks of its loads count as free. Its GPU
/// work ends with it, and unpinning a large pool takes a while; one that lives on has ended the session, and waited for
/// its copies before.
const PEERS_END: Duration = Duration::from_secs(10);

impl WorkerLink {
    pub(super) fn start_load(&mut self, job: Job, now: Instant, actions: &mut Actions) {
        let Work::Load { boot, groups, release } = &job.work else { return };
        let block_bytes =
            |group: u32| self.options.groups.get(group as usize).map_or(0, |memory| memory.block_bytes());
        let bytes = groups.iter().map(|group| group.block_ids.len() as u64 * block_bytes(group.group)).sum();
        let (key, release, epoch) = (job.key, *release, self.epoch);
        let due = Own::Due(job.queued + patience(TAKE_OVER_WAITING, bytes));
        let is_served = self.open().is_some_and(|up| up.method == SaveMethod::Gpu && up.boot == *boot);
        if !is_served {
            let (daemon, release) = (Daemon::Out, ReleaseAt::Never);
            let load =
                Loading { bytes, flags: None, release, asked: now, alone: false, daemon, own: due, job };
            self.loads.insert(key, load);
            return self.settle(key, now, actions);
        }
        // Flags for a load of one group; several groups are loaded as a whole.
        let flags = match (release, &groups[..], job.event, &mut self.options.card) {
            (Release::WhenNear | Release::AtOnce, [group], Some(event), Some(Card { flags, .. })) => {
                let memory = self.options.groups.get(group.group as usize);
                memory.and_then(|memory| flags.next(event, memory))
            }
            _ => None,
        };
        let blocks = groups.iter().map(|group| group.block_ids.len() as u64).sum();
        let ask = messages::load(groups, epoch, job.event, flags.as_ref(), release);
        let alone = !self.loads.values().any(|load| matches!(load.daemon, Daemon::Asked));
        if alone {
            self.pace.is_idle();
        }
        let daemon = Daemon::Asked;
        let load =
            Loading { bytes, flags, release: ReleaseAt::Unknown, asked: now, alone, daemon, own: due, job };
        self.loads.insert(key, load);
        self.ask(ask, Asked::Load { key, blocks }, actions);
        if release == Release::AtOnce {
            self.predict(key);
            self.loads.get_mut(&key).into_iter().for_each(|load| load.release_if_due(now, actions));
        }
    }

    /// When a load is near its end, as far as the engine's last steps are known.
    fn predict(&mut self, key: JobKey) {
        let step = self.step.shortest_step;
        if let Some(load) = self.loads.get_mut(&key).filter(|load| load.release == ReleaseAt::Unknown) {
            let near = self.pace.asked(load.asked, load.bytes, step);
            load.release = load.when(near);
        }
    }

    /// The daemon's answer.
    pub(super) fn load_answered(
        &mut self,
        key: JobKey,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) {
        // An answer that came before the next `Tick`: who was to hear of the release hears of it first.
        self.predict(key);
        let Some(load) = self.loads.get_mut(&key) else { return };
        match answer {
            Some(Answer::LoadResult(result)) => {
                load.release_if_due(now, actions);
                if load.alone {
                    self.pace.ended(load.bytes, now.saturating_duration_since(load.asked));
                }
                load.daemon = Daemon::Done { blocks: result.blocks, bytes: result.bytes };
            }
            Some(Answer::Refused(_)) => load.daemon = Daemon::Out,
            _ => return,
        }
        self.settle(key, now, actions);
    }

    /// A copy of this process into the engine is over.
    pub(super) fn copied_in(
        &mut self,
        copy: CopyId,
        copied: Result<Copied, NotCopied>,
        now: Instant,
        actions: &mut Actions,
    ) {
        let of_copy =
            |(_, load): &(&JobKey, &mut Loading)| matches!(load.own, Own::Copying(of) if of == copy);
        let Some((&key, load)) = self.loads.iter_mut().find(of_copy) else { return };
        match (copied, &load.daemon) {
            (_, Daemon::Done { .. }) => load.own = Own::Failed,
            (Ok(Copied { blocks, bytes }), _) => {
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                load.own = Own::Done(Finished { ok: true, blocks, bytes, ..load.job.failed("", now) });
                let has_daemon = !matches!(load.daemon, Daemon::Out);
                if has_daemon && load.release != ReleaseAt::Released {
                    load.release(None, now, actions);
                }
            }
            (Err(why), Daemon::Out) => {
                // Whatever came of it: a stream that waits for ever would stop the engine.
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                end(&load.job, &why.to_string(), now, actions);
                self.loads.remove(&key);
            }
            (Err(why), _) => {
                load.own = Own::Failed;
                let number = load.job.number;
                warn(
                    format!("kvlane: the worker could not carry out a load itself (job {number}): {why}"),
                    actions,
                );
            }
        }
        self.settle(key, now, actions);
    }

    /// Ends a load whose hands both rest, or begins the copy that is the last hope of it.
    fn settle(&mut self, key: JobKey, now: Instant, actions: &mut Actions) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        match (&load.daemon, &load.own) {
            // The copy writes the same bytes, but the blocks are not free before it ends.
            (Daemon::Done { .. } | Daemon::Out, Own::Copying(_)) => {}
            (Daemon::Asked | Daemon::Leaving { .. }, _) => {}
            (&Daemon::Done { blocks, bytes }, _) => {
                let told = Finished { ok: true, blocks, bytes, ..load.job.failed("", now) };
                actions.push_back(WorkerAction::End { key, told });
                self.loads.remove(&key);
            }
            (Daemon::Out, Own::Done(told)) => {
                actions.push_back(WorkerAction::End { key, told: told.clone() });
                self.loads.remove(&key);
            }
            (Daemon::Out, Own::Due(_) | Own::Waiting | Own::Failed) if self.is_closing => {
                actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
                end(&load.job, "the worker is closed", now, actions);
                self.loads.remove(&key);
            }
            (Daemon::Out, Own::Waiting) => {}
            (Daemon::Out, Own::Due(_) | Own::Failed) => self.copy_in(key, actions),
        }
    }

    /// Carries a load out in this process, when it is its turn.
    fn copy_in(&mut self, key: JobKey, actions: &mut Actions) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        load.own = Own::Waiting;
        if load.release != ReleaseAt::Released {
            load.release = ReleaseAt::Never;
        }
        self.begin_next_copy(actions);
    }

    /// Begins the copy whose turn it is, unless one is under way.
    pub(super) fn begin_next_copy(&mut self, actions: &mut Actions) {
        let is_waiting = |load: &Loading| matches!(load.own, Own::Waiting);
        if self.is_closing || self.loads.values().any(Loading::is_copying) {
            return;
        }
        let Some(key) = self.loads.iter().find(|(_, load)| is_waiting(load)).map(|(key, _)| *key) else {
            return;
        };
        // Its event may stand behind the flags of these.
        let before = self.loads.range(..key).find(|(_, load)| load.holds_up_the_stream());
        let key = match before {
            // Its own copy failed: the daemon's answer, or its end, lets the stream go on.
            Some((_, Loading { own: Own::Failed, .. })) => return,
            Some((&before, _)) => before,
            None => key,
        };
        let copy = self.next_copy();
        let Some(load) = self.loads.get_mut(&key) else { return };
        let Work::Load { boot, groups, .. } = &load.job.work else { return };
        load.own = Own::Copying(copy);
        let (boot, groups, event) = (*boot, groups.clone(), load.job.event);
        actions.push_back(WorkerAction::CopyIn { copy, boot, groups, event });
    }

    /// The connection is over: the engine gets from this process what the daemon was asked for.
    pub(super) fn leave_loads(&mut self, boot: BootId, life: Life, now: Instant, actions: &mut Actions) {
        let asked = self.loads.iter().filter(|(_, load)| matches!(load.daemon, Daemon::Asked));
        let asked: Vec<JobKey> = asked.map(|(key, _)| *key).collect();
        self.stop_asking(boot, life, now);
        for key in asked {
            if self.loads.get(&key).is_some_and(|load| matches!(load.own, Own::Due(_))) {
                self.copy_in(key, actions);
            }
            self.settle(key, now, actions);
        }
    }

    /// Daemons that were left and cannot write any more.
    pub(super) fn daemons_are_out(
        &mut self,
        now: Instant,
        actions: &mut Actions,
        is_out: impl Fn(&BootId, Life, Instant) -> bool,
    ) {
        let leaving = |load: &Loading| match &load.daemon {
            Daemon::Leaving { boot, life, until } => is_out(boot, *life, *until),
            _ => false,
        };
        let out = self.loads.iter().filter(|(_, load)| leaving(load)).map(|(key, _)| *key);
        let out: Vec<JobKey> = out.collect();
        for key in out {
            if let Some(load) = self.loads.get_mut(&key) {
                load.daemon = Daemon::Out;
            }
            self.settle(key, now, actions);
        }
    }

    /// Releases the loads that are near their end, and carries out those of a silent daemon.
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
            let due = |load: &Loading| matches!(load.own, Own::Due(due) if now >= due);
            let due: Vec<JobKey> =
                self.loads.iter().filter(|(_, load)| due(load)).map(|(key, _)| *key).collect();
            for key in due {
                let number = self.loads.get(&key).map_or(0, |load| load.job.number);
                warn(
                    format!(
                        "kvlane: the daemon does not answer; the worker carries out its load itself (job {number})"
                    ),
                    actions,
                );
                self.copy_in(key, actions);
            }
        }
        self.daemons_are_out(now, actions, |_, _, until| now >= until);
    }

    /// The connection is over, or soon will be: what its daemon was asked for it may bring still, as long as it is there.
    pub(super) fn stop_asking(&mut self, boot: BootId, life: Life, now: Instant) {
        for load in self.loads.values_mut().filter(|load| matches!(load.daemon, Daemon::Asked)) {
            load.daemon = match life {
                // Where the kernel does not tell of its end, it may write as long.
                Life::Watched(_) | Life::Unknown => Daemon::Leaving { boot, life, until: now + PEERS_END },
                Life::Ended => Daemon::Out,
            };
        }
    }

    /// The worker is closed: ends the loads that nobody writes any more. A run that has answered our goodbye does not.
    pub(super) fn end_loads(&mut self, answered: Option<BootId>, now: Instant, actions: &mut Actions) {
        self.loads.retain(|_, load| {
            if matches!(load.daemon, Daemon::Leaving { boot, .. } if answered == Some(boot)) {
                load.daemon = Daemon::Out;
            }
            if load.is_copying() {
                return true;
            }
            // Whatever comes of it: a stream that waits for ever would stop the engine.
            actions.extend(load.flags.clone().map(WorkerAction::WriteFlags));
            let may_write = matches!(load.daemon, Daemon::Leaving { .. });
            if !may_write {
                end(&load.job, "the worker is closed", now, actions);
            }
            may_write
        });
    }
}
