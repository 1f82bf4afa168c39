//! [`Auto`]: chooses the policy while the cache runs, by shadow caches that measure what each policy would hit on a
//! sample.

use crate::key::spread;
use crate::kind::PolicyKind;
use crate::model::CacheModel;

/// Least capacity of a shadow cache in blocks, if the cache itself has as many. Some dozens of prompts fit, so its hit
/// rate is not chance.
const SHADOW_BLOCKS: usize = 4096;
/// Half-life of a hit, in sampled references for each block of a shadow's capacity.
const HALF_LIFE: f64 = 16.0;
/// Least sampled references before the first switch and between two, for each block of a shadow's capacity.
const SWITCH_INTERVAL: f64 = 2.0;
/// A policy takes over if it hits this many times as much as the active one.
const MARGIN: f64 = 1.03;

/// A change of policy, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// The policy that was active until now.
    pub from: PolicyKind,
    /// The better policy, which takes over.
    pub to: PolicyKind,
    /// The recent prefix hit rates of the two shadows, 0 to 1.
    pub hit_rates: (f64, f64),
}

/// A cache without bytes for each policy, all fed with the same sample of prompts. A shadow is the same part of the
/// real cache as the sample is of the prompts.
///
/// Prompts are sampled by their second block. So prompts that continue each other are sampled together, whereas the
/// first block is often one system prompt that all share. A shadow holds 4,096 to 8,191 blocks, whatever the cache
/// holds. For a cache of 262,144 blocks one prompt of 64 is sampled, for 32,768 blocks one of 8, and below 8,192 blocks
/// all.
pub struct Auto {
    shadows: Vec<Shadow>,
    active: PolicyKind,
    /// One prompt in this many is sampled; a power of two.
    sample: u32,
    /// Blocks of a shadow.
    capacity: usize,
    /// Sampled references, decayed by age.
    references: f64,
    /// Sampled references since the last switch, counted once there is pressure.
    since_switch: f64,
    /// A shadow has evicted a block. Before that, all policies hit the same.
    pressure: bool,
}

struct Shadow {
    kind: PolicyKind,
    cache: CacheModel,
    /// Prefix hits, decayed by age.
    hits: f64,
}

impl Auto {
    /// Shadows for a cache of `capacity` blocks that runs `active` now.
    pub fn new(active: PolicyKind, capacity: usize) -> Self {
        let sample = 1 << (capacity / SHADOW_BLOCKS).max(1).ilog2();
        let capacity = (capacity / sample as usize).max(1);
        let shadow = |kind| Shadow { kind, cache: CacheModel::new(kind, capacity), hits: 0.0 };
        Self {
            shadows: PolicyKind::ALL.into_iter().map(shadow).collect(),
            active,
            sample,
            capacity,
            references: 0.0,
            since_switch: 0.0,
            pressure: false,
        }
    }

    /// One prompt in this many is sampled; a power of two.
    pub fn sample(&self) -> u32 {
        self.sample
    }

    /// Whether a sample of one prompt in `sample`, a power of two, includes the prompt that begins with these blocks.
    pub fn samples(sample: u32, first: u64, second: Option<u64>) -> bool {
        // Use other bits of the key than tables and sketches do.
        spread(second.unwrap_or(first)) >> 32 & u64::from(sample - 1) == 0
    }

    /// The recent prefix hit rate of each policy's shadow, 0 to 1.
    pub fn hit_rates(&self) -> impl Iterator<Item = (PolicyKind, f64)> + '_ {
        self.shadows.iter().map(|shadow| (shadow.kind, shadow.hits / self.references.max(1.0)))
    }

    /// Estimated bytes of the shadow caches on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.shadows.iter().map(|shadow| shadow.cache.heap_bytes()).sum()
    }

    /// Observes a request for a prompt of these blocks, head first. Returns a switch when another policy has to take
    /// over.
    pub fn observe(&mut self, keys: &[u64]) -> Option<Switch> {
        if !Self::samples(self.sample, *keys.first()?, keys.get(1).copied()) {
            return None;
        }
        let count = keys.len() as f64;
        let decay = 0.5f64.powf(count / (HALF_LIFE * self.capacity as f64));
        let pressure = &mut self.pressure;
        for shadow in &mut self.shadows {
            let outcome = shadow.cache.request(keys, |_| *pressure = true);
            shadow.hits = shadow.hits * decay + outcome.prefix_hits as f64;
        }
        self.references = self.references * decay + count;
        if self.pressure {
            self.since_switch += count;
        }
        if self.since_switch < SWITCH_INTERVAL * self.capacity as f64 {
            return None;
        }
        let hits =
            |kind| self.shadows.iter().find(|shadow| shadow.kind == kind).map_or(0.0, |shadow| shadow.hits);
        let now = hits(self.active);
        let best = self.shadows.iter().max_by(|a, b| a.hits.total_cmp(&b.hits))?;
        if best.hits <= MARGIN * now {
            return None;
        }
        let hit_rates = (now / self.references, best.hits / self.references);
        let switch = Switch { from: self.active, to: best.kind, hit_rates };
        self.active = best.kind;
        self.since_switch = 0.0;
        Some(switch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts that are used all the time, beside others that come once: LRU keeps none of them.
    #[test]
    fn a_policy_that_hits_less_than_another_is_left() {
        let mut auto = Auto::new(PolicyKind::Lru, 220);
        let prompt = |first: u64| (first..first + 12).map(spread).collect::<Vec<_>>();
        let prompts =
            (0..8000u64).flat_map(|round| [prompt(round % 16 * 100), prompt((1 << 40) + round * 100)]);
        let switches: Vec<Switch> = prompts.filter_map(|keys| auto.observe(&keys)).collect();
        assert_eq!(switches[0].from, PolicyKind::Lru);
        assert!(switches[0].hit_rates.1 > switches[0].hit_rates.0 && auto.active != PolicyKind::Lru);
        assert!(switches.len() < 5, "{switches:?}");
    }

    #[test]
    fn small_caches_are_sampled_finely_and_shadows_do_not_grow() {
        let sample = |capacity| Auto::new(PolicyKind::Lru, capacity).sample();
        let samples = [1, 1827, 8191, 8192, 32_768, 65_535, 262_144, 1 << 24].map(sample);
        assert_eq!(samples, [1, 1, 1, 2, 8, 8, 64, 4096]);
        let mut bytes = Vec::new();
        for capacity in [4096, 262_144] {
            let mut auto = Auto::new(PolicyKind::Lru, capacity);
            for prompt in 0..2 * capacity as u64 / 8 {
                auto.observe(&(0..8).map(|block| spread(prompt * 8 + block)).collect::<Vec<_>>());
            }
            bytes.push(auto.heap_bytes());
        }
        assert!(bytes[1] < 2 * bytes[0], "{bytes:?}");
    }
}
