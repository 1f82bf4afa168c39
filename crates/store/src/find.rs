//! Finds which blocks of a prompt the sources could bring, before a fetch.
//!
//! ```text
//!   find: ask each source for the blocks that the pool lacks --> Finding
//!     each answer, on any thread --> the last one: would they make the hit longer? --> FetchPlan, or none
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use kvlane_policy::{PrefixGroup, longest_hit};
use parking_lot::{Condvar, Mutex};

use crate::api::{Chain, LookupGroup, Origin, SpaceId};
use crate::done::Done;
use crate::fetches::Holder;
use crate::needs::needs;
use crate::shares::HolderSet;
use crate::source::{Found, Question};
use crate::store::Store;

/// Blocks that one hold of the lock looks up.
pub(crate) const BLOCKS_A_HOLD: usize = 4096;

/// Missing blocks of one prompt and space that follow each other.
pub(crate) struct Stretch {
    pub(crate) space: SpaceId,
    pub(crate) chain: Chain,
    /// Position in the prompt of its first block's first token.
    pub(crate) first_token: u64,
    pub(crate) tokens_per_block: u32,
    pub(crate) hashes: Vec<BlockHash>,
    /// The holders of each block.
    pub(crate) holders: Vec<HolderSet>,
}

/// The blocks that a fetch would bring. Void once a namespace was dropped.
pub struct FetchPlan {
    pub(crate) stretches: Vec<Stretch>,
    /// The holders that the stretches' sets name, each with its round trip.
    pub(crate) holders: Vec<(Holder, Duration)>,
    /// Tokens of the hit without the fetch, and with all of it.
    pub(crate) hit_tokens: Range<u64>,
    /// Whether each of its blocks makes the hit longer, if all blocks before it come too.
    pub(crate) is_prefix: bool,
    /// [`Store::drops`] when the question was asked.
    pub(crate) drops: u64,
    pub(crate) _spaces: NamedSpaces,
}

/// Blocks of a prompt that follow each other, and that a fetch would bring from one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRun {
    /// Index of the first block in the prompt.
    pub first_block: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// Where they come from. A block that this host has too comes from this host.
    pub origin: Origin,
}

/// The answer of [`Store::find`], which may come later.
pub struct Finding(Arc<Slot>);

/// Where the answer of the sources goes.
#[derive(Default)]
struct Slot {
    state: Mutex<SlotState>,
    answered: Condvar,
}

#[derive(Default)]
enum SlotState {
    #[default]
    Open,
    Answered(Option<FetchPlan>),
    /// The answer is handed over as soon as it comes.
    Awaited(Done<Option<FetchPlan>>),
    Taken,
}

impl Slot {
    fn answer(&self, plan: Option<FetchPlan>) {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, SlotState::Taken) {
            SlotState::Awaited(done) => {
                drop(state);
                done.call(plan);
            }
            SlotState::Open => {
                *state = SlotState::Answered(plan);
                self.answered.notify_all();
            }
            SlotState::Answered(_) | SlotState::Taken => unreachable!("answered twice"),
        }
    }
}

impl Finding {
    /// Waits for the answer until then. It is None if no source makes the hit longer.
    ///
    /// # Errors
    /// The finding itself: the answer has not come yet.
    pub fn wait_until(self, until: Instant) -> Result<Option<FetchPlan>, Finding> {
        let mut state = self.0.state.lock();
        while matches!(*state, SlotState::Open) {
            if self.0.answered.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        match std::mem::replace(&mut *state, SlotState::Taken) {
            SlotState::Answered(plan) => Ok(plan),
            other => {
                *state = other;
                drop(state);
                Err(self)
            }
        }
    }

    /// Hands the answer to `then` when it comes, on the thread that brings it; at once if it is there.
    pub fn then(self, then: impl FnOnce(Option<FetchPlan>) + Send + 'static) {
        let mut state = self.0.state.lock();
        if let SlotState::Answered(plan) = &mut *state {
            let plan = plan.take();
            *state = SlotState::Taken;
            drop(state);
            return then(plan);
        }
        *state = SlotState::Awaited(Done::new(then));
    }

    /// An answer that is there.
    fn answered(plan: Option<FetchPlan>) -> Finding {
        let slot = Slot { state: Mutex::new(SlotState::Answered(plan)), answered: Condvar::new() };
        Finding(Arc::new(slot))
    }
}

/// Keeps spaces from being forgotten.
pub(crate) struct NamedSpaces {
    store: Arc<Store>,
    spaces: Vec<SpaceId>,
}

impl NamedSpaces {
    fn new(store: &Arc<Store>, spaces: Vec<SpaceId>) -> Self {
        let mut named = store.fetches.named.lock();
        spaces.iter().for_each(|space| *named.entry(*space).or_default() += 1);
        Self { store: Arc::clone(store), spaces }
    }
}

impl Drop for NamedSpaces {
    fn drop(&mut self) {
        let mut named = self.store.fetches.named.lock();
        for space in &self.spaces {
            let count = named.get_mut(space).map(|count| {
                *count -= 1;
                *count
            });
            if count == Some(0) {
                named.remove(space);
            }
        }
    }
}

/// One group of a prompt whose blocks were asked for.
struct AskedGroup {
    space: SpaceId,
    need: PrefixGroup,
    hashes: Vec<BlockHash>,
    is_visible: Vec<bool>,
    /// The blocks that were asked for, by the position in the question.
    missing: Vec<u32>,
}

/// Questions that are under way.
struct Asked {
    groups: Vec<AskedGroup>,
    max_tokens: u64,
    in_pool: u64,
    drops: u64,
    answers: Mutex<Vec<Answer>>,
    answers_left: AtomicUsize,
    slot: Arc<Slot>,
    spaces: Mutex<Option<NamedSpaces>>,
}

struct Answer {
    group: usize,
    source: usize,
    found: Vec<Found>,
}

impl Store {
    /// Whether anything could bring blocks that the pool lacks.
    pub fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Asks the sources for the blocks of a prompt that the pool lacks. The answer is a plan for [`fetch`](Self::fetch), or
    /// None if they would not make the hit longer. A holder that is late with another read is left out, because waiting
    /// for it would take longer than computing.
    pub fn find(self: &Arc<Self>, groups: &[LookupGroup<'_>], max_tokens: u64) -> Finding {
        let Some(asked) = self.questions(groups, max_tokens) else { return Finding::answered(None) };
        let finding = Finding(Arc::clone(&asked.slot));
        for (group, of_group) in asked.groups.iter().enumerate() {
            if of_group.missing.is_empty() {
                continue;
            }
            let (mut question, crosses_hosts) = self.question(of_group);
            let asked_ones = || {
                let all = self.sources.iter().enumerate();
                all.filter(|(_, each)| crosses_hosts || !each.brings_copies())
            };
            // With two sources one may have what the other lacks.
            question.only_prefix &= asked_ones().count() == 1;
            for (source, each) in asked_ones() {
                let (store, asked) = (Arc::clone(self), Arc::clone(&asked));
                asked.answers_left.fetch_add(1, Ordering::Relaxed);
                let done = Done::new(move |found| {
                    asked.answers.lock().push(Answer { group, source, found });
                    store.answer_came(&asked);
                });
                each.find(question.clone(), done);
            }
        }
        self.answer_came(&asked);
        finding
    }

    /// The blocks of one space that a plan would bring.
    pub fn planned(&self, plan: &FetchPlan, space: SpaceId) -> Vec<PlannedRun> {
        let mut runs: Vec<PlannedRun> = Vec::new();
        for stretch in plan.stretches.iter().filter(|stretch| stretch.space == space) {
            let first = stretch.first_token / u64::from(stretch.tokens_per_block);
            for (block, holders) in (first..).zip(&stretch.holders) {
                let is_here =
                    holders.iter().any(|holder| self.origin(plan.holders[holder].0) == Origin::ThisHost);
                let origin = if is_here { Origin::ThisHost } else { Origin::OtherHost };
                match runs.last_mut() {
                    Some(run) if run.origin == origin && run.first_block + run.blocks == block => {
                        run.blocks += 1
                    }
                    _ => runs.push(PlannedRun { first_block: block, blocks: 1, origin }),
                }
            }
        }
        runs
    }

    /// The blocks to ask for. None if the pool lacks nothing, or there is no source.
    fn questions(self: &Arc<Self>, groups: &[LookupGroup<'_>], max_tokens: u64) -> Option<Arc<Asked>> {
        if self.sources.is_empty() {
            return None;
        }
        let needs = needs(groups, max_tokens)?;
        let drops = *self.drops.read();
        let mut asked_groups = Vec::with_capacity(groups.len());
        for (group, need) in groups.iter().zip(&needs) {
            let hashes = &group.hashes[..need.blocks as usize];
            let mut is_visible = Vec::with_capacity(hashes.len());
            for part in hashes.chunks(BLOCKS_A_HOLD) {
                let index = self.index.lock();
                is_visible.extend(part.iter().map(|hash| index.is_visible(group.space, hash)));
            }
            let missing = (0..).zip(&is_visible).filter(|(_, is_visible)| !**is_visible);
            asked_groups.push(AskedGroup {
                space: group.space,
                need: *need,
                hashes: hashes.to_vec(),
                missing: missing.map(|(position, _)| position).collect(),
                is_visible,
            });
        }
        if asked_groups.iter().all(|group| group.missing.is_empty()) {
            return None;
        }
        let in_pool =
            longest_hit(&needs, max_tokens, |group, block| asked_groups[group].is_visible[block as usize]);
        let spaces = asked_groups.iter().map(|group| group.space).collect();
        Some(Arc::new(Asked {
            groups: asked_groups,
            max_tokens,
            in_pool,
            drops,
            answers: Mutex::default(),
            answers_left: AtomicUsize::new(1),
            slot: Arc::default(),
            spaces: Mutex::new(Some(NamedSpaces::new(self, spaces))),
        }))
    }

    /// The question about a group, and whether other hosts are asked too.
    fn question(&self, group: &AskedGroup) -> (Question, bool) {
        let index = self.index.lock();
        let question = Question {
            space: index.space_name(group.space),
            shard_bytes: index.shard_bytes(group.space).into(),
            hashes: group.missing.iter().map(|position| group.hashes[*position as usize]).collect(),
            only_prefix: group.need.window_blocks == 0,
        };
        (question, index.spaces[group.space].crosses_hosts)
    }

    /// An answer came, or all were asked. The last call plans.
    fn answer_came(&self, asked: &Asked) {
        if asked.answers_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            asked.slot.answer(self.plan(asked, Instant::now()));
        }
    }

    /// The plan that the answers allow.
    fn plan(&self, asked: &Asked, now: Instant) -> Option<FetchPlan> {
        let spaces = asked.spaces.lock().take()?;
        let answers = std::mem::take(&mut *asked.answers.lock());
        let mut known: HashMap<Holder, Option<usize>> = HashMap::new();
        let mut holders: Vec<(Holder, Duration)> = Vec::new();
        let mut have: Vec<Vec<HolderSet>> =
            asked.groups.iter().map(|group| vec![HolderSet::default(); group.hashes.len()]).collect();
        let queues = self.fetches.queues.lock();
        for Answer { group, source, found } in answers {
            let missing = &asked.groups[group].missing;
            for Found { holder, positions, round_trip } in found {
                let holder = Holder { source, id: holder };
                let number = *known.entry(holder).or_insert_with(|| {
                    let is_usable = holders.len() < HolderSet::CAPACITY
                        && queues.state(holder, round_trip, now).is_some();
                    is_usable.then(|| {
                        holders.push((holder, round_trip));
                        holders.len() - 1
                    })
                });
                let Some(number) = number else { continue };
                for run in positions {
                    let end = (run.end as usize).min(missing.len());
                    let blocks = missing.get(run.start as usize..end).unwrap_or_default();
                    blocks.iter().for_each(|block| have[group][*block as usize].insert(number));
                }
            }
        }
        drop(queues);
        let needs: Vec<PrefixGroup> = asked.groups.iter().map(|group| group.need).collect();
        let tokens = longest_hit(&needs, asked.max_tokens, |group, block| {
            asked.groups[group].is_visible[block as usize] || !have[group][block as usize].is_empty()
        });
        if tokens <= asked.in_pool {
            return None;
        }
        let mut stretches = Vec::new();
        for (group, have) in asked.groups.iter().zip(&have) {
            group.add_stretches(tokens, have, &mut stretches);
        }
        (!stretches.is_empty()).then_some(FetchPlan {
            stretches,
            holders,
            hit_tokens: asked.in_pool..tokens,
            is_prefix: matches!(&*needs, [only] if only.window_blocks == 0),
            drops: asked.drops,
            _spaces: spaces,
        })
    }
}

impl AskedGroup {
    /// The blocks of a hit of `tokens` that are not visible.
    fn add_stretches(&self, tokens: u64, have: &[HolderSet], stretches: &mut Vec<Stretch>) {
        let mut at = self.need.first_block(tokens) as usize;
        let end = (tokens / u64::from(self.need.tokens_per_block)) as usize;
        while at < end {
            let there = self.is_visible[at..end].iter().take_while(|is_visible| **is_visible).count();
            let start = at + there;
            let missing = self.is_visible[start..end].iter().take_while(|is_visible| !**is_visible).count();
            at = start + missing;
            let chain = match (self.need.window_blocks, start.checked_sub(1)) {
                (0, None) => Chain::Start,
                (0, Some(before)) => Chain::After(self.hashes[before]),
                _ => Chain::Unchained,
            };
            if missing > 0 {
                stretches.push(Stretch {
                    space: self.space,
                    chain,
                    first_token: start as u64 * u64::from(self.need.tokens_per_block),
                    tokens_per_block: self.need.tokens_per_block,
                    hashes: self.hashes[start..at].to_vec(),
                    holders: have[start..at].to_vec(),
                });
            }
        }
    }
}
