//! [`History`]: tracks a sample of blocks, in the cache or not, and counts at which age each class is requested again.
//!
//! Tracked blocks are in a hash table of 8-way sets, each a cache line. A block that is requested again adds to `requested`
//! of its former class, at its age. A block that another one replaces adds to `left`. Counts decay at each
//! [`History::learn`].

use super::classes::{CLASSES, Class};
use super::density::{Densities, Fates, bucket};

/// Limit of blocks that are tracked at a time. With the counts they take 150 KiB.
const TRACKED: usize = 16_384;
/// Blocks in a set.
const WAYS: usize = 8;
/// Even for a small cache only one block in 2 to this power is sampled: that is enough for the classes, and saves time.
const MIN_SHIFT: u32 = 1;
const MAX_SHIFT: u32 = 40;
/// An event counts half after this many references and half the capacity.
const HALF_LIFE: usize = 16_384;
/// A count below this is set to 0.
const LEAST: f32 = 1e-6;

/// A tracked block at its last request.
#[derive(Clone, Copy)]
pub(super) struct Tracked {
    /// How often it was requested, at most [`MAX_USES`](super::classes::MAX_USES).
    pub(super) uses: u8,
    class: Class,
    /// References since that request. Time has 32 bits here, so a block that was not requested for four thousand
    /// million references looks younger.
    pub(super) age: u32,
}

/// The tracked blocks of one set: one cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Set {
    /// The low 16 bits of each key.
    tags: [u16; WAYS],
    /// 0 in a free way.
    uses: [u8; WAYS],
    classes: [Class; WAYS],
    requested_at: [u32; WAYS],
}

impl Set {
    fn find(&self, key: u64) -> Option<usize> {
        let tag = tag(key);
        let found =
            (0..WAYS).fold(0, |found, at| found | u32::from(self.tags[at] == tag && self.uses[at] > 0) << at);
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    /// The way to replace: a free one, or else the one whose last request is the longest ago.
    fn way_to_replace(&self, now: u64) -> usize {
        let age = |at: usize| (self.uses[at] == 0, (now as u32).wrapping_sub(self.requested_at[at]));
        (1..WAYS).fold(0, |eldest, at| if age(at) > age(eldest) { at } else { eldest })
    }

    fn get(&self, at: usize, now: u64) -> Option<Tracked> {
        let age = (now as u32).wrapping_sub(self.requested_at[at]);
        (self.uses[at] > 0).then_some(Tracked { uses: self.uses[at], class: self.classes[at], age })
    }
}

/// Tracks the blocks of a sample of keys from one request to the next, and counts the ages in between for each class.
pub(super) struct History {
    tracked: Box<[Set]>,
    fates: Box<[Fates]>,
    /// The sample is one key in 2 to this power.
    shift: u32,
    capacity: usize,
    learnt_at: u64,
}

impl History {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            tracked: vec![Set::default(); TRACKED / WAYS].into_boxed_slice(),
            fates: vec![Fates::NONE; CLASSES].into_boxed_slice(),
            shift: shift(capacity),
            capacity,
            learnt_at: 0,
        }
    }

    /// Starts the time at `now`, so that counts do not decay for the time before.
    pub(super) fn begin_at(&mut self, now: u64) {
        self.learnt_at = now;
    }

    /// Adapts the sample to another capacity.
    pub(super) fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        if self.shift != shift(capacity) {
            self.shift = shift(capacity);
            // Drop all tracked blocks: some are outside the new sample, and would seem never to be requested again.
            self.tracked.fill(Set::default());
        }
    }

    pub(super) fn samples(&self, key: u64) -> bool {
        key >> 20 & ((1 << self.shift) - 1) == 0
    }

    /// The last request of a sampled block, if it is tracked.
    pub(super) fn find(&self, key: u64, now: u64) -> Option<Tracked> {
        let set = &self.tracked[set_of(key)];
        set.get(set.find(key)?, now)
    }

    /// Records a request of a sampled block, which is in `class` from now on.
    pub(super) fn record(&mut self, key: u64, now: u64, class: Class, uses: u8) {
        let set = &mut self.tracked[set_of(key)];
        let known = set.find(key);
        let at = known.unwrap_or_else(|| set.way_to_replace(now));
        if let Some(before) = set.get(at, now) {
            let Fates { requested, left } = &mut self.fates[before.class.index()];
            let counts = if known.is_some() { requested } else { left };
            counts[bucket(before.age.into())] += 1.0;
        }
        set.tags[at] = tag(key);
        set.uses[at] = uses.max(1);
        set.classes[at] = class;
        set.requested_at[at] = now as u32;
    }

    /// Events that were counted for a class, decayed.
    pub(super) fn seen(&self, class: Class) -> f64 {
        self.fates[class.index()].count()
    }

    /// Computes the densities from the counts, then lets the counts decay.
    pub(super) fn learn(&mut self, now: u64, densities: &mut Densities) {
        // Blocks that are still tracked have reached their age without a request, so count them as left for now.
        let mut fates = self.fates.clone();
        for set in &self.tracked {
            for tracked in (0..WAYS).filter_map(|at| set.get(at, now)) {
                fates[tracked.class.index()].left[bucket(tracked.age.into())] += 1.0;
            }
        }
        densities.learn(&fates, (1u64 << self.shift) as f32);
        let half_lives = (now - self.learnt_at) as f64 / HALF_LIFE.saturating_add(self.capacity / 2) as f64;
        let keep = 0.5f64.powf(half_lives) as f32;
        for fates in &mut self.fates {
            // Set tiny counts to 0, because arithmetic on them is slow and says nothing.
            let less = |count: &mut f32| *count = if *count * keep < LEAST { 0.0 } else { *count * keep };
            fates.requested.iter_mut().chain(&mut fates.left).for_each(less);
        }
        self.learnt_at = now;
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.tracked) + size_of_val(&*self.fates)
    }
}

/// The sample's shift at which a sample of `capacity` blocks fits into the table.
fn shift(capacity: usize) -> u32 {
    let samples = capacity.div_ceil(TRACKED).max(1);
    samples.next_power_of_two().ilog2().clamp(MIN_SHIFT, MAX_SHIFT)
}

fn set_of(key: u64) -> usize {
    (key >> 32) as usize % (TRACKED / WAYS)
}

fn tag(key: u64) -> u16 {
    key as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::spread;

    fn sampled(history: &History) -> impl Iterator<Item = u64> {
        (0..1_000_000).map(spread).filter(|&key| history.samples(key))
    }

    #[test]
    fn the_sample_is_as_large_as_what_can_be_followed() {
        let shifts = [0, 1, 32_768, 32_769, 65_536, 1 << 20, usize::MAX].map(shift);
        assert_eq!(shifts, [1, 1, 1, 2, 2, 6, 40]);
    }

    #[test]
    fn a_block_is_counted_at_the_age_at_which_it_was_asked_for() {
        let mut history = History::new(100);
        let key = sampled(&history).next().unwrap();
        let class = Class::of_new(0, 10);
        history.record(key, 1000, class, 1);
        assert_eq!(history.find(key, 1300).map(|found| (found.uses, found.age)), Some((1, 300)));
        history.record(key, 1300, Class::of_used(2, 300), 2);
        assert_eq!(history.fates[class.index()].requested[bucket(300)], 1.0);
        assert_eq!(history.find(key, 1300).map(|found| found.uses), Some(2));
    }

    #[test]
    fn memory_is_bounded_and_what_was_longest_ago_is_followed_no_more() {
        let mut history = History::new(100);
        let bytes = history.heap_bytes();
        let keys: Vec<u64> = sampled(&history).take(3 * TRACKED).collect();
        for (now, &key) in keys.iter().enumerate() {
            history.record(key, now as u64, Class::of_new(0, 1), 1);
        }
        assert_eq!(history.heap_bytes(), bytes);
        let found = |keys: &[u64]| keys.iter().filter(|&&key| history.find(key, 0).is_some()).count();
        // A place is found by chance, so the age at which a block goes is not the same for all.
        assert!(found(&keys[5 * TRACKED / 2..]) > TRACKED * 9 / 20);
        assert!(found(&keys[..TRACKED]) < TRACKED / 20);
        let left: f32 = history.fates[Class::of_new(0, 1).index()].left.iter().sum();
        assert!(left >= 1.9 * TRACKED as f32, "{left}");
    }

    #[test]
    fn what_was_counted_is_forgotten() {
        let mut history = History::new(100);
        let mut densities = Densities::new();
        let class = Class::of_new(0, 1);
        history.fates[class.index()].requested[20] = 1000.0;
        history.learn(0, &mut densities);
        let dense = densities.get(class, 500);
        history.learn(10 * HALF_LIFE as u64, &mut densities);
        assert!(history.fates[class.index()].requested[20] < 1.0);
        history.learn(11 * HALF_LIFE as u64, &mut densities);
        assert!(densities.get(class, 500) < dense / 2.0);
    }

    #[test]
    fn ages_that_cannot_be_are_borne() {
        let mut history = History::new(usize::MAX);
        let mut densities = Densities::new();
        let key = 7;
        assert!(history.samples(key));
        for now in [0, 5, u64::from(u32::MAX), 1 << 32, u64::MAX - 1, u64::MAX] {
            history.record(key, now, Class::of_used(64, u32::MAX), 64);
            history.learn(now, &mut densities);
        }
        let all =
            Class::all().flat_map(|class| [0, 1, 1 << 40, u64::MAX].map(|age| densities.get(class, age)));
        assert!(all.into_iter().all(|density| density.is_finite() && density >= 0.0));
    }
}
