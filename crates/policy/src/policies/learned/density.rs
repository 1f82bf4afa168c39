//! [`Densities`]: computes hit densities from the counts of the history.
//!
//! For each class and age bucket: counts of requests ([`Fates`]) -> chance of a request before the next bucket ->
//! density. Classes with few counts lean on their group, and groups on all blocks.

use super::classes::{CLASSES, Class, GROUPS};

/// Age buckets by half powers of two; the last has all ages above. No hits are expected in the last, because it is not
/// known how long they would take.
pub(super) const BUCKETS: usize = 48;
/// The prior chance that a block is requested before its age grows by a half.
const PRIOR: f32 = 0.04;
/// Weights of the three priors, in references: [`PRIOR`] beside all blocks, all blocks beside a group, and a group
/// beside a class.
const ALL_WEIGHT: f32 = 320.0;
const GROUP_WEIGHT: f32 = 320.0;
const CLASS_WEIGHT: f32 = 4800.0;

/// The bucket of an age.
pub(super) fn bucket(age: u64) -> usize {
    match age.checked_ilog2() {
        None | Some(0) => age as usize,
        Some(log) => (2 * log as usize + (age >> (log - 1) & 1) as usize).min(BUCKETS - 1),
    }
}

/// The lowest age of a bucket.
pub(super) fn first_age(bucket: usize) -> u64 {
    match bucket {
        0 | 1 => bucket as u64,
        _ => (2 + (bucket as u64 & 1)) << (bucket / 2 - 1),
    }
}

/// A value for each age bucket.
pub(super) type ByAge = [f32; BUCKETS];

/// Counts of one class or group by age bucket: blocks that were requested at that age, and blocks that were dropped at
/// that age without a request.
#[derive(Clone, Copy)]
pub(super) struct Fates {
    pub(super) requested: ByAge,
    pub(super) left: ByAge,
}

impl Fates {
    pub(super) const NONE: Self = Self { requested: [0.0; BUCKETS], left: [0.0; BUCKETS] };

    fn add(&mut self, other: &Self) {
        self.requested.iter_mut().zip(&other.requested).for_each(|(sum, count)| *sum += count);
        self.left.iter_mut().zip(&other.left).for_each(|(sum, count)| *sum += count);
    }

    /// Events of all ages together.
    pub(super) fn count(&self) -> f64 {
        self.requested.iter().chain(&self.left).map(|&count| f64::from(count)).sum()
    }

    fn is_none(&self) -> bool {
        self.requested.iter().chain(&self.left).all(|&count| count == 0.0)
    }

    /// For each age bucket, the chance that a block that reached it is requested before it reaches the next one.
    /// `before` is the prior, and weighs as much as `weight` blocks. Each bucket is smoothed with its two neighbours.
    fn chances(&self, before: &ByAge, weight: f32) -> ByAge {
        // One empty bucket on either side, for the smoothing.
        let mut requested = [0.0; BUCKETS + 2];
        let mut reached = [0.0; BUCKETS + 2];
        let mut sum = 0.0;
        for age in (0..BUCKETS).rev() {
            sum += self.requested[age] + self.left[age];
            requested[age + 1] = self.requested[age];
            reached[age + 1] = sum - self.left[age] / 2.0;
        }
        std::array::from_fn(|age| {
            let requested = requested[age] + requested[age + 1] + requested[age + 2];
            let reached = reached[age] + reached[age + 1] + reached[age + 2];
            (requested + weight * before[age]) / (reached + weight)
        })
    }
}

/// For each age the hit density of a block that has reached it: the largest quotient over all horizons. The quotient is
/// the chance of a request before the horizon, divided by the mean time until the request or the horizon.
fn densities(chances: &ByAge) -> ByAge {
    // For a block of age 0: expected hits within each bucket, and expected time in it.
    let mut reaches = 1.0f64;
    let mut parts = [(0.0f64, 0.0f64); BUCKETS];
    for (age, part) in parts.iter_mut().enumerate() {
        // Cap the chance below 1, or all later buckets would weigh nothing.
        let chance = if age == BUCKETS - 1 { 0.0 } else { f64::from(chances[age].min(0.98)) };
        let width = (first_age(age + 1) - first_age(age)) as f64;
        *part = (reaches * chance, reaches * width * (1.0 - chance / 2.0));
        reaches *= 1.0 - chance;
    }
    // Go from old to young, with a stack of stretches each of which is denser than the next older one. A bucket absorbs
    // the stretches behind it as long as that makes it denser: where it stops is its best horizon.
    let mut stretches = [(0.0, 0.0); BUCKETS];
    let mut count = 0;
    let mut found = [0.0; BUCKETS];
    for age in (0..BUCKETS).rev() {
        let (mut hits, mut time) = parts[age];
        while count > 0 && stretches[count - 1].0 * time > hits * stretches[count - 1].1 {
            count -= 1;
            hits += stretches[count].0;
            time += stretches[count].1;
        }
        stretches[count] = (hits, time);
        count += 1;
        found[age] = (hits / time) as f32;
    }
    found
}

/// Hit densities by class and age bucket.
pub(super) struct Densities(Box<[ByAge]>);

impl Densities {
    /// Densities of the prior alone, which fall with the age.
    pub(super) fn new() -> Self {
        Self(vec![densities(&[PRIOR; BUCKETS]); CLASSES].into_boxed_slice())
    }

    /// The densities of a class, each with the lowest age of its bucket.
    pub(super) fn by_age(&self, class: Class) -> impl Iterator<Item = (u64, f32)> + '_ {
        self.0[class.index()].iter().enumerate().map(|(bucket, &density)| (first_age(bucket), density))
    }

    pub(super) fn get(&self, class: Class, age: u64) -> f32 {
        self.0[class.index()][bucket(age)]
    }

    /// Computes all densities from the counts of each class, where one block in `sample` was counted. A class with few
    /// counts is taken to be like its group, and a group like all blocks.
    pub(super) fn learn(&mut self, fates: &[Fates], sample: f32) {
        let mut of_groups = [Fates::NONE; GROUPS];
        let mut of_all = Fates::NONE;
        for (class, fates) in Class::all().zip(fates) {
            of_groups[class.group()].add(fates);
            of_all.add(fates);
        }
        let of_all = of_all.chances(&[PRIOR; BUCKETS], ALL_WEIGHT / sample);
        let chances = of_groups.map(|fates| fates.chances(&of_all, GROUP_WEIGHT / sample));
        let dense = chances.map(|chances| densities(&chances));
        for ((class, fates), found) in Class::all().zip(fates).zip(&mut self.0) {
            *found = if class == Class::UNKNOWN {
                densities(&of_all)
            } else if fates.is_none() {
                dense[class.group()]
            } else {
                densities(&fates.chances(&chances[class.group()], CLASS_WEIGHT / sample))
            };
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_and_have_all_ages() {
        for at in 0..BUCKETS {
            assert_eq!(bucket(first_age(at)), at);
            assert_eq!(bucket(first_age(at + 1) - 1), at);
        }
        assert_eq!([bucket(0), bucket(u64::from(u32::MAX)), bucket(u64::MAX)], [0, BUCKETS - 1, BUCKETS - 1]);
    }

    /// Over all horizons, one by one.
    fn plain(chances: &ByAge, age: usize) -> f64 {
        let (mut reaches, mut hits, mut time, mut best) = (1.0, 0.0, 0.0, 0.0f64);
        for (at, chance) in chances.iter().enumerate().skip(age) {
            let chance = if at == BUCKETS - 1 { 0.0 } else { f64::from(chance.min(0.98)) };
            hits += reaches * chance;
            time += reaches * (first_age(at + 1) - first_age(at)) as f64 * (1.0 - chance / 2.0);
            reaches *= 1.0 - chance;
            best = best.max(hits / time);
        }
        best
    }

    proptest! {
        #[test]
        fn the_best_horizon_is_found(
            chances in prop::collection::vec(prop_oneof![Just(0.0f32), 0.0f32..1.0, Just(1.0f32)], BUCKETS)
        ) {
            let chances: ByAge = std::array::from_fn(|age| chances[age]);
            for (age, found) in densities(&chances).into_iter().enumerate() {
                let plain = plain(&chances, age);
                prop_assert!((f64::from(found) - plain).abs() <= 1e-4 * plain + 1e-12, "{age}: {found} {plain}");
                prop_assert!(found.is_finite() && found >= 0.0);
            }
        }
    }

    #[test]
    fn with_nothing_known_the_older_is_the_less_dense() {
        let densities = Densities::new();
        for class in Class::all() {
            let found: Vec<f32> = (1..24).map(|log| densities.get(class, 1 << log)).collect();
            assert!(found.is_sorted_by(|young, old| young > old), "{found:?}");
        }
    }

    #[test]
    fn all_blocks_asked_for_at_one_age_are_denser_the_nearer_they_are_to_it() {
        let mut fates = vec![Fates::NONE; CLASSES];
        let class = Class::of_used(3, 1000);
        fates[class.index()].requested[bucket(1024)] = 100_000.0;
        let mut densities = Densities::new();
        densities.learn(&fates, 1.0);
        let at = |age| densities.get(class, age);
        assert!(at(0) < at(256) && at(256) < at(512) && at(512) < at(800), "{} {}", at(0), at(800));
        assert!(at(4096) < at(800) / 3.0, "{} {}", at(4096), at(800));
    }
}
