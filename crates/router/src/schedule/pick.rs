//! One node of several, by a policy.

use std::sync::Arc;

use super::{
    nodes::NodeId,
    policy::Policy,
    prediction::{Prediction, Terms},
    scheduler::Scheduler,
};

/// A node is overloaded for [`Policy::PrefixAffinity`] when it has this many requests more than the least loaded one, and half
/// as many again.
const OVERLOAD: u64 = 8;

/// Of the time that a prompt keeps a node from each of its other requests, so much counts beside its own first token, for
/// [`Policy::LeastDelay`]. More lets long prompts wait for the shorter ones' sake; by replays of the conversation trace
/// (docs/routing.md) 0.05 serves both.
const OTHERS_SHARE: f64 = 0.05;

/// Among nodes that are alike [`Policy::LeastDelay`] counts so many requests more than a node has. The more, the less it matters
/// whether a node has one request or two: long prompts go where more of them is found. By replays of the first half hour of the
/// conversation trace (docs/routing.md).
const BESIDE: u64 = 4;

/// A node that could take a request, and the tokens that it would prefill.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: NodeId,
    /// Tokens to prefill, and the cost of its loads.
    pub(super) miss: u64,
    /// Tokens of the prompt that it need not prefill: it has them, or loads them.
    pub(super) found: u64,
    /// Tokens among these that it loads from its pool.
    pub(super) loads: u64,
    /// Cost of these loads, in tokens that it could prefill meanwhile.
    pub(super) load_cost: u64,
    /// Tokens to within which that is known.
    pub(super) grain: u64,
}

impl Candidate {
    /// A decode node gets the prompt from its prefill node: it prefills nothing, and loads nothing.
    pub(super) fn handed_over(self) -> Self {
        Self { miss: 0, loads: 0, load_cost: 0, ..self }
    }
}

impl Scheduler {
    /// One of several, at least one. A decode node is picked for a prefill node.
    pub(super) fn pick(
        &mut self,
        candidates: &[Candidate],
        policy: Policy,
        partner: Option<NodeId>,
    ) -> Candidate {
        let (one, two) = (self.any(candidates.len()), self.any(candidates.len().max(2) - 1));
        let with = partner.and_then(|partner| self.pairs.get(&partner)).map_or(&[][..], Vec::as_slice);
        let turn = |each: &Candidate| self.turn(each.id, with);
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

    /// Microseconds until the first token at each of them, with a part of what others wait for it. None where all are alike, of
    /// whom a product of work says more (docs/routing.md), and while that cannot be predicted of one of them: they would not
    /// be compared fairly.
    fn delays(&self, candidates: &[Candidate]) -> Option<Vec<u64>> {
        let class = |each: &Candidate| self.nodes.get(each.id).map(|node| &node.class);
        if candidates.windows(2).all(|two| class(&two[0]) == class(&two[1])) {
            return None;
        }
        // Neighbours are of one class mostly.
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
        // Computed tokens are known to within a grain. The cost of loads is added to them.
        let miss = miss.saturating_sub(load_cost).max(grain) + load_cost;
        self.nodes.get(id).map_or(u128::MAX, |node| node.load.work_with(miss, grain, beside))
    }

    fn batch(&self, id: NodeId) -> u64 {
        self.nodes.get(id).map_or(u64::MAX, |node| node.load.batch())
    }

    /// Who was taken least recently comes first: together with a partner, then with any. `with`: of the partner, the last choice
    /// of each.
    fn turn(&self, id: NodeId, with: &[u64]) -> (u64, u64) {
        let together = with.get(id.slot()).copied();
        (together.unwrap_or(0), self.nodes.get(id).map_or(u64::MAX, |node| node.chosen))
    }

    /// A number below `below`, by SplitMix64.
    fn any(&mut self, below: usize) -> usize {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.chance ^ (self.chance >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * below.max(1) as u128) >> 64) as usize
    }
}

/// The one with the least key, and of several with the least turn, which takes longer to find out.
fn least<T, K: Ord, U: Ord>(all: &[T], key: impl Fn(&T) -> K, turn: impl Fn(&T) -> U) -> Option<&T> {
    let least = all.iter().map(&key).min()?;
    all.iter().filter(|each| key(each) == least).min_by_key(|each| turn(each))
}
