//! Saves, from asking to the end.
//!
//! ```text
//!   by the daemon:   Save ----------------------------------------> SaveResult: the end
//!   by this process: Claim --> ClaimResult --> copy --> Commit ----> Done: the end
//!                      |                        |
//!                      +-- no answer in time ---+--> the fence is raised, then the end; a later grant is handed back
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
    up::{Asked, OfSave},
};
use crate::jobs::{Copied, Finished, Job, SaveGroupSpec, SaveMethod, Work};

/// Blocks of one save; their hashes and ids have to fit into a frame.
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
        let (ask, asked) = if up.method == SaveMethod::Mapped {
            (messages::claim(groups, job.number), Asked::Claim { job, deadline })
        } else {
            (messages::save(groups, epoch, job.event, job.number), Asked::Save { job, deadline })
        };
        self.ask(ask, asked, actions);
    }

    /// Sends a request whose answer is awaited.
    pub(super) fn ask(&mut self, ask: Ask, asked: Asked, actions: &mut Actions) {
        let id = self.send(ask, actions);
        if let Some(up) = self.up() {
            up.asked.insert(id, asked);
        }
    }

    /// The answer to a save, claim or commit.
    pub(super) fn save_answered(
        &mut self,
        asked: Asked,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) {
        match (asked, answer) {
            (asked, Some(Answer::Refused(refused))) => end_save(asked, &refused.sentence, now, actions),
            (Asked::Save { job, .. }, Some(Answer::SaveResult(result))) => {
                let detail = if result.failed > 0 { "the copy failed or was cancelled" } else { "" };
                let told = Finished {
                    ok: result.failed == 0,
                    blocks: result.saved,
                    present: result.present + result.in_flight,
                    bytes: result.bytes,
                    ..job.failed(detail, now)
                };
                actions.push_back(WorkerAction::End { key: job.key, told });
            }
            (Asked::Claim { job, .. }, Some(Answer::ClaimResult(result))) => {
                self.write_claimed(job, &result, now, actions);
            }
            (Asked::Commit { key, end, .. }, Some(Answer::Done(_))) => {
                actions.push_back(WorkerAction::End { key, told: end });
            }
            (Asked::GivenUp(_), Some(Answer::ClaimResult(result))) => {
                let commit = v1::Commit { claim: result.claim, written: false };
                self.ask(Ask::Commit(commit), Asked::GivenUp(OfSave::Commit), actions);
            }
            _ => {}
        }
    }

    /// Writes the blocks that were claimed for us.
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

    /// Claimed blocks were written, or could not be.
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
        self.ask(Ask::Commit(commit), Asked::Commit { key, end, deadline }, actions);
    }

    /// Ends saves whose answer does not come. The fence is raised first: whatever the daemon still copies on
    /// their behalf is discarded, so the engine may reuse the blocks. Of one epoch all end together.
    pub(super) fn give_up_overdue(&mut self, now: Instant, actions: &mut Actions) {
        let Some(up) = self.up() else { return };
        if !up.asked.values().filter_map(Asked::deadline).any(|deadline| now >= deadline) {
            return;
        }
        up.silent = true;
        // Not loads: the daemon may still be about to write.
        let given_up: Vec<Asked> = up.asked.values_mut().filter_map(Asked::give_up).collect();
        self.raise_fence(actions);
        let count = given_up.len() as u64;
        for asked in given_up {
            end_save(asked, "the daemon did not answer in time", now, actions);
        }
        actions.push_back(WorkerAction::CountTimeouts(count));
        warn(format!("kvlane: the daemon does not answer; the worker gives up its saves ({count})"), actions);
    }
}

/// The answer to a claim that cannot be written by.
#[derive(Debug, thiserror::Error)]
enum BadClaim {
    #[error("the daemon answered for fewer blocks than asked")]
    Short,
    #[error("the daemon's answer to a claim cannot be read: {0}")]
    Packed(#[from] PackedError),
}

/// Where claimed blocks are to be written, by group, and how many the daemon has or gets from another.
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
