//! [`TieredModel`]: RAM and an SSD tier below it, without bytes.

use crate::kind::PolicyKind;
use crate::memo::Memo;
use crate::model::{CacheModel, Evicted};
use crate::ssd_model::SsdModel;

/// How many blocks of a request RAM and the SSD had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieredOutcome {
    /// Blocks in RAM from the first one on, up to the first that is missing there.
    pub prefix_hits: usize,
    /// Blocks behind those that continue the prefix because the SSD had them.
    pub ssd_prefix_hits: usize,
    /// Blocks in RAM anywhere in the prompt.
    pub block_hits: usize,
}

/// A pool and, unless its capacity is 0, an SSD tier below it, as the daemon runs both, request by request. A request
/// first fetches the prompt's blocks that the SSD has. Blocks that are stored in RAM are written to the SSD.
pub struct TieredModel {
    ram: CacheModel,
    ssd: Option<SsdModel>,
}

impl TieredModel {
    /// Empty tiers for `capacity` blocks in RAM and `ssd_capacity` on the SSD.
    pub fn new(policy: PolicyKind, capacity: usize, ssd_capacity: usize) -> Self {
        let mut ram = CacheModel::new(policy, capacity);
        let ssd = (ssd_capacity > 0).then(|| SsdModel::new(ssd_capacity));
        if ssd.is_some() {
            ram.set_below(Some(0.0));
        }
        Self { ram, ssd }
    }

    /// The tier in RAM.
    pub fn ram(&self) -> &CacheModel {
        &self.ram
    }

    /// Switches RAM to another policy, which takes over its blocks.
    pub fn switch(&mut self, policy: PolicyKind) {
        self.ram.switch(policy);
    }

    /// Runs a request for a prompt of these blocks, head first.
    pub fn request(&mut self, keys: &[u64]) -> TieredOutcome {
        let Self { ram, ssd } = self;
        let Some(ssd) = ssd else {
            let outcome = ram.request(keys, |_| ());
            let (prefix_hits, block_hits) = (outcome.prefix_hits, outcome.block_hits);
            return TieredOutcome { prefix_hits, ssd_prefix_hits: 0, block_hits };
        };
        let in_ram = keys.iter().take_while(|&&key| ram.contains(key)).count();
        let memos: Vec<Memo> = keys[in_ram..].iter().map_while(|&key| ssd.read(key)).collect();
        let remember = |ssd: &mut SsdModel, Evicted { key, memo }: Evicted| {
            memo.into_iter().for_each(|memo| ssd.remember(key, memo));
        };
        if !memos.is_empty() {
            ram.fetch(keys, in_ram, &memos, |evicted| remember(ssd, evicted));
        }
        let outcome = ram.request(keys, |evicted| remember(ssd, evicted));
        for &key in keys.iter().skip(outcome.prefix_hits).filter(|&&key| ram.contains(key)) {
            ssd.write(key, ram.memo(key).unwrap_or_default(), |key, memo| ram.density(key, memo));
        }
        if let Some(density) = ssd.given_up() {
            ram.set_below(Some(density));
        }
        let ssd_prefix_hits = outcome.prefix_hits.saturating_sub(in_ram);
        TieredOutcome {
            prefix_hits: outcome.prefix_hits - ssd_prefix_hits,
            ssd_prefix_hits,
            block_hits: outcome.block_hits - ssd_prefix_hits,
        }
    }
}
