//! Carries saves from their request to their end.
//!
//! ```text
//!   by the daemon:   Save ----------------------------------------> SaveResult: the end
//!   by this process: Claim --> ClaimResult --> copy --> Commit ----> Done: the end
//!                      |                        |
//!                      +-- no answer in time ---+--> the fence is raised, then the end; a claim granted later is aborted
//! ```

use std::time::Instant;

use kvlane_memory::PoolPage;
use kvlane_proto::{
    packed::{Outcome, PackedError, Pages},
    v1,
    v1::reply::Body as Answer,
    v1::request::Body as Ask,
};

use super::{
    super::{group::BlockPages, ids::JobKey},
    event::{Actions, WorkerAction},
    failures::NotCopied,
    link::{WorkerLink, Write, end, end_save, warn},
    messages,
    up::{PendingRequest, SaveRequest},
};
use crate::jobs::{Copied, Finished, Job, SaveGroupSpec, SaveMethod, Work};

/// Most blocks of one save, so that their hashes and ids fit into a frame.
const SAVE_BLOCKS_MAX: usize = 2 << 20;

impl WorkerLink {
    pub(super) fn start_save(&mut self, job: Job, now: Instant, actions: &mut Actions) {
        let Work::Save(groups) = &job.work else { return };
        let blocks = groups.iter().map(|group| group.block_ids.len()).sum::<usize>();
        if blocks > SAVE_BLOCKS_MAX {
            let why = format!("{blocks} blocks in one save, at most {SAVE_BLOCKS_MAX} are possible");
            return end(&job, &why, now, actions);
        }
        let deadline = now + self.options.save_timeout;
        let epoch = self.epoch;
        let Some(up) = self.open().filter(|up| !up.silent) else {
            return end(&job, "no kvlane daemon", now, actions);
        };
        let (ask, pending) = if up.method == SaveMethod::Mapped {
            (messages::claim(groups, job.number), PendingRequest::Claim { job, deadline })
        } else {
            (messages::save(groups, epoch, job.event, job.number), PendingRequest::Save { job, deadline })
        };
        self.ask(ask, pending, actions);
    }

    /// Sends a request and waits for its answer.
    pub(super) fn ask(&mut self, ask: Ask, pending: PendingRequest, actions: &mut Actions) {
        let id = self.send(ask, actions);
        if let Some(up) = self.up() {
            up.pending.insert(id, pending);
        }
    }

    /// Handles the answer to a save, claim or commit.
    pub(super) fn save_answered(
        &mut self,
        pending: PendingRequest,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) {
        match (pending, answer) {
            (pending, Some(Answer::Refused(refused))) => end_save(pending, &refused.sentence, now, actions),
            (PendingRequest::Save { job, .. }, Some(Answer::SaveResult(result))) => {
                let detail = if result.failed > 0 { "the copy failed or was cancelled" } else { "" };
                let finished = Finished {
                    ok: result.failed == 0,
                    blocks: result.saved,
                    present: result.present + result.in_flight,
                    bytes: result.bytes,
                    ..job.failed(detail, now)
                };
                actions.push_back(WorkerAction::End { key: job.key, finished });
            }
            (PendingRequest::Claim { job, .. }, Some(Answer::ClaimResult(result))) => {
                self.write_claimed(job, &result, now, actions);
            }
            (PendingRequest::Commit { key, end, .. }, Some(Answer::Done(_))) => {
                actions.push_back(WorkerAction::End { key, finished: end });
            }
            (PendingRequest::GivenUp(_), Some(Answer::ClaimResult(result))) => {
                let commit = v1::Commit { claim: result.claim, written: false };
                self.ask(Ask::Commit(commit), PendingRequest::GivenUp(SaveRequest::Commit), actions);
            }
            _ => {}
        }
    }

    /// Has the driver copy the claimed blocks into the pool.
    fn write_claimed(&mut self, job: Job, result: &v1::ClaimResult, now: Instant, actions: &mut Actions) {
        let (Work::Save(groups), Some(connection)) = (&job.work, self.up().map(|up| up.id)) else { return };
        let claim = result.claim;
        match claimed_places(groups, result) {
            Ok((places, present)) => {
                let copy = self.next_copy();
                self.writes.insert(copy, Write { job, connection, claim, present });
                actions.push_back(WorkerAction::CopyOut { copy, places });
            }
            Err(why) => {
                let end = job.failed(why.to_string(), now);
                self.commit(claim, job.key, end, now, actions);
            }
        }
    }

    /// Handles the end of the copy into claimed blocks.
    pub(super) fn written(
        &mut self,
        write: Write,
        copied: Result<Copied, NotCopied>,
        now: Instant,
        actions: &mut Actions,
    ) {
        let Write { job, connection, claim, present } = write;
        if self.is_closing {
            return end(&job, "the worker is closed", now, actions);
        }
        if self.up_as(connection).is_none() {
            return end(&job, "the daemon went away", now, actions);
        }
        let end = match copied {
            Ok(Copied { blocks, bytes }) => {
                Finished { ok: true, blocks, present, bytes, ..job.failed("", now) }
            }
            Err(why) => job.failed(why.to_string(), now),
        };
        self.commit(claim, job.key, end, now, actions);
    }

    fn commit(&mut self, claim: u64, key: JobKey, end: Finished, now: Instant, actions: &mut Actions) {
        let deadline = now + self.options.save_timeout;
        let commit = v1::Commit { claim, written: end.ok };
        self.ask(Ask::Commit(commit), PendingRequest::Commit { key, end, deadline }, actions);
    }

    /// If a save is overdue, ends all pending saves, because they share an epoch. The fence is raised first: the daemon then
    /// discards what it still copies for them, so the engine may reuse the blocks.
    pub(super) fn give_up_overdue(&mut self, now: Instant, actions: &mut Actions) {
        let Some(up) = self.up() else { return };
        if !up.pending.values().filter_map(PendingRequest::deadline).any(|deadline| now >= deadline) {
            return;
        }
        up.silent = true;
        // Loads stay pending, because the daemon may still write into their blocks.
        let given_up: Vec<PendingRequest> =
            up.pending.values_mut().filter_map(PendingRequest::give_up).collect();
        self.raise_fence(actions);
        let count = given_up.len() as u64;
        for pending in given_up {
            end_save(pending, "the daemon did not answer in time", now, actions);
        }
        actions.push_back(WorkerAction::CountTimeouts(count));
        warn(format!("kvlane: the daemon does not answer; the worker gives up its saves ({count})"), actions);
    }
}

/// An answer to a claim that names no usable pages.
#[derive(Debug, thiserror::Error)]
enum BadClaim {
    #[error("the daemon answered for fewer blocks than asked")]
    Short,
    #[error("the daemon's answer to a claim cannot be read: {0}")]
    Packed(#[from] PackedError),
}

/// Claimed blocks with their pages, by group; and the number of blocks that the daemon has, or gets from another engine.
type Claimed = (Vec<(u32, BlockPages)>, u64);

fn claimed_places(groups: &[SaveGroupSpec], result: &v1::ClaimResult) -> Result<Claimed, BadClaim> {
    let pages = Pages::parse(&result.pages)?;
    let mut answers = result.outcome.iter().zip(pages.iter());
    let (mut by_group, mut present) = (Vec::new(), 0);
    for group in groups {
        let mut places = BlockPages::new();
        for &block_id in &group.block_ids {
            let (&outcome, page) = answers.next().ok_or(BadClaim::Short)?;
            match Outcome::try_from(outcome)? {
                Outcome::Claimed => places.push((block_id, PoolPage(page))),
                Outcome::Present | Outcome::InFlight => present += 1,
                Outcome::NoRoom => {}
            }
        }
        by_group.push((group.group, places));
    }
    Ok((by_group, present))
}
