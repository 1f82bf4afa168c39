mod classes;
mod density;
mod history;
mod ranks;
mod rings;
#[cfg(test)]
mod tests;

use std::collections::BinaryHeap;

use self::classes::{Class, MAX_USES};
use self::density::Densities;
use self::history::History;
use self::ranks::{Rank, Ranks};
use self::rings::{Ring, Rings};
use crate::key::spread;
use crate::kind::PolicyKind;
use crate::learning::{Learning, LearntClass};
use crate::memo::Memo;
use crate::replacement::{Blocks, ReplacementPolicy};

const NONE: u32 = u32::MAX;
/// References after which densities are learnt, for the first time and again; as many as a quarter of the blocks, if that is
/// more. With four times as many a scan cost up to 3 points.
const LEARN: u64 = 4096;
/// A span of time is as many references as one in so many of the blocks, and at least so many.
const SPANS: u64 = 16;
const MIN_SPAN: u64 = 64;
/// New blocks come in if they are so much denser than what they would displace: their density is known less well.
const MARGIN: f64 = 1.25;
/// One run in so many that are less dense comes in all the same: what was never counted, or counted wrongly, is not kept out for
/// ever.
const CHANCE: u64 = 32;
/// Runs of missed blocks that are remembered until they are stored.
const NOTES: usize = 512;

/// The block goes that will bring the fewest hits for the time that it is kept, by what became of blocks like it.
///
/// After Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018. Each block is in a
/// class: how often it was asked for and how long after the time before, or, if once, how much of its prompt was known and
/// how much was new. Of a sample of blocks, in the cache or not, it is counted at which age they were asked for again. From
/// that follows for each class and age the hit density: the largest, over all horizons, of the chance to be asked for through
/// the mean time in the cache. A run whose blocks are less dense than what they would displace does not come in.
///
/// Age is counted in references, so nothing depends on a clock. Only blocks that nothing continues are looked at: what
/// continues a block is never asked for without it. What was counted is halved by and by. For the first 4,096 references, or as
/// many as a quarter of the capacity, it is LRU.
pub struct Learned {
    /// References so far.
    now: u64,
    slots: Vec<Slot>,
    len: usize,
    /// Of the slots that nothing continues, those that were not refused.
    rings: Rings,
    /// The rings that have slots.
    ranks: Ranks,
    /// References when the rings were ranked.
    ranked_at: u64,
    /// Slots that could not be evicted since then.
    refused: Vec<u32>,
    history: History,
    densities: Densities,
    /// When densities are learnt next.
    learn_at: u64,
    learnt: bool,
    notes: Box<[Note]>,
    /// The run that was missed, and what it is known as: kept for their memory.
    run: Vec<u64>,
    known_as: Vec<Known>,
    /// How dense is what a tier below gives up.
    below: Option<f32>,
    /// Classes are dealt by chance.
    dealt: bool,
}

/// What the policy knows of a slot. It stays for as long as something continues the slot, even if the slot is not in.
#[derive(Clone, Copy)]
struct Slot {
    parent: u32,
    /// Slots that continue it.
    children: u32,
    /// The last 32 bits of the time.
    asked_at: u32,
    class: Class,
    uses: u8,
    is_in: bool,
    is_sampled: bool,
}

impl Slot {
    const OUT: Self = Self {
        parent: NONE,
        children: 0,
        asked_at: 0,
        class: Class::UNKNOWN,
        uses: 0,
        is_in: false,
        is_sampled: false,
    };
}

/// What a block is known as when it is asked for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Known {
    class: Class,
    uses: u8,
}

/// The blocks of a missed run from this one on are known as this.
#[derive(Clone, Copy, Default)]
struct Note {
    key: u64,
    known: Known,
}

impl Learned {
    /// An empty one for a cache of about `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            now: 0,
            slots: Vec::new(),
            len: 0,
            rings: Rings::new(),
            ranks: Ranks::new(),
            ranked_at: 0,
            refused: Vec::new(),
            history: History::new(capacity),
            densities: Densities::new(),
            learn_at: LEARN.max(capacity as u64 / 4),
            learnt: false,
            notes: vec![Note::default(); NOTES].into_boxed_slice(),
            run: Vec::new(),
            known_as: Vec::new(),
            below: None,
            dealt: false,
        }
    }

    /// The same with classes that are dealt by chance: a control, which has nothing to learn from.
    pub fn with_dealt_classes(capacity: usize) -> Self {
        Self { dealt: true, ..Self::new(capacity) }
    }

    /// So many references went by.
    fn pass(&mut self, references: usize) {
        self.now += references as u64;
        let learns = self.now >= self.learn_at;
        if learns {
            self.learn_at = self.now + LEARN.max(self.len as u64 / 4);
            self.history.learn(self.now, &mut self.densities);
            self.learnt = true;
        }
        let span_ends = self.now - self.rings.newest().start >= (self.len as u64 / SPANS).max(MIN_SPAN);
        if span_ends {
            self.rings.begin_span(self.now);
        }
        if learns || span_ends {
            self.rank();
        }
    }

    /// Ranks all rings by what is known now. What was refused may have become free.
    fn rank(&mut self) {
        self.ranked_at = self.now;
        self.ranks.clear();
        let (now, densities, ranks) = (self.now, &self.densities, &mut self.ranks);
        self.rings.filled(|ring, start| {
            ranks.add_last(ring, Rank::of(densities.get(ring.class(), now - start)));
        });
        for slot in std::mem::take(&mut self.refused) {
            self.enter(slot, false);
        }
    }

    /// Puts a slot into its ring if nothing continues it: as the newest one, or as the next to go.
    fn enter(&mut self, slot: u32, as_newest: bool) {
        let Slot { is_in, children, asked_at, class, .. } = self.slots[slot as usize];
        if !is_in || children > 0 || self.rings.contains(slot) {
            return;
        }
        let age = (self.now as u32).wrapping_sub(asked_at);
        let span = self.rings.span_at(self.now.saturating_sub(age.into()));
        let marked = self.rings.add(slot, span, class, as_newest);
        if let Some(ring) = marked {
            let rank = Rank::of(self.densities.get(class, self.ranked_at.saturating_sub(span.start)));
            let order = self.rings.order(ring);
            self.ranks.add(ring, rank, |other| self.rings.order(other) > order);
        }
    }

    /// `slot`, which was in this ring if that is known, does not continue its parent any more.
    fn leave_parent(&mut self, slot: u32, ring: Option<Ring>) {
        let Slot { class, asked_at, .. } = self.slots[slot as usize];
        let parent = std::mem::replace(&mut self.slots[slot as usize].parent, NONE);
        let Some(above) = self.slots.get_mut(parent as usize) else { return };
        above.children = above.children.saturating_sub(1);
        if above.children > 0 {
            return;
        }
        // Mostly it was asked for together with the slot, and so belongs where that was.
        let is_alike = above.is_in && above.class == class && above.asked_at == asked_at;
        match ring.filter(|_| is_alike && !self.rings.contains(parent)) {
            Some(ring) => self.rings.add_as_oldest(parent, ring),
            None => self.enter(parent, false),
        }
    }

    /// `slot` is gone, which was in this ring if that is known; false if it was not in.
    fn leave(&mut self, slot: u32, ring: Option<Ring>) -> bool {
        if !self.contains(slot) {
            return false;
        }
        self.rings.remove(slot);
        self.slots[slot as usize].is_in = false;
        self.len -= 1;
        self.leave_parent(slot, ring);
        true
    }

    fn slot(&mut self, slot: u32) -> &mut Slot {
        if self.slots.len() <= slot as usize {
            self.slots.resize(slot as usize + 1, Slot::OUT);
        }
        &mut self.slots[slot as usize]
    }

    /// The class that counts.
    fn class(&self, class: Class, key: impl Fn() -> u64) -> Class {
        match (self.learnt, self.dealt) {
            (false, _) => Class::UNKNOWN,
            (true, false) => class,
            (true, true) => Class::dealt(spread(key() ^ self.now)),
        }
    }

    fn note(&mut self, key: u64, known: Known) {
        self.notes[note_place(key)] = Note { key, known };
    }

    fn noted(&self, key: u64) -> Option<Known> {
        let note = &self.notes[note_place(key)];
        (note.key == key && note.known.uses > 0).then_some(note.known)
    }

    /// What the blocks of a missed run are known as, that follow `known` ones. What is followed in the run was asked for
    /// before, and so was all before it, at least as often.
    fn recognise(&self, known: usize, run: &[u64], known_as: &mut Vec<Known>) {
        known_as.clear();
        known_as.resize(run.len(), Known::default());
        let mut recognised = 0;
        let mut past = Known::default();
        for (at, &key) in run.iter().enumerate().rev() {
            if self.history.samples(key)
                && let Some(found) = self.history.find(key, self.now)
            {
                let uses = (found.uses + 1).min(MAX_USES);
                past = Known { class: Class::of_used(uses, found.age), uses };
                recognised = recognised.max(at + 1);
            }
            known_as[at] = past;
        }
        let class = Class::of_new(known + recognised, run.len() - recognised);
        known_as[recognised..].fill(Known { class, uses: 1 });
    }

    /// What the first of `new` blocks behind `parent` is taken for if nothing was noted of it. A prompt may be stored by and by:
    /// what continues new blocks came with them.
    fn known_behind(&self, parent: Option<u32>, new: usize) -> Known {
        let above = parent.and_then(|parent| self.slots.get(parent as usize)).filter(|above| above.is_in);
        match above {
            Some(&Slot { class, uses: 1, .. }) => Known { class, uses: 1 },
            _ => Known { class: Class::of_new(usize::from(parent.is_some()), new), uses: 1 },
        }
    }

    /// The mean density of the blocks that go if `victims` have to.
    fn displaced(&self, victims: usize, blocks: &dyn Blocks) -> f64 {
        let (mut sum, mut left) = (0.0, victims);
        for (rank, ring) in self.ranks.iter() {
            for leaf in self.rings.slots(ring) {
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

    /// A slot that nothing continues and those above it that go next: of the same class, asked for at the same time.
    fn chain(&self, leaf: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(leaf), |&slot| {
            let below = &self.slots[slot as usize];
            let above = self.slots.get(below.parent as usize)?;
            let goes = above.is_in && above.children == 1;
            let alike = above.class == below.class && above.asked_at == below.asked_at;
            (goes && alike).then_some(below.parent)
        })
    }
}

fn note_place(key: u64) -> usize {
    (key >> 48) as usize % NOTES
}

impl ReplacementPolicy for Learned {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Learned
    }

    fn missed(&mut self, known: usize, run: &mut dyn Iterator<Item = u64>) {
        let (mut keys, mut known_as) = (std::mem::take(&mut self.run), std::mem::take(&mut self.known_as));
        keys.clear();
        keys.extend(run);
        self.recognise(known, &keys, &mut known_as);
        let mut before = Known::default();
        for (&key, &known) in keys.iter().zip(&known_as) {
            if known != before {
                self.note(key, known);
                before = known;
            }
            if self.history.samples(key) {
                let class = if self.dealt { Class::dealt(spread(key ^ self.now)) } else { known.class };
                self.history.asked(key, self.now, class, known.uses);
            }
        }
        self.pass(keys.len());
        (self.run, self.known_as) = (keys, known_as);
    }

    fn has_gate(&self) -> bool {
        true
    }

    fn admit(&self, run: &[u64], parent: Option<u32>, victims: usize, blocks: &dyn Blocks) -> bool {
        if !self.learnt {
            return true;
        }
        let mut known = self.known_behind(parent, run.len());
        let mut sum = 0.0;
        for &key in run {
            known = self.noted(key).unwrap_or(known);
            let class = self.class(known.class, || key);
            sum += f64::from(self.densities.get(class, 0));
        }
        let is_lucky = || run.first().is_some_and(|&key| spread(key ^ self.now).is_multiple_of(CHANCE));
        let displaced = MARGIN * self.displaced(victims, blocks);
        // What is worth a place in a tier below passes through here.
        let least = self.below.map_or(displaced, |below| displaced.min(below.into()));
        sum / run.len().max(1) as f64 >= least || is_lucky()
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks) {
        let mut known = self.known_behind(parent, run.len());
        for &slot in run {
            let parent = blocks.parent(slot).unwrap_or(NONE);
            let key = blocks.key(slot);
            known = self.noted(key).unwrap_or(known);
            let new = Slot {
                parent,
                children: self.slot(slot).children,
                asked_at: self.now as u32,
                class: self.class(known.class, || key),
                uses: known.uses,
                is_in: true,
                is_sampled: self.history.samples(key),
            };
            assert!(!self.contains(slot), "slot {slot} is in already");
            self.slots[slot as usize] = new;
            if parent != NONE {
                self.slot(parent).children += 1;
                self.rings.remove(parent);
            }
        }
        self.len += run.len();
        // Of a chain only the last one enters.
        run.iter().for_each(|&slot| self.enter(slot, true));
    }

    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks) {
        // From the tail, which goes before the head also where a take-over left unknown what continues what.
        for &slot in prefix.iter().rev() {
            let Some(&Slot { is_in: true, uses, asked_at, is_sampled, children, .. }) =
                self.slots.get(slot as usize)
            else {
                continue;
            };
            let uses = (uses + 1).min(MAX_USES);
            let known = Class::of_used(uses, (self.now as u32).wrapping_sub(asked_at));
            let class = self.class(known, || blocks.key(slot));
            if is_sampled {
                let key = blocks.key(slot);
                if self.history.samples(key) {
                    let class = if self.dealt { class } else { known };
                    self.history.asked(key, self.now, class, uses);
                }
            }
            let at = &mut self.slots[slot as usize];
            (at.class, at.uses, at.asked_at) = (class, uses, self.now as u32);
            if children == 0 && self.rings.remove(slot) {
                self.enter(slot, true);
            }
        }
        self.pass(prefix.len());
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.leave(slot, None)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let mut refusals = 0;
        let mut may_search_again = true;
        loop {
            let Some((_, ring)) = self.ranks.first() else {
                self.rank();
                if !std::mem::take(&mut may_search_again) {
                    return None;
                }
                continue;
            };
            let Some(slot) = self.rings.slots(ring).next() else {
                self.ranks.remove_first();
                self.rings.unmark(ring);
                continue;
            };
            if blocks.may_evict(slot) {
                self.leave(slot, Some(ring));
                return Some(slot);
            }
            self.rings.remove(slot);
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
            + self.rings.heap_bytes()
            + self.ranks.heap_bytes()
            + self.refused.capacity() * size_of::<u32>()
            + self.history.heap_bytes()
            + self.densities.heap_bytes()
            + size_of_val(&*self.notes)
            + self.run.capacity() * size_of::<u64>()
            + self.known_as.capacity() * size_of::<Known>()
    }

    /// By when they were asked for, and each after all that continues it.
    fn slots(&self) -> Vec<u32> {
        let age = |slot: u32| (self.now as u32).wrapping_sub(self.slots[slot as usize].asked_at);
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
        self.rings.begin_span(references);
        self.ranked_at = references;
    }

    fn memo(&self, slot: u32) -> Option<Memo> {
        let Slot { class, uses, asked_at, .. } = *self.slots.get(slot as usize)?;
        Some(Memo::new(class.index() as u8, uses, asked_at))
    }

    fn remember(&mut self, slot: u32, memo: Memo) {
        if !self.contains(slot) || memo.uses() == 0 {
            return;
        }
        let at = &mut self.slots[slot as usize];
        (at.class, at.uses, at.asked_at) =
            (Class::from_memo(memo), memo.uses().min(MAX_USES), memo.asked_at());
        if self.rings.remove(slot) {
            self.enter(slot, true);
        }
    }

    fn density(&self, memo: Memo) -> Option<f32> {
        let age = (self.now as u32).wrapping_sub(memo.asked_at());
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
