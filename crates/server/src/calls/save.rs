//! Save, Claim, Commit and CancelSaves: how blocks of a worker become blocks of the pool.
//!
//! With Save the daemon copies them out of the worker's memory. A mapped worker copies by itself: Claim grants it pages, it
//! writes them, and Commit ends that. CancelSaves shuts out saves whose blocks vLLM is about to overwrite (save_gate.rs).

use std::time::{Duration, Instant};

use kvlane_block::parse_hashes;
use kvlane_engine_memory::{CopyCondition, Pace};
use kvlane_proto::v1::{self, reply::Body as Answer};
use kvlane_store::{ShardNumber, WriterId};

use super::{
    context::{Answered, Context, done, not_admitted},
    saver::{Granted, SaveRequestError, Saver},
};
use crate::{
    awaited_saves::End,
    engines::SessionId,
    greeted::{Greeted, Registered},
    refusal::Refusal,
    shared::Shared,
    traces::OpenSave,
};

/// Longest time that CancelSaves waits for saves that are being copied.
const CANCEL_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// Claims that a mapped worker may hold without committing them.
const CLAIMS_MAX: usize = 4096;

/// Saves blocks: of a worker on a GPU in its thread of saves, of another worker at once.
pub(crate) fn save(context: &mut Context<'_>, save: v1::Save) -> Result<Answered, Refusal> {
    let Greeted { id, info, worker, .. } = &*context.greeted;
    let worker = worker.as_ref().ok_or_else(|| not_admitted(context.call))?;
    if let Some(saves) = &worker.saves {
        saves.room().inspect_err(|_| {
            note_refused(context.shared, &info.engine_id, &worker.registered, &save.groups)
        })?;
        saves.push(context.shared, context.id, save, context.call, context.since);
        return Ok(Answered::Later);
    }
    copy_out(context.shared, *id, &info.engine_id, &worker.registered, &save, &Pace::URGENT)
        .map(Answered::from)
}

/// Grants pages of the pool, which a mapped worker writes by itself.
pub(crate) fn claim(context: &mut Context<'_>, claim: &v1::Claim) -> Result<Answer, Refusal> {
    let (call, Greeted { id, info, worker, .. }) = (context.call, &mut *context.greeted);
    let worker = worker.as_mut().ok_or_else(|| not_admitted(call))?;
    if worker.granted.len() >= CLAIMS_MAX {
        return Err(Refusal::limit(format!("{CLAIMS_MAX} claims are open: commit some")));
    }
    let (mut result, granted) = with_saver(
        context.shared,
        *id,
        &info.engine_id,
        &worker.registered,
        (claim.job, &claim.groups),
        |saver| Ok(saver.grant(&saver.parse(&claim.groups)?)),
    )?;
    worker.next_claim += 1;
    result.claim = worker.next_claim;
    let traced = traced(context.shared, &info.engine_id, &claim.groups, context.since);
    let granted = Granted { job: claim.job, claims: granted, traced };
    worker.granted.insert(worker.next_claim, granted);
    Ok(Answer::ClaimResult(result))
}

/// Ends a claim of a mapped worker: its pages are written, or given up.
pub(crate) fn commit(context: &mut Context<'_>, commit: &v1::Commit) -> Result<Answer, Refusal> {
    let (shared, call, Greeted { info, worker, .. }) = (context.shared, context.call, &mut *context.greeted);
    let worker = worker.as_mut().ok_or_else(|| not_admitted(call))?;
    let Granted { job, claims, traced } = worker
        .granted
        .remove(&commit.claim)
        .ok_or_else(|| Refusal::unknown(format!("claim {} is not open", commit.claim)))?;
    let gate = shared.engines.save_gate(&info.engine_id);
    let inside = gate.and_then(|gate| gate.enter(job));
    end_traced(shared, traced, commit.written && inside.is_some());
    if !commit.written {
        shared.store.abort(&claims, Instant::now());
    } else if inside.is_some() {
        shared.store.commit(&claims, Instant::now());
    } else {
        shared.store.abort(&claims, Instant::now());
        return Err(Refusal::cancelled());
    }
    Ok(done())
}

/// Shuts out all saves below a number, and waits for those that are being copied.
pub(crate) fn cancel(context: &Context<'_>, cancel: &v1::CancelSaves) -> Result<Answer, Refusal> {
    let timeout = Duration::from_millis(cancel.timeout_ms.into()).min(CANCEL_TIMEOUT_MAX);
    let engine_id = &context.greeted.info.engine_id;
    // All waits for this engine's saves end, because a wait does not know which of its blocks belong to cancelled saves. Some
    // would still come within milliseconds: complete blocks that wait for their checksums, and blocks that another engine is
    // saving. A reset of vLLM's cache is rare, and costs only the prompts that are being handed over at that moment.
    context.shared.awaited_saves.end_all_of(engine_id, End::Failed);
    let gate = context.shared.engines.save_gate(engine_id);
    let is_closed = gate.is_some_and(|gate| gate.close(cancel.below_job, Instant::now() + timeout));
    if is_closed {
        return Ok(done());
    }
    Err(Refusal::limit(format!("saves were still being copied after {} ms", timeout.as_millis())))
}

/// Copies blocks out of a worker's memory.
pub(crate) fn copy_out(
    shared: &Shared,
    id: SessionId,
    engine_id: &str,
    worker: &Registered,
    save: &v1::Save,
    pace: &Pace<'_>,
) -> Result<Answer, Refusal> {
    let memory = worker
        .memory
        .as_ref()
        .ok_or_else(|| Refusal::not_allowed("this worker saves by mapping: ask for claims"))?;
    let traced = traced(shared, engine_id, &save.groups, Instant::now());
    let result = with_saver(shared, id, engine_id, worker, (save.job, &save.groups), |saver| {
        let blocks = saver.parse(&save.groups)?;
        let condition = CopyCondition { epoch: save.epoch, event: save.event };
        Ok(saver.copy_out(&blocks, memory, condition, pace))
    });
    end_traced(shared, traced, result.as_ref().is_ok_and(|result| result.failed == 0));
    result.map(Answer::SaveResult)
}

/// The traced requests that these groups are saved for.
fn traced(shared: &Shared, engine: &str, groups: &[v1::SaveGroup], since: Instant) -> Vec<OpenSave> {
    let Some(traces) = &shared.traces else { return Vec::new() };
    let of_group =
        |group: &v1::SaveGroup| traces.save_begins(engine, &parse_hashes(&group.hashes).ok()?, since);
    groups.iter().filter_map(of_group).collect()
}

fn end_traced(shared: &Shared, saves: Vec<OpenSave>, is_written: bool) {
    for (traces, save) in shared.traces.iter().cycle().zip(saves) {
        traces.save_ended(save, is_written);
    }
}

/// Runs `save` inside the engine's gate. If the save is cancelled, lookups that await the blocks of `groups` are notified.
fn with_saver<T>(
    shared: &Shared,
    id: SessionId,
    engine_id: &str,
    worker: &Registered,
    (job, groups): (u64, &[v1::SaveGroup]),
    save: impl FnOnce(&Saver<'_>) -> Result<T, SaveRequestError>,
) -> Result<T, Refusal> {
    let gate = shared.engines.save_gate(engine_id);
    let Some(inside) = gate.and_then(|gate| gate.enter(job)) else {
        note_refused(shared, engine_id, worker, groups);
        return Err(Refusal::cancelled());
    };
    shared
        .engines
        .with_ready(engine_id, |open, _| {
            let saver = Saver {
                shared,
                owner: worker.owner,
                writer: WriterId(id),
                rank: worker.rank,
                regions: &worker.regions,
                open,
                inside: &inside,
            };
            save(&saver).map_err(Refusal::from)
        })
        .unwrap_or_else(|| {
            Err(Refusal::unknown(format!(
                "engine '{engine_id}' is not ready: its scheduler or other workers are missing"
            )))
        })
}

/// Notifies lookups that await the blocks of a save that was refused: it was cancelled, or one too many. Blocks that it
/// names wrongly are skipped, because no lookup awaits them.
fn note_refused(shared: &Shared, engine_id: &str, worker: &Registered, groups: &[v1::SaveGroup]) {
    shared.engines.with_ready(engine_id, |open, _| {
        for group in groups {
            if let (Some(of_engine), Ok(hashes)) =
                (open.get(group.group as usize), parse_hashes(&group.hashes))
            {
                shared.store.save_refused(
                    worker.owner,
                    of_engine.space,
                    ShardNumber(worker.rank.0),
                    &hashes,
                    Instant::now(),
                );
            }
        }
    });
}
