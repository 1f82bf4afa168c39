//! Lookup, Release and Heartbeat: what a scheduler may count on, and for how long.

use std::{io, sync::Arc, time::Instant};

use kvlane_block::{BlockHash, parse_hashes};
use kvlane_proto::{
    packed::pack_pages,
    v1::{self, reply::Body as Answer},
};
use kvlane_store::{LeaseId, LookupGroup, OwnerId};

use super::{
    context::{Answered, Context, done},
    hand_off::{HandOff, Wait},
    late::{Answering, Late, LateLookups, wait_ms},
};
use crate::{
    engines::OpenGroup, greeted::Greeted, hand_offs::Signal, refusal::Refusal, replies::Replies,
    sessions::Busy, shared::Shared,
};

/// Bytes of pages in one answer; a longer prefix is answered in part.
const PAGES_BYTES_MAX: usize = 32 << 20;

/// At once, or later where the SSD has more of the prompt, or another engine saves more of it, and the engine waits for that.
pub(crate) fn look_up(context: &mut Context<'_>, mut lookup: v1::Lookup) -> Result<Answered, Refusal> {
    let owner = context.owner()?;
    let hand_off = lookup.hand_off.take().map(HandOff::parse).transpose()?;
    let lookup = if lookup.may_wait {
        match look_up_later(context, owner, lookup, hand_off) {
            Ok(Some(lookup)) => lookup,
            Ok(None) => return Ok(Answered::Later),
            Err(error) => return Ok(Answered::Broken(error)),
        }
    } else {
        lookup
    };
    look_up_now(context.shared, &context.greeted.info.engine_id, owner, &lookup).map(Answered::from)
}

/// Starts to bring what the tier has of the prompt, if its hit grows by it, and to wait for what another engine saves of it;
/// the answer comes later then. Gives the lookup back where there is nothing to wait for.
fn look_up_later(
    context: &mut Context<'_>,
    owner: OwnerId,
    lookup: v1::Lookup,
    hand_off: Option<HandOff>,
) -> io::Result<Option<v1::Lookup>> {
    let Context { shared, greeted, replies, id, call, since, .. } = context;
    let (shared, id, call, since) = (*shared, *id, *call, *since);
    if shared.ssd.is_none() && hand_off.is_none() {
        return Ok(Some(lookup));
    }
    let engine_id = &greeted.info.engine_id;
    // Held until the fetch has begun: the plan names spaces.
    let Some((open, workers)) = shared.engines.ready(engine_id) else { return Ok(Some(lookup)) };
    let Ok(asked) = asked_blocks(&open, workers, &lookup) else { return Ok(Some(lookup)) };
    let groups = lookup_groups(&asked);
    let fetch = shared.ssd.as_ref().and_then(|ssd| {
        let plan = shared.store.plan_fetch(&groups, lookup.max_tokens, since)?;
        Some((plan, ssd.wait))
    });
    if fetch.is_none() && hand_off.is_none() {
        return Ok(Some(lookup));
    }
    let Some(late) = late_lookups(shared, greeted, replies) else { return Ok(Some(lookup)) };
    let number = late.number();
    let hand_off = hand_off.and_then(|hand_off| {
        let signal = Signal::new(late.stirred(number));
        Wait::begin(shared, hand_off, owner, (&open, &groups, lookup.max_tokens), signal, since)
    });
    let waits = [fetch.as_ref().map(|(_, wait)| *wait), hand_off.as_ref().map(Wait::first)];
    let Some(longest) = waits.into_iter().flatten().max() else { return Ok(Some(lookup)) };
    let pending = v1::LookupPending { wait_ms: wait_ms(longest) };
    replies.send(id, Answer::LookupPending(pending), None)?;
    let fetch_until = fetch.as_ref().map(|(_, wait)| since + *wait);
    let late_lookup = Late {
        id,
        lookup,
        owner,
        call,
        since,
        fetch_until,
        hand_off,
        is_handed_over: false,
        _busy: Busy::new(&shared.sessions),
    };
    late.push(number, late_lookup)?;
    if let Some((plan, wait)) = fetch {
        shared.store.fetch(plan, since, since + wait, late.fetched(number));
    }
    Ok(None)
}

/// The session's lookups that wait; None where there is no thread for them, which is told.
fn late_lookups<'a>(
    shared: &Arc<Shared>,
    greeted: &'a mut Greeted,
    replies: &Arc<Replies>,
) -> Option<&'a mut LateLookups> {
    if greeted.late.is_none() {
        let answering = LateAnswers {
            shared: Arc::clone(shared),
            replies: Arc::clone(replies),
            engine_id: greeted.info.engine_id.clone(),
        };
        let started = LateLookups::start(answering);
        let tell = |error: &io::Error| tracing::warn!(%error, "no thread for lookups that wait");
        greeted.late = started.inspect_err(tell).ok();
    }
    greeted.late.as_mut()
}

/// Answers over the connection that asked.
struct LateAnswers {
    shared: Arc<Shared>,
    replies: Arc<Replies>,
    engine_id: String,
}

impl Answering for LateAnswers {
    fn answer(&self, late: Late) {
        let answer = look_up_now(&self.shared, &self.engine_id, late.owner, &late.lookup);
        let was_refused = answer.is_err();
        // Without a peer that takes it, the session ends and gives the lease back.
        if self.replies.send(late.id, answer.unwrap_or_else(Answer::from), None).is_ok() {
            self.shared.metrics.answered(late.call, late.since.elapsed(), was_refused);
        }
    }

    fn send_pending(&self, id: u64, wait_ms: u32) {
        // As above.
        let _ = self.replies.send(id, Answer::LookupPending(v1::LookupPending { wait_ms }), None);
    }
}

/// Gives leases back.
pub(crate) fn release(context: &Context<'_>, release: &v1::Release) -> Result<Answer, Refusal> {
    let owner = context.owner()?;
    release.leases.iter().for_each(|lease| context.shared.store.release(owner, LeaseId(*lease)));
    Ok(done())
}

/// Keeps the leases that are named.
pub(crate) fn heartbeat(context: &Context<'_>, heartbeat: &v1::Heartbeat) -> Result<Answer, Refusal> {
    let live: Vec<_> = heartbeat.live_leases.iter().copied().map(LeaseId).collect();
    context.shared.store.heartbeat(context.owner()?, &live, Instant::now());
    Ok(done())
}

/// What RAM has of a prompt.
fn look_up_now(
    shared: &Shared,
    engine_id: &str,
    owner: OwnerId,
    lookup: &v1::Lookup,
) -> Result<Answer, Refusal> {
    shared
        .engines
        .with_ready(engine_id, |open, workers| look_up_ready(shared, open, workers, owner, lookup))
        // Workers are missing: nothing can be promised.
        .unwrap_or_else(|| Ok(Answer::LookupResult(v1::LookupResult::default())))
}

fn look_up_ready(
    shared: &Shared,
    open: &[OpenGroup],
    workers: u32,
    owner: OwnerId,
    lookup: &v1::Lookup,
) -> Result<Answer, Refusal> {
    let asked = asked_blocks(open, workers, lookup)?;
    let groups = lookup_groups(&asked);
    for group in &groups {
        shared.ceilings.record(shared.store.namespace(group.space), group.hashes_within(lookup.max_tokens));
    }
    let Some(hit) = shared.store.lookup(owner, &groups, lookup.max_tokens, Instant::now()) else {
        return Ok(Answer::LookupResult(v1::LookupResult { ready: true, ..Default::default() }));
    };
    let groups = hit
        .groups
        .iter()
        .enumerate()
        .map(|(index, group)| v1::HitGroup {
            group: index as u32,
            first_block: group.first_block,
            pages: pack_pages(group.pages.iter().map(|page| page.0)),
            workers,
            stored_blocks: group.stored_blocks,
        })
        .collect();
    Ok(Answer::LookupResult(v1::LookupResult { tokens: hit.tokens, lease: hit.lease.0, groups, ready: true }))
}

/// The blocks that a lookup names, group by group.
fn asked_blocks(
    open: &[OpenGroup],
    workers: u32,
    lookup: &v1::Lookup,
) -> Result<Vec<(OpenGroup, Vec<BlockHash>)>, Refusal> {
    if lookup.groups.len() != open.len() {
        return Err(Refusal::invalid(format!(
            "{} groups were looked up, the engine has {}",
            lookup.groups.len(),
            open.len()
        )));
    }
    let mut hashes: Vec<(OpenGroup, Vec<BlockHash>)> = Vec::with_capacity(open.len());
    for (index, group) in lookup.groups.iter().enumerate() {
        if group.group as usize != index {
            return Err(Refusal::invalid(format!("group {} was named in place {index}", group.group)));
        }
        let mut named = parse_hashes(&group.hashes).map_err(Refusal::invalid)?;
        named.truncate(PAGES_BYTES_MAX / (size_of::<u32>() * workers.max(1) as usize * open.len()));
        hashes.push((open[index], named));
    }
    Ok(hashes)
}

fn lookup_groups(asked: &[(OpenGroup, Vec<BlockHash>)]) -> Vec<LookupGroup<'_>> {
    asked
        .iter()
        .map(|(group, hashes)| LookupGroup {
            space: group.space,
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            hashes,
        })
        .collect()
}
