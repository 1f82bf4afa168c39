//! Lookup, Release and Heartbeat: the blocks that a scheduler may promise to its engine, and how long they stay.

use std::{
    io,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_block::{BlockHash, parse_hashes};
use kvlane_proto::{
    WIRE_OF_RECORDINGS,
    packed::pack_pages,
    v1::{self, reply::Body as Answer},
};
use kvlane_store::{
    FetchPlan, Finding, Hit, HitGroup, LeaseId, LookupGroup, Origin, OwnerId, PlannedRun, Store,
};
use kvlane_trace::TierBlocks;

use super::{
    awaited_save::{AwaitedSave, Wait},
    context::{Answered, Context, done},
    late::{Answering, LateLookup, LateLookups, LateNumber, wait_ms},
    recording::{record_lookup, recorded_group, state},
};
use crate::{
    awaited_saves::Signal,
    engines::OpenGroup,
    greeted::Greeted,
    refusal::Refusal,
    replies::Replies,
    sessions::Busy,
    shared::Shared,
    traces::{AnsweredLookup, is_sampled},
};

/// Most bytes of page numbers in one answer. The answer for a longer prefix has only its beginning.
const PAGES_BYTES_MAX: usize = 32 << 20;

/// Answers a lookup. The answer comes later if the engine waits, and a source has more of the prompt or another engine saves
/// more of it.
pub(crate) fn look_up(context: &mut Context<'_>, mut lookup: v1::Lookup) -> Result<Answered, Refusal> {
    let owner = context.owner()?;
    let awaited = lookup.hand_off.take().map(AwaitedSave::parse).transpose()?;
    if awaited.is_some() {
        // The engine does not compute while it waits for saves, and they are of no use without the blocks before them.
        lookup.tokens_per_s = 0;
    }
    let lookup = if lookup.may_wait {
        match look_up_later(context, owner, lookup, awaited) {
            Ok(Some(lookup)) => lookup,
            Ok(None) => return Ok(Answered::Later),
            Err(error) => return Ok(Answered::Broken(error)),
        }
    } else {
        lookup
    };
    let asker = Asker::of(context.greeted);
    look_up_now(context.shared, &asker, (owner, context.since), &lookup, Late::default()).map(Answered::from)
}

/// How long a session's thread waits for the sources' answer, before the engine is told that the lookup's comes later.
const FIND_PATIENCE: Duration = Duration::from_micros(200);

/// Starts a fetch if a source makes the hit longer, and a wait if another engine's saves do. Gives the lookup back if there
/// is nothing to wait for; else its answer comes later.
fn look_up_later(
    context: &mut Context<'_>,
    owner: OwnerId,
    lookup: v1::Lookup,
    awaited: Option<AwaitedSave>,
) -> io::Result<Option<v1::Lookup>> {
    let Context { shared, greeted, replies, id, call, since, .. } = context;
    let (shared, id, call, since) = (*shared, *id, *call, *since);
    if !shared.store.has_sources() && awaited.is_none() {
        return Ok(Some(lookup));
    }
    let engine_id = &greeted.info.engine_id;
    // Held until the sources were asked, because the lookup names spaces, which must not be forgotten.
    let Some((open, workers)) = shared.engines.ready(engine_id) else { return Ok(Some(lookup)) };
    let Ok(blocks) = requested_blocks(&open, workers, &lookup) else { return Ok(Some(lookup)) };
    let groups = lookup_groups(&blocks);
    let fetch = Fetch::begin(shared, &groups, &lookup, since);
    if fetch.is_none() && awaited.is_none() {
        return Ok(Some(lookup));
    }
    let Some(late) = late_lookups(shared, greeted, replies) else { return Ok(Some(lookup)) };
    let number = late.number();
    let save_wait = awaited.and_then(|awaited| {
        let signal = Signal::new(late.on_signal(number));
        Wait::begin(shared, awaited, owner, (&open, &groups, lookup.max_tokens), signal, since)
    });
    let waits = [fetch.as_ref().map(|_| shared.fetch_wait), save_wait.as_ref().map(Wait::first_wait)];
    let Some(longest) = waits.into_iter().flatten().max() else { return Ok(Some(lookup)) };
    let pending = v1::LookupPending { wait_ms: wait_ms(longest) };
    replies.send(id, Answer::LookupPending(pending), None)?;
    let fetch_until = fetch.as_ref().map(|_| since + shared.fetch_wait);
    let planned = match &fetch {
        Some(Fetch::Planned(plan)) => planned(shared, &open, plan),
        _ => Vec::new(),
    };
    let late_lookup = LateLookup {
        id,
        lookup,
        owner,
        call,
        since,
        fetch_until,
        planned,
        save_wait,
        is_save_wait_over: false,
        _busy: Busy::new(&shared.sessions),
    };
    late.push(number, late_lookup)?;
    if let Some(fetch) = fetch {
        fetch.go_on(&shared.store, since, since + shared.fetch_wait, late, number);
    }
    Ok(None)
}

/// A fetch that is planned, or whose plan a source has still to answer.
enum Fetch {
    Planned(FetchPlan),
    Asked(Finding),
}

impl Fetch {
    /// Asks the sources. None if none makes the hit longer before the engine would have computed as much.
    fn begin(
        shared: &Shared,
        groups: &[LookupGroup<'_>],
        lookup: &v1::Lookup,
        since: Instant,
    ) -> Option<Self> {
        if !shared.store.has_sources() {
            return None;
        }
        let deadline = since + shared.fetch_wait;
        match shared.store.find(groups, lookup.max_tokens).wait_until(since + FIND_PATIENCE) {
            Ok(plan) => shared
                .store
                .worth_fetching(plan?, lookup.tokens_per_s, Instant::now(), deadline)
                .map(Self::Planned),
            Err(finding) => Some(Self::Asked(finding)),
        }
    }

    /// Fetches what was found, for a lookup that waits.
    fn go_on(
        self,
        store: &Arc<Store>,
        now: Instant,
        deadline: Instant,
        late: &LateLookups,
        number: LateNumber,
    ) {
        match self {
            Self::Planned(plan) => store.fetch(plan, now, deadline, late.on_fetched(number)),
            Self::Asked(finding) => finding.then(late.on_found(number)),
        }
    }
}

/// The session's late lookups, whose thread starts with the first one. None, with a warning, if it does not start.
fn late_lookups<'a>(
    shared: &Arc<Shared>,
    greeted: &'a mut Greeted,
    replies: &Arc<Replies>,
) -> Option<&'a mut LateLookups> {
    if greeted.late.is_none() {
        let answering = LateAnswers {
            shared: Arc::clone(shared),
            replies: Arc::clone(replies),
            asker: Asker::of(greeted),
        };
        let started = LateLookups::start(answering);
        // Log: lookups of this engine are answered at once with what is in RAM. Do: raise the limit of threads
        // (ulimit -u, pids of the container).
        let warn = |error: &io::Error| tracing::warn!(%error, "cannot start thread kvlane-late for lookups that wait");
        greeted.late = started.inspect_err(warn).ok();
    }
    greeted.late.as_mut()
}

/// Answers over the lookup's own connection.
struct LateAnswers {
    shared: Arc<Shared>,
    replies: Arc<Replies>,
    asker: Asker,
}

impl Answering for LateAnswers {
    fn answer(&self, late: LateLookup) {
        let waits = Late { planned: &late.planned, has_awaited_save: late.save_wait.is_some() };
        let answer = look_up_now(&self.shared, &self.asker, (late.owner, late.since), &late.lookup, waits);
        let was_refused = answer.is_err();
        // If the peer does not take it, the session ends and releases the lease.
        if self.replies.send(late.id, answer.unwrap_or_else(Answer::from), None).is_ok() {
            self.shared.metrics.answered(late.call, late.since.elapsed(), was_refused);
        }
    }

    fn send_pending(&self, id: u64, wait_ms: u32) {
        // If the peer does not take it, the session ends.
        let _ = self.replies.send(id, Answer::LookupPending(v1::LookupPending { wait_ms }), None);
    }

    fn planned(&self, plan: &FetchPlan) -> Vec<Vec<PlannedRun>> {
        planned(&self.shared, &self.shared.engines.opened(&self.asker.engine_id), plan)
    }

    fn fetch(
        &self,
        plan: FetchPlan,
        tokens_per_s: u32,
        deadline: Instant,
        fetched: Box<dyn FnOnce() + Send>,
    ) {
        let (store, now) = (&self.shared.store, Instant::now());
        match store.worth_fetching(plan, tokens_per_s, now, deadline) {
            Some(plan) => store.fetch(plan, now, deadline, fetched),
            None => fetched(),
        }
    }
}

/// The engine that looks up.
struct Asker {
    engine_id: String,
    /// It reports the ends of its requests, if they are recorded.
    reports_ends: bool,
}

impl Asker {
    fn of(greeted: &Greeted) -> Self {
        Self { engine_id: greeted.info.engine_id.clone(), reports_ends: greeted.wire >= WIRE_OF_RECORDINGS }
    }
}

/// The blocks that a fetch brings, group by group.
fn planned(shared: &Shared, open: &[OpenGroup], plan: &FetchPlan) -> Vec<Vec<PlannedRun>> {
    open.iter().map(|group| shared.store.planned(plan, group.space)).collect()
}

/// The blocks of a group's hit by tier, of which a fetch has brought `planned`.
fn by_tier(hit: Range<u64>, planned: &[PlannedRun]) -> TierBlocks {
    let brought = |from: Origin| -> u64 {
        let runs = planned.iter().filter(|run| run.origin == from);
        let inside = |run: &PlannedRun| {
            let end = hit.end.min(run.first_block + run.blocks);
            end.saturating_sub(hit.start.max(run.first_block))
        };
        runs.map(inside).sum()
    };
    let (ssd, peers) = (brought(Origin::ThisHost), brought(Origin::OtherHost));
    TierBlocks { ram: (hit.end - hit.start).saturating_sub(ssd + peers), ssd, peers }
}

/// Releases leases of the session's engine.
pub(crate) fn release(context: &Context<'_>, release: &v1::Release) -> Result<Answer, Refusal> {
    let owner = context.owner()?;
    for lease in release.leases.iter().copied().map(LeaseId) {
        context.shared.store.release(owner, lease);
        context.shared.traces.iter().for_each(|traces| traces.released(lease));
    }
    Ok(done())
}

/// Renews the leases that the message names; the engine's others may expire.
pub(crate) fn heartbeat(context: &Context<'_>, heartbeat: &v1::Heartbeat) -> Result<Answer, Refusal> {
    let live: Vec<_> = heartbeat.live_leases.iter().copied().map(LeaseId).collect();
    context.shared.store.heartbeat(context.owner()?, &live, Instant::now());
    Ok(state(context.shared))
}

/// Causes of the wait for an answer that comes late.
#[derive(Clone, Copy, Default)]
struct Late<'a> {
    /// The blocks that the fetch brought, group by group.
    planned: &'a [Vec<PlannedRun>],
    has_awaited_save: bool,
}

/// Looks up what RAM has of a prompt.
fn look_up_now(
    shared: &Shared,
    asker: &Asker,
    (owner, since): (OwnerId, Instant),
    lookup: &v1::Lookup,
    late: Late<'_>,
) -> Result<Answer, Refusal> {
    shared
        .engines
        .with_ready(&asker.engine_id, |open, workers| {
            look_up_ready(shared, asker, (open, workers), (owner, since), lookup, late)
        })
        // Workers are missing, so nothing can be promised.
        .unwrap_or_else(|| {
            let is_recorded = shared.observer.is_recording();
            Ok(Answer::LookupResult(v1::LookupResult { is_recorded, ..Default::default() }))
        })
}

fn look_up_ready(
    shared: &Shared,
    asker: &Asker,
    (open, workers): (&[OpenGroup], u32),
    (owner, since): (OwnerId, Instant),
    lookup: &v1::Lookup,
    late: Late<'_>,
) -> Result<Answer, Refusal> {
    let Late { planned, .. } = late;
    let blocks = requested_blocks(open, workers, lookup)?;
    let groups = lookup_groups(&blocks);
    let is_recorded = shared.observer.is_recording();
    let hit = shared.store.lookup(owner, &groups, lookup.max_tokens, Instant::now());
    let tokens = hit.as_ref().map_or(0, |hit| hit.tokens);
    // The record of a lookup counts for the ceiling, too.
    let recorded = recorded_group(open)
        .filter(|(index, _)| is_recorded && !lookup.again && !groups[*index].hashes.is_empty());
    for (index, group) in groups.iter().enumerate() {
        let hit_blocks = tokens / u64::from(group.tokens_per_block.max(1));
        let searched = group.hashes_within(lookup.max_tokens);
        if recorded.is_none_or(|(recorded, _)| recorded != index) {
            shared.observer.count(shared.store.namespace(group.space), searched, hit_blocks);
        } else {
            let request = (lookup.request, asker.reports_ends, since);
            let tiers = by_tier(0..hit_blocks, planned.get(index).map(Vec::as_slice).unwrap_or_default());
            record_lookup(shared, &asker.engine_id, open, (group.hashes, searched.len()), request, tiers);
        }
    }
    if let Some(traces) = &shared.traces
        && is_sampled(&lookup.traceparent)
        && let Some((index, group)) = recorded_group(open)
    {
        let hit_blocks = tokens / u64::from(group.tokens_per_block.max(1));
        let bytes = |hit: &Hit| {
            let of_group =
                |group: &HitGroup| group.pages.len() as u64 / u64::from(workers.max(1)) * group.block_bytes;
            hit.groups.iter().map(of_group).sum()
        };
        traces.looked_up(
            &lookup.traceparent,
            &AnsweredLookup {
                since,
                engine: &asker.engine_id,
                model: &shared.store.space_label(group.space),
                hashes: groups[index].hashes,
                looked_up: groups[index].hashes_within(lookup.max_tokens).len(),
                hit: by_tier(0..hit_blocks, planned.get(index).map(Vec::as_slice).unwrap_or_default()),
                tokens,
                bytes: hit.as_ref().map_or(0, bytes),
                lease: hit.as_ref().map(|hit| hit.lease),
                has_fetched: planned.iter().any(|runs| !runs.is_empty()),
                has_awaited_save: late.has_awaited_save,
            },
        );
    }
    let Some(hit) = hit else {
        return Ok(Answer::LookupResult(v1::LookupResult { ready: true, is_recorded, ..Default::default() }));
    };
    for (index, group) in hit.groups.iter().enumerate() {
        let end = tokens / u64::from(groups[index].tokens_per_block.max(1));
        let planned = planned.get(index).map(Vec::as_slice).unwrap_or_default();
        shared.metrics.hit(by_tier(group.first_block..end, planned), group.block_bytes);
    }
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
    let (tokens, lease) = (hit.tokens, hit.lease.0);
    Ok(Answer::LookupResult(v1::LookupResult { tokens, lease, groups, ready: true, is_recorded }))
}

/// The blocks that a lookup names, group by group. A list whose answer would be too long is cut off.
fn requested_blocks(
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
            return Err(Refusal::invalid(format!("group {} was named at position {index}", group.group)));
        }
        let mut named = parse_hashes(&group.hashes).map_err(Refusal::invalid)?;
        named.truncate(PAGES_BYTES_MAX / (size_of::<u32>() * workers.max(1) as usize * open.len()));
        hashes.push((open[index], named));
    }
    Ok(hashes)
}

fn lookup_groups(blocks: &[(OpenGroup, Vec<BlockHash>)]) -> Vec<LookupGroup<'_>> {
    blocks
        .iter()
        .map(|(group, hashes)| LookupGroup {
            space: group.space,
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            hashes,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_the_hit_count_for_the_tier_that_brought_them() {
        let run = |first_block, blocks, origin| PlannedRun { first_block, blocks, origin };
        let planned = [run(2, 3, Origin::ThisHost), run(6, 4, Origin::OtherHost)];
        let tiers = |ram, ssd, peers| TierBlocks { ram, ssd, peers };
        assert_eq!(by_tier(0..10, &planned), tiers(3, 3, 4));
        assert_eq!(by_tier(0..7, &planned), tiers(3, 3, 1), "the rest came too late");
        assert_eq!(by_tier(0..3, &planned), tiers(2, 1, 0));
        assert_eq!(by_tier(0..1, &planned), tiers(1, 0, 0));
        assert_eq!(by_tier(0..4, &[]), tiers(4, 0, 0));
        assert_eq!(by_tier(4..8, &planned), tiers(1, 1, 2), "a window's");
    }
}
