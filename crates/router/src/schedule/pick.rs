//! One node of several, by a policy.

use super::{nodes::NodeId, policy::Policy, scheduler::Scheduler};

/// A node is overloaded for [`Policy::PrefixAffinity`] when it has this many requests more than the least loaded one, and half
/// as many again.
const OVERLOAD: u64 = 8;

/// A node that could take a request, and the tokens that it would prefill.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: NodeId,
    pub(super) miss: u64,
    /// Tokens to within which that is known.
    pub(super) grain: u64,
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
        let turn = |each: &Candidate| self.turn(each.id, partner);
        let batch = |each: &Candidate| self.batch(each.id);
        let least_loaded = || candidates.iter().min_by_key(|each| (batch(each), turn(each)));
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
                let best = candidates.iter().min_by_key(|each| (each.miss, turn(each)));
                best.filter(|best| best.miss * 2 <= most && !is_overloaded(best)).or_else(least_loaded)
            }
            Policy::LeastWork => candidates.iter().min_by_key(|each| (self.work(each), turn(each))),
        };
        picked.copied().unwrap_or(candidates[0])
    }

    fn work(&self, candidate: &Candidate) -> u128 {
        self.nodes
            .get(candidate.id)
            .map_or(u128::MAX, |node| node.load.work_with(candidate.miss, candidate.grain))
    }

    fn batch(&self, id: NodeId) -> u64 {
        self.nodes.get(id).map_or(u64::MAX, |node| node.load.batch())
    }

    /// Who was taken least recently comes first: with this partner, then with any.
    fn turn(&self, id: NodeId, partner: Option<NodeId>) -> (u64, u64) {
        let together = partner.and_then(|partner| self.pairs.get(&(partner, id)).copied());
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
