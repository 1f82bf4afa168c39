//! RAM and a tier on SSDs below it, without bytes.

use crate::kind::PolicyKind;
use crate::memo::Memo;
use crate::model::{CacheModel, Evicted};
use crate::ssd_model::SsdModel;

/// How much of one request was there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TieredOutcome {
    /// Blocks from the first one on that RAM had.
    pub prefix_hits: usize,
    /// Those behind them that came back from the SSD.
    pub ssd_prefix_hits: usize,
    /// Blocks that RAM had wherever they stood.
    pub block_hits: usize,
}

/// A pool, and below it a tier on SSDs if it has room for any block: as the daemon works with both, request by request. What
/// comes into RAM is written to the SSD; what the SSD has of a prompt comes back first.
pub struct TieredModel {
    ram: CacheModel,
    ssd: Option<SsdModel>,
}

impl TieredModel {
    /// Empty, with room for so many blocks.
    pub fn new(policy: PolicyKind, capacity: usize, ssd_capacity: usize) -> Self {
        let mut ram = CacheModel::new(policy, capacity);
        let ssd = (ssd_capacity > 0).then(|| SsdModel::new(ssd_capacity));
        if ssd.is_some() {
            ram.set_below(Some(0.0));
        }
        Self { ram, ssd }
    }

    /// The upper one.
    pub fn ram(&self) -> &CacheModel {
        &self.ram
    }

    /// Goes on with another policy, which takes over what is in RAM.
    pub fn switch(&mut self, policy: PolicyKind) {
        self.ram.switch(policy);
    }

    /// A request for a prompt of these blocks, head first.
    pub fn request(&mut self, keys: &[u64]) -> TieredOutcome {
        let Self { ram, ssd } = self;
        let Some(ssd) = ssd else {
            let outcome = ram.request(keys, |_| ());
            let (prefix_hits, block_hits) = (outcome.prefix_hits, outcome.block_hits);
            return TieredOutcome { prefix_hits, ssd_prefix_hits: 0, block_hits };
        };
        let known = keys.iter().take_while(|&&key| ram.contains(key)).count();
        let memos: Vec<Memo> = keys[known..].iter().map_while(|&key| ssd.read(key)).collect();
        let remember = |ssd: &mut SsdModel, Evicted { key, memo }: Evicted| {
            memo.into_iter().for_each(|memo| ssd.remember(key, memo));
        };
        if !memos.is_empty() {
            ram.fetch(keys, known, &memos, |evicted| remember(ssd, evicted));
        }
        let outcome = ram.request(keys, |evicted| remember(ssd, evicted));
        for &key in keys.iter().skip(outcome.prefix_hits).filter(|&&key| ram.contains(key)) {
            ssd.write(key, ram.memo(key).unwrap_or_default(), |key, memo| ram.density(key, memo));
        }
        if let Some(density) = ssd.given_up() {
            ram.set_below(Some(density));
        }
        let ssd_prefix_hits = outcome.prefix_hits.saturating_sub(known);
        TieredOutcome {
            prefix_hits: outcome.prefix_hits - ssd_prefix_hits,
            ssd_prefix_hits,
            block_hits: outcome.block_hits - ssd_prefix_hits,
        }
    }
}
