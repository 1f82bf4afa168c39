//! Picks one of several candidates by a policy.

use std::sync::Arc;

use super::{
    nodes::NodeId,
    policy::Policy,
    prediction::{Prediction, Terms},
    scheduler::Scheduler,
};

/// [`Policy::PrefixAffinity`] passes over a node that exceeds the least loaded one by more than this many requests; or by more
/// than half of the least loaded one's requests, if that is more.
const OVERLOAD: u64 = 8;

/// [`Policy::LeastDelay`]: weight of the delay that a prompt causes each of the node's other requests, relative to the wait
/// for its own first token. A higher weight makes long prompts wait in favour of shorter ones. In replays of the conversation
/// trace (docs/choosing.md) 0.05 served both.
const OTHERS_SHARE: f64 = 0.05;

/// [`Policy::LeastDelay`]: pseudo-count added to each node's requests where all nodes are of one class. The higher it is, the
/// less one request more or less matters, and the more long prompts go where more of them is cached. From replays of the first
/// half hour of the conversation trace (docs/choosing.md).
const BESIDE: u64 = 4;

/// A node that could take a request, and the tokens that it would prefill.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: NodeId,
    /// Tokens to prefill, plus `load_cost`.
    pub(super) miss: u64,
    /// Tokens of the prompt that it has or loads, and so need not prefill.
    pub(super) found: u64,
    /// The part of `found` that it loads from its pool.
    pub(super) loads: u64,
    /// Cost of `loads`, in tokens that it could prefill meanwhile.
    pub(super) load_cost: u64,
    /// Resolution of `found`, in tokens.
    pub(super) grain: u64,
}

impl Candidate {
    /// The candidate as decode node of a pair: it prefills and loads nothing, because its prefill node hands the prompt over.
    pub(super) fn handed_over(self) -> Self {
        Self { miss: 0, loads: 0, load_cost: 0, ..self }
    }
}

impl Scheduler {
    /// Picks one of at least one candidate. `partner`: the prefill node that a decode node is picked for.
    pub(super) fn pick(
        &mut self,
        candidates: &[Candidate],
        policy: Policy,
        partner: Option<NodeId>,
    ) -> Candidate {
        let (one, two) =
            (self.random_below(candidates.len()), self.random_below(candidates.len().max(2) - 1));
        let with = partner.and_then(|partner| self.pairs.get(&partner)).map_or(&[][..], Vec::as_slice);
        let turn = |each: &Candidate| self.last_taken(each.id, with);
        let batch = |each: &Candidate| self.batch(each.id);
        let least_loaded = || least(candidates, batch, turn);
        let least_work = |beside| least(candidates, |each| self.work(each, beside), turn);
        let picked = match policy {
            Policy::Random => candidates.get(one),
            Policy::RoundRobin => candidates.iter().min_by_key(|each| turn(each)),
            Policy::PowerOfTwo => {
                let (one, other) = (&candidates[one], &candidates[(one + 1 + two) % candidates.len()]);
                Some(if batch(other) < batch(one) { other } else { one })
            }
            Policy::LeastLoaded => least_loaded(),
            Policy::PrefixAffinity => {
                let fewest = candidates.iter().map(batch).min().unwrap_or(0);
                let most = candidates.iter().map(|each| each.miss).max().unwrap_or(0);
                let is_overloaded = |each: &Candidate| batch(each) > fewest + OVERLOAD.max(fewest / 2);
                let best = least(candidates, |each| each.miss, turn);
                best.filter(|best| best.miss * 2 <= most && !is_overloaded(best)).or_else(least_loaded)
            }
            Policy::LeastDelay if partner.is_none() => self
                .delays(candidates)
                .and_then(|delays| {
                    let all: Vec<(&Candidate, u64)> = candidates.iter().zip(delays).collect();
                    least(&all, |(_, delay)| *delay, |(each, _)| turn(each)).map(|(each, _)| *each)
                })
                .or_else(|| least_work(BESIDE)),
            Policy::LeastDelay => least_work(BESIDE),
            Policy::LeastWork => least_work(1),
        };
        picked.copied().unwrap_or(candidates[0])
    }

    /// Predicted microseconds until the first token at each candidate, plus a share of the delay for others. None if all are
    /// of one class, because the product of work decides better there (docs/choosing.md). None also if one class is not
    /// calibrated yet, because a prediction and a guess do not compare.
    fn delays(&self, candidates: &[Candidate]) -> Option<Vec<u64>> {
        let class = |each: &Candidate| self.nodes.get(each.id).map(|node| &node.class);
        if candidates.windows(2).all(|two| class(&two[0]) == class(&two[1])) {
            return None;
        }
        // Most neighbours are of one class, so the last look-up is kept.
        let mut last: Option<(&Arc<str>, &Prediction)> = None;
        let delay = |each: &Candidate| {
            let node = self.nodes.get(each.id)?;
            let prediction = match last {
                Some((class, prediction)) if *class == node.class => prediction,
                _ => self.predictions.get(&node.class).filter(|it| it.is_calibrated())?,
            };
            last = Some((&node.class, prediction));
            let miss = each.miss.max(each.grain);
            let terms = Terms::new(miss, each.found, node.load.own_tokens, node.load.batch());
            let others = prediction.prefill(miss, each.found) * node.load.batch() as f64;
            Some(((prediction.first_token(terms) + OTHERS_SHARE * others) * 1e3) as u64)
        };
        candidates.iter().map(delay).collect()
    }

    fn work(&self, candidate: &Candidate, beside: u64) -> u128 {
        let Candidate { id, miss, load_cost, grain, .. } = *candidate;
        // `grain` is the resolution of the computed tokens only, so the cost of loads is added afterwards.
        let miss = miss.saturating_sub(load_cost).max(grain) + load_cost;
        self.nodes.get(id).map_or(u128::MAX, |node| node.load.work_with(miss, grain, beside))
    }

    fn batch(&self, id: NodeId) -> u64 {
        self.nodes.get(id).map_or(u64::MAX, |node| node.load.batch())
    }

    /// Orders nodes by how long ago a choice took them: first together with the partner, then at all. `with`: by slot, the last
    /// choice that took a node together with the partner.
    fn last_taken(&self, id: NodeId, with: &[u64]) -> (u64, u64) {
        let together = with.get(id.slot()).copied();
        (together.unwrap_or(0), self.nodes.get(id).map_or(u64::MAX, |node| node.chosen))
    }

    /// A random number below `below`, by SplitMix64.
    fn random_below(&mut self, below: usize) -> usize {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.rng ^ (self.rng >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * below.max(1) as u128) >> 64) as usize
    }
}

/// The one with the least key; a tie goes to the least turn. Turns are looked up for ties only, because that takes longer.
fn least<T, K: Ord, U: Ord>(all: &[T], key: impl Fn(&T) -> K, turn: impl Fn(&T) -> U) -> Option<&T> {
    let least = all.iter().map(&key).min()?;
    all.iter().filter(|each| key(each) == least).min_by_key(|each| turn(each))
}
