//! [`Learned`]: a policy that learns from past requests which blocks will be requested again, and evicts the others.
//!
//! ```text
//!  request --> class of each block (`classes`): its use count and gap, or the shape of its first request
//!     |              |
//!     |              '--> cohort (`cohorts`): leaves of one class that were last requested in one span of time
//!     v                                                                              |
//!  sample --> counts by class and age (`history`) --> hit densities (`density`) --> ranks of the cohorts (`ranks`)
//!                                                                                    |
//!                                                     victim: oldest slot of the least dense cohort
//! ```
//!
//! - A *leaf* is a slot that no block in the policy continues. Only leaves are in cohorts, because a block is never
//!   requested without the blocks before it.
//! - All slots of a cohort are taken to be equally dense, so a search for a victim compares some hundreds of cohorts, not
//!   blocks.
//! - A slot that a caller refuses to evict leaves its cohort, and enters again at the next ranking.
//! - Time is the number of references so far.

mod classes;
mod cohorts;
mod density;
mod history;
mod ranks;
#[cfg(test)]
mod tests;

use std::collections::BinaryHeap;

use self::classes::{Class, MAX_USES};
use self::cohorts::{Cohort, Cohorts};
use self::density::Densities;
use self::history::History;
use self::ranks::{Rank, Ranks};
use crate::key::spread;
use crate::kind::PolicyKind;
use crate::learning::{Learning, LearntClass};
use crate::memo::Memo;
use crate::replacement::{Blocks, ReplacementPolicy};

const NONE: u32 = u32::MAX;
/// References between two computations of the densities, or a quarter of the blocks if that is more. With four times as
/// many references, a scan cost up to 3 points of hit rate.
const LEARN_INTERVAL: u64 = 4096;
/// A new span of time begins after one reference for this many blocks, and after `MIN_SPAN` at least.
const SPANS: u64 = 16;
const MIN_SPAN: u64 = 64;
/// New blocks are admitted if they are this much denser than the blocks they would displace, because their density is
/// known less well.
const MARGIN: f64 = 1.25;
/// One in this many runs that are not dense enough is admitted all the same. So a class that was never counted, or was
/// counted wrongly, is not kept out for ever.
const EXPLORE_ONE_IN: u64 = 32;
/// Missed runs whose profile is remembered until they are stored.
const NOTES: usize = 512;

/// Evicts the block that will bring the fewest hits for the time that it is kept, judged by the past of similar blocks.
///
/// After Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018. A block's class
/// is how often it was requested and how long after the time before. If it was requested once, its class is how much of
/// its prompt was known and how much was new. For a sample of blocks, in the cache or not, the policy counts at which
/// age they were requested again. From the counts follows a hit density for each class and age. It is the largest, over
/// all horizons, of the chance of a request divided by the mean time in the cache. A run that is less dense than the
/// blocks it would displace is not admitted.
///
/// Age counts references, so nothing depends on a clock. Only blocks without a block that continues them are compared,
/// because no block is requested without those before it. Old counts decay. For the first 4,096 references, or a
/// quarter of the capacity if that is more, the policy is LRU.
pub struct Learned {
    /// References so far.
    now: u64,
    slots: Vec<Slot>,
    /// The number of slots that are in.
    len: usize,
    /// The leaves, except for those in `refused`.
    cohorts: Cohorts,
    /// The cohorts that may have slots.
    ranks: Ranks,
    /// Time of the last ranking.
    ranked_at: u64,
    /// Leaves that the caller refused to evict since the last ranking.
    refused: Vec<u32>,
    history: History,
    densities: Densities,
    /// When the densities are computed next.
    learn_at: u64,
    /// The densities were computed at least once.
    learnt: bool,
    /// Profiles of missed runs, by a part of the key. A new note replaces an old one.
    notes: Box<[Note]>,
    /// Buffers of `missed`: the run's keys, and the profile of each.
    run: Vec<u64>,
    profiles: Vec<Profile>,
    /// Hit density of the blocks that a tier below gives up.
    below: Option<f32>,
    /// Classes are random: the control of an experiment.
    random_classes: bool,
}

/// A slot as the policy knows it. Kept while a slot that is in continues it, even if the slot itself is not in.
#[derive(Clone, Copy)]
struct Slot {
    parent: u32,
    /// The number of slots that continue it.
    children: u32,
    /// The low 32 bits of the time of the last request.
    requested_at: u32,
    class: Class,
    uses: u8,
    is_in: bool,
    is_sampled: bool,
}

impl Slot {
    const OUT: Self = Self {
        parent: NONE,
        children: 0,
        requested_at: 0,
        class: Class::UNKNOWN,
        uses: 0,
        is_in: false,
        is_sampled: false,
    };
}

/// A block's class and use count at a request.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Profile {
    class: Class,
    uses: u8,
}

/// The profile of the blocks of a missed run, from the one with this key up to the next note. No note with 0 uses.
#[derive(Clone, Copy, Default)]
struct Note {
    key: u64,
    profile: Profile,
}

impl Learned {
    /// An empty policy for a cache of about `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            now: 0,
            slots: Vec::new(),
            len: 0,
            cohorts: Cohorts::new(),
            ranks: Ranks::new(),
            ranked_at: 0,
            refused: Vec::new(),
            history: History::new(capacity),
            densities: Densities::new(),
            learn_at: LEARN_INTERVAL.max(capacity as u64 / 4),
            learnt: false,
            notes: vec![Note::default(); NOTES].into_boxed_slice(),
            run: Vec::new(),
            profiles: Vec::new(),
            below: None,
            random_classes: false,
        }
    }

    /// Like [`new`](Self::new), but with random classes: a control that has nothing to learn from.
    pub fn with_random_classes(capacity: usize) -> Self {
        Self { random_classes: true, ..Self::new(capacity) }
    }

    /// Advances the time by `references`. Computes the densities, begins a span and ranks the cohorts when these are
    /// due.
    fn advance(&mut self, references: usize) {
        self.now += references as u64;
        let learns = self.now >= self.learn_at;
        if learns {
            self.learn_at = self.now + LEARN_INTERVAL.max(self.len as u64 / 4);
            self.history.learn(self.now, &mut self.densities);
            self.learnt = true;
        }
        let span_ends = self.now - self.cohorts.newest().start >= (self.len as u64 / SPANS).max(MIN_SPAN);
        if span_ends {
            self.cohorts.begin_span(self.now);
        }
        if learns || span_ends {
            self.rank_cohorts();
        }
    }

    /// Ranks all cohorts by the densities of now. Refused leaves enter again, because they may be evictable by now.
    fn rank_cohorts(&mut self) {
        self.ranked_at = self.now;
        self.ranks.clear();
        let (now, densities, ranks) = (self.now, &self.densities, &mut self.ranks);
        self.cohorts.visit_filled(|cohort, start| {
            ranks.add_last(cohort, Rank::of(densities.get(cohort.class(), now - start)));
        });
        for slot in std::mem::take(&mut self.refused) {
            self.add_leaf(slot, false);
        }
    }

    /// Adds a slot to its cohort if it is a leaf: at the new end, or at the old end as the cohort's next victim.
    fn add_leaf(&mut self, slot: u32, as_newest: bool) {
        let Slot { is_in, children, requested_at, class, .. } = self.slots[slot as usize];
        if !is_in || children > 0 || self.cohorts.contains(slot) {
            return;
        }
        let age = (self.now as u32).wrapping_sub(requested_at);
        let span = self.cohorts.span_at(self.now.saturating_sub(age.into()));
        let marked = self.cohorts.add(slot, span, class, as_newest);
        if let Some(cohort) = marked {
            let rank = Rank::of(self.densities.get(class, self.ranked_at.saturating_sub(span.start)));
            let order = self.cohorts.order(cohort);
            self.ranks.add(cohort, rank, |other| self.cohorts.order(other) > order);
        }
    }

    /// Detaches `slot` from its parent, which may become a leaf. `cohort` is the cohort that the slot was in, if that is
    /// known.
    fn detach_from_parent(&mut self, slot: u32, cohort: Option<Cohort>) {
        let Slot { class, requested_at, .. } = self.slots[slot as usize];
        let parent = std::mem::replace(&mut self.slots[slot as usize].parent, NONE);
        let Some(above) = self.slots.get_mut(parent as usize) else { return };
        above.children = above.children.saturating_sub(1);
        if above.children > 0 {
            return;
        }
        // Mostly the parent was requested together with the slot, and so belongs to the same cohort.
        let is_alike = above.is_in && above.class == class && above.requested_at == requested_at;
        match cohort.filter(|_| is_alike && !self.cohorts.contains(parent)) {
            Some(cohort) => self.cohorts.add_as_oldest(parent, cohort),
            None => self.add_leaf(parent, false),
        }
    }

    /// Removes `slot`; false if it was not in. `cohort` is the cohort that it was in, if that is known.
    fn take_out(&mut self, slot: u32, cohort: Option<Cohort>) -> bool {
        if !self.contains(slot) {
            return false;
        }
        self.cohorts.remove(slot);
        self.slots[slot as usize].is_in = false;
        self.len -= 1;
        self.detach_from_parent(slot, cohort);
        true
    }

    fn slot(&mut self, slot: u32) -> &mut Slot {
        if self.slots.len() <= slot as usize {
            self.slots.resize(slot as usize + 1, Slot::OUT);
        }
        &mut self.slots[slot as usize]
    }

    /// The class that the policy uses for a block: unknown before it has learnt, and random in a control.
    fn class(&self, class: Class, key: impl Fn() -> u64) -> Class {
        match (self.learnt, self.random_classes) {
            (false, _) => Class::UNKNOWN,
            (true, false) => class,
            (true, true) => Class::random(spread(key() ^ self.now)),
        }
    }

    fn note(&mut self, key: u64, profile: Profile) {
        self.notes[note_index(key)] = Note { key, profile };
    }

    fn noted_profile(&self, key: u64) -> Option<Profile> {
        let note = &self.notes[note_index(key)];
        (note.key == key && note.profile.uses > 0).then_some(note.profile)
    }

    /// Fills in the profile of each block of a missed run behind `cached` resident blocks. If the history tracks a
    /// block
    /// of the run, that block was requested before. So were all blocks before it, at least as often: they get its
    /// profile. The blocks behind the last one that is tracked are new.
    fn profile_run(&self, cached: usize, run: &[u64], profiles: &mut Vec<Profile>) {
        profiles.clear();
        profiles.resize(run.len(), Profile::default());
        let mut recognised = 0;
        let mut past = Profile::default();
        for (at, &key) in run.iter().enumerate().rev() {
            if self.history.samples(key)
                && let Some(found) = self.history.find(key, self.now)
            {
                let uses = (found.uses + 1).min(MAX_USES);
                past = Profile { class: Class::of_used(uses, found.age), uses };
                recognised = recognised.max(at + 1);
            }
            profiles[at] = past;
        }
        let class = Class::of_new(cached + recognised, run.len() - recognised);
        profiles[recognised..].fill(Profile { class, uses: 1 });
    }

    /// The profile of the first of `new` blocks behind `parent` if there is no note of it. A block behind a new one
    /// gets the same profile, because a prompt may be stored in several parts.
    fn default_profile(&self, parent: Option<u32>, new: usize) -> Profile {
        let above = parent.and_then(|parent| self.slots.get(parent as usize)).filter(|above| above.is_in);
        match above {
            Some(&Slot { class, uses: 1, .. }) => Profile { class, uses: 1 },
            _ => Profile { class: Class::of_new(usize::from(parent.is_some()), new), uses: 1 },
        }
    }

    /// The mean density of the next `victims` blocks to be evicted.
    fn displaced(&self, victims: usize, blocks: &dyn Blocks) -> f64 {
        let (mut sum, mut left) = (0.0, victims);
        for (rank, cohort) in self.ranks.iter() {
            for leaf in self.cohorts.slots(cohort) {
                if blocks.in_use(leaf) {
                    continue;
                }
                let gone = self.chain(leaf).take(left).count();
                sum += f64::from(rank.density()) * gone as f64;
                left -= gone;
                if left == 0 {
                    return sum / victims as f64;
                }
            }
        }
        sum / (victims - left).max(1) as f64
    }

    /// A leaf and the slots above it that would be evicted next. Each has the same class and the same time of request
    /// as the slot below it, and no other child.
    fn chain(&self, leaf: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(leaf), |&slot| {
            let below = &self.slots[slot as usize];
            let above = self.slots.get(below.parent as usize)?;
            let goes = above.is_in && above.children == 1;
            let alike = above.class == below.class && above.requested_at == below.requested_at;
            (goes && alike).then_some(below.parent)
        })
    }
}

fn note_index(key: u64) -> usize {
    (key >> 48) as usize % NOTES
}

impl ReplacementPolicy for Learned {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Learned
    }

    fn missed(&mut self, cached: usize, run: &mut dyn Iterator<Item = u64>) {
        let (mut keys, mut profiles) = (std::mem::take(&mut self.run), std::mem::take(&mut self.profiles));
        keys.clear();
        keys.extend(run);
        self.profile_run(cached, &keys, &mut profiles);
        let mut before = Profile::default();
        for (&key, &profile) in keys.iter().zip(&profiles) {
            if profile != before {
                self.note(key, profile);
                before = profile;
            }
            if self.history.samples(key) {
                let class =
                    if self.random_classes { Class::random(spread(key ^ self.now)) } else { profile.class };
                self.history.record(key, self.now, class, profile.uses);
            }
        }
        self.advance(keys.len());
        (self.run, self.profiles) = (keys, profiles);
    }

    fn has_gate(&self) -> bool {
        true
    }

    fn admit(&self, run: &[u64], parent: Option<u32>, victims: usize, blocks: &dyn Blocks) -> bool {
        if !self.learnt {
            return true;
        }
        let mut profile = self.default_profile(parent, run.len());
        let mut sum = 0.0;
        for &key in run {
            profile = self.noted_profile(key).unwrap_or(profile);
            let class = self.class(profile.class, || key);
            sum += f64::from(self.densities.get(class, 0));
        }
        let explores =
            || run.first().is_some_and(|&key| spread(key ^ self.now).is_multiple_of(EXPLORE_ONE_IN));
        let displaced = MARGIN * self.displaced(victims, blocks);
        // Also admit blocks that are dense enough for the tier below, because it gets them only through this cache.
        let least = self.below.map_or(displaced, |below| displaced.min(below.into()));
        sum / run.len().max(1) as f64 >= least || explores()
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks) {
        let mut profile = self.default_profile(parent, run.len());
        for &slot in run {
            let parent = blocks.parent(slot).unwrap_or(NONE);
            let key = blocks.key(slot);
            profile = self.noted_profile(key).unwrap_or(profile);
            let new = Slot {
                parent,
                children: self.slot(slot).children,
                requested_at: self.now as u32,
                class: self.class(profile.class, || key),
                uses: profile.uses,
                is_in: true,
                is_sampled: self.history.samples(key),
            };
            assert!(!self.contains(slot), "slot {slot} is in already");
            self.slots[slot as usize] = new;
            if parent != NONE {
                self.slot(parent).children += 1;
                self.cohorts.remove(parent);
            }
        }
        self.len += run.len();
        // Only the last slot of the run is a leaf and enters a cohort.
        run.iter().for_each(|&slot| self.add_leaf(slot, true));
    }

    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks) {
        // Go from the tail, so that it is evicted before the head even if a take-over left the parents unknown.
        for &slot in prefix.iter().rev() {
            let Some(&Slot { is_in: true, uses, requested_at, is_sampled, children, .. }) =
                self.slots.get(slot as usize)
            else {
                continue;
            };
            let uses = (uses + 1).min(MAX_USES);
            let known = Class::of_used(uses, (self.now as u32).wrapping_sub(requested_at));
            let class = self.class(known, || blocks.key(slot));
            if is_sampled {
                let key = blocks.key(slot);
                if self.history.samples(key) {
                    let class = if self.random_classes { class } else { known };
                    self.history.record(key, self.now, class, uses);
                }
            }
            let at = &mut self.slots[slot as usize];
            (at.class, at.uses, at.requested_at) = (class, uses, self.now as u32);
            if children == 0 && self.cohorts.remove(slot) {
                self.add_leaf(slot, true);
            }
        }
        self.advance(prefix.len());
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.take_out(slot, None)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let mut refusals = 0;
        let mut may_search_again = true;
        loop {
            let Some((_, cohort)) = self.ranks.first() else {
                self.rank_cohorts();
                if !std::mem::take(&mut may_search_again) {
                    return None;
                }
                continue;
            };
            let Some(slot) = self.cohorts.slots(cohort).next() else {
                self.ranks.remove_first();
                self.cohorts.unmark(cohort);
                continue;
            };
            if blocks.may_evict(slot) {
                self.take_out(slot, Some(cohort));
                return Some(slot);
            }
            self.cohorts.remove(slot);
            self.refused.push(slot);
            refusals += 1;
            if refusals > max_refusals {
                return None;
            }
        }
    }

    fn grow(&mut self, capacity: usize) {
        self.history.resize(capacity);
    }

    fn learning(&self) -> Option<&dyn Learning> {
        Some(self)
    }

    fn learning_mut(&mut self) -> Option<&mut dyn Learning> {
        Some(self)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn contains(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(|slot| slot.is_in)
    }

    fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.cohorts.heap_bytes()
            + self.ranks.heap_bytes()
            + self.refused.capacity() * size_of::<u32>()
            + self.history.heap_bytes()
            + self.densities.heap_bytes()
            + size_of_val(&*self.notes)
            + self.run.capacity() * size_of::<u64>()
            + self.profiles.capacity() * size_of::<Profile>()
    }

    /// Oldest request first, and each slot after all that continue it.
    fn slots(&self) -> Vec<u32> {
        let age = |slot: u32| (self.now as u32).wrapping_sub(self.slots[slot as usize].requested_at);
        let mut children: Vec<u32> = self.slots.iter().map(|slot| slot.children).collect();
        let all = (0..self.slots.len() as u32).filter(|&slot| self.contains(slot));
        let mut ready: BinaryHeap<(u32, u32)> =
            all.filter(|&slot| children[slot as usize] == 0).map(|slot| (age(slot), slot)).collect();
        let mut slots = Vec::with_capacity(self.len);
        while let Some((_, slot)) = ready.pop() {
            slots.push(slot);
            let parent = self.slots[slot as usize].parent;
            if let Some(children) = children.get_mut(parent as usize) {
                *children -= 1;
                if *children == 0 && self.contains(parent) {
                    ready.push((age(parent), parent));
                }
            }
        }
        slots
    }
}

impl Learning for Learned {
    fn begin_at(&mut self, references: u64) {
        if references == self.now {
            return;
        }
        self.learn_at += references - self.now;
        self.now = references;
        self.history.begin_at(references);
        self.cohorts.begin_span(references);
        self.ranked_at = references;
    }

    fn memo(&self, slot: u32) -> Option<Memo> {
        let Slot { class, uses, requested_at, .. } = *self.slots.get(slot as usize)?;
        Some(Memo::new(class.index() as u8, uses, requested_at))
    }

    fn remember(&mut self, slot: u32, memo: Memo) {
        if !self.contains(slot) || memo.uses() == 0 {
            return;
        }
        let at = &mut self.slots[slot as usize];
        (at.class, at.uses, at.requested_at) =
            (Class::from_memo(memo), memo.uses().min(MAX_USES), memo.requested_at());
        if self.cohorts.remove(slot) {
            self.add_leaf(slot, true);
        }
    }

    fn density(&self, memo: Memo) -> Option<f32> {
        let age = (self.now as u32).wrapping_sub(memo.requested_at());
        self.learnt.then(|| self.densities.get(Class::from_memo(memo), age.into()))
    }

    fn set_below(&mut self, density: Option<f32>) {
        self.below = density;
    }

    fn learnt(&self) -> Vec<LearntClass> {
        if !self.learnt {
            return Vec::new();
        }
        let of = |class: Class| LearntClass {
            blocks: class.name(),
            seen: self.history.seen(class),
            densities: self.densities.by_age(class).map(|(age, density)| (age, density.into())).collect(),
        };
        let mut learnt: Vec<LearntClass> = Class::all().map(of).filter(|class| class.seen > 0.0).collect();
        learnt.sort_by(|a, b| b.seen.total_cmp(&a.seen));
        learnt
    }
}
