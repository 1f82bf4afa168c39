//! The choice: which nodes serve a request, and why.
//!
//! 1. If the request can be split, and prefill and decode nodes are up that can pair:
//!    - a decode node alone, if it has fewer than `short_tokens` to prefill, or if no prefill node hands anything over;
//!    - else a prefill node, and a decode node for it. If the prompt would wait too long there and a decode node is free, that
//!      node alone.
//! 2. Else one node: a worker, else a decode node, else a prefill node.
//! 3. If there is none, as in 2 among nodes of last resort: those that are suspect, change their role, or have an open breaker.
//!
//! Among several candidates the policy decides ([`pick`](super::pick)). Each chosen node gets a [`Reservation`].
//!
//! The policies compare a node's *miss*, the tokens that it has to prefill. From KV events: tokens of the prompt - block size *
//! leading blocks that the node holds in GPU memory or can load. From texts: tokens of the prompt * (1 - bytes of known text /
//! bytes of text). A miss is at least 1; for least-work at least one block, or 256 bytes of text.

use std::time::{Duration, Instant};

use super::{
    cached::CachedPrefixes,
    choice::{Choice, Chosen, NoNode, Request, Why},
    load::CACHE_PERCENT_MAX,
    nodes::{Node, NodeId, Role},
    pick::Candidate,
    policy::Policy,
    pools::LoadCosts,
    prediction::Terms,
    reservation::{Leg, Reservation},
    scheduler::Scheduler,
};
use crate::body::MARK_BYTES;

impl Scheduler {
    /// Chooses nodes and reserves their load. Judges cached prefixes by the prompt's marks only.
    ///
    /// # Errors
    /// No node can serve it.
    pub fn choose(&mut self, request: &Request<'_>, now: Instant) -> Result<Choice, NoNode> {
        self.choose_with(request, CachedPrefixes::default(), now)
    }

    /// As [`Self::choose`], with the tokens of the prompt that engines report to have.
    ///
    /// # Errors
    /// No node can serve it.
    pub fn choose_with(
        &mut self,
        request: &Request<'_>,
        cached: CachedPrefixes,
        now: Instant,
    ) -> Result<Choice, NoNode> {
        self.cached = cached;
        if self.needs_prefixes() {
            self.index.matched(request.marks, &mut self.matched);
            self.pools.match_prompt(request.marks);
        }
        let choice = self.choose_pair(request, now).or_else(|| self.choose_one(request, now));
        let choice = choice.ok_or_else(|| self.no_node(request, now))?;
        // Noted now, so that equal prompts that come together meet. A decode node has the prompt only after its transfer.
        let (Chosen::One(first) | Chosen::Pair { prefill: first, .. }) = &choice.chosen;
        self.record_prefix(request.marks, first.node);
        Ok(choice)
    }

    /// Chooses another decode node for a prompt that this prefill node has prefilled, after the first one failed.
    pub fn choose_decode(
        &mut self,
        request: &Request<'_>,
        after: NodeId,
        now: Instant,
    ) -> Option<Reservation> {
        let prefill = self.nodes.get(after)?;
        let is_partner = |node: &Node| node.role == Role::Decode && node.pairs_with(prefill);
        // The prefill node may have become a decode node meanwhile.
        let tried: Vec<NodeId> = request.tried.iter().copied().chain([after]).collect();
        let request = &Request { tried: &tried, ..*request };
        let candidates = [false, true]
            .into_iter()
            .map(|is_last_resort| self.candidates(request, is_last_resort, now, is_partner))
            .find(|candidates| !candidates.is_empty())?;
        let candidates: Vec<_> = candidates.iter().map(|&each| each.handed_over()).collect();
        let decode = self.pick(&candidates, self.settings.decode_policy, Some(after));
        Some(self.reserve(request, decode, Leg::Decode, now))
    }

    fn choose_pair(&mut self, request: &Request<'_>, now: Instant) -> Option<Choice> {
        if request.one_node {
            return None;
        }
        let decodes = self.candidates(request, false, now, |node| node.role == Role::Decode);
        let prefills = self.candidates(request, false, now, |node| node.role == Role::Prefill);
        let has_partner = |id| decodes.iter().any(|decode| self.can_pair(id, decode.id));
        let prefills: Vec<_> = prefills.into_iter().filter(|each| has_partner(each.id)).collect();
        if prefills.is_empty() {
            return None;
        }
        let prompt_tokens = self.prompt_tokens(request);
        let serves_alone = |id| self.nodes.get(id).is_some_and(Node::serves_alone);
        let near: Vec<_> = decodes
            .iter()
            .filter(|each| each.miss < self.settings.short_tokens && serves_alone(each.id))
            .copied()
            .collect();
        if !near.is_empty() {
            let one = self.pick(&near, self.settings.decode_policy, None);
            let why = if prompt_tokens < self.settings.short_tokens { Why::Short } else { Why::Cached };
            return Some(self.choice_of_one(request, one, why, near.len(), now));
        }
        let hands_over = |id| self.nodes.get(id).is_some_and(|node| node.pairing.allows(now));
        let pairing: Vec<_> = prefills.iter().filter(|each| hands_over(each.id)).copied().collect();
        let alone: Vec<_> = decodes.iter().filter(|each| serves_alone(each.id)).copied().collect();
        if pairing.is_empty() && !alone.is_empty() {
            let one = self.pick(&alone, self.settings.policy, None);
            return Some(self.choice_of_one(request, one, Why::NoHandOff, alone.len(), now));
        }
        let prefills = if pairing.is_empty() { prefills } else { pairing };
        let prefill = self.pick(&prefills, self.settings.policy, None);
        if let Some(free) = self.free_decode(prefill, &decodes) {
            return Some(self.choice_of_one(request, free, Why::Relief, decodes.len(), now));
        }
        let partners: Vec<_> = decodes
            .into_iter()
            .filter(|each| self.can_pair(prefill.id, each.id))
            .map(Candidate::handed_over)
            .collect();
        let is_by_delay = self.settings.decode_policy == Policy::LeastDelay;
        let near = is_by_delay.then(|| self.near(prefill.id, &partners, prompt_tokens, now)).flatten();
        let partners = near.unwrap_or(partners);
        let decode = self.pick(&partners, self.settings.decode_policy, Some(prefill.id));
        Some(self.choice_of_pair(request, (prefill, decode), prefills.len(), now))
    }

    /// One node gets the whole request. `candidates`: the number of nodes that it was picked from.
    fn choice_of_one(
        &mut self,
        request: &Request<'_>,
        one: Candidate,
        why: Why,
        candidates: usize,
        now: Instant,
    ) -> Choice {
        Choice {
            chosen: Chosen::One(self.reserve(request, one, Leg::Whole, now)),
            why,
            prompt_tokens: self.prompt_tokens(request),
            cached_tokens: one.found,
            candidates,
        }
    }

    /// A prefill and a decode node get a leg each. `candidates`: the number of prefill nodes that one was picked from.
    fn choice_of_pair(
        &mut self,
        request: &Request<'_>,
        (prefill, decode): (Candidate, Candidate),
        candidates: usize,
        now: Instant,
    ) -> Choice {
        let prompt_tokens = self.prompt_tokens(request);
        let with = self.pairs.entry(prefill.id).or_default();
        with.resize(with.len().max(decode.id.slot() + 1), 0);
        with[decode.id.slot()] = self.choices + 1;
        if let Some(node) = self.nodes.get_mut(prefill.id) {
            node.pairing.sent(now);
        }
        let transfer = self.transfer(prefill.id, decode.id, prompt_tokens);
        let mut prefilling = self.reserve(request, prefill, Leg::Prefill, now);
        let mut decoding = self.reserve(request, decode, Leg::Decode, now);
        prefilling.transfer.clone_from(&transfer);
        decoding.transfer = transfer.filter(|_| request.streams);
        prefilling.await_at(&mut self.nodes, decoding.node);
        Choice {
            chosen: Chosen::Pair { prefill: prefilling, decode: decoding },
            why: Why::Pair,
            prompt_tokens,
            cached_tokens: prefill.found,
            candidates,
        }
    }

    /// The least loaded decode node with time and room for a prompt that would wait too long at this prefill node. None if it
    /// would not, or if no such node is predicted to be sooner.
    fn free_decode(&self, prefill: Candidate, decodes: &[Candidate]) -> Option<Candidate> {
        let relief = self.relief?;
        let node = self.nodes.get(prefill.id)?;
        let rate = self.predictions.get(&node.class)?.prefill_rate()?;
        let waits = node.load.prefilling() as f64 / rate * 1e3;
        if waits <= relief.as_secs_f64() * 1e3 {
            return None;
        }
        let is_free = |each: &&Candidate| {
            self.nodes.get(each.id).is_some_and(|node| {
                let has_room = node.load.cache_percent.is_none_or(|percent| percent < CACHE_PERCENT_MAX);
                let prediction = self.predictions.get(&node.class);
                let is_soon = prediction.is_some_and(|prediction| {
                    prediction.is_calibrated() && prediction.prefill(each.miss, each.found) < waits
                });
                node.serves_alone() && node.load.prefilling() == 0 && has_room && is_soon
            })
        };
        let batch = |each: &&Candidate| self.nodes.get(each.id).map_or(u64::MAX, |node| node.load.batch());
        decodes.iter().filter(is_free).min_by_key(batch).copied()
    }

    /// Tries workers first, then decode nodes, because they can prefill, then prefill nodes; then all of these as a last
    /// resort.
    fn choose_one(&mut self, request: &Request<'_>, now: Instant) -> Option<Choice> {
        let has_pairs = self.nodes.all().any(|(_, node)| node.role != Role::Worker);
        let why = match (request.one_node, has_pairs) {
            (true, true) => Why::MustStay,
            _ => Why::NoPair,
        };
        for is_last_resort in [false, true] {
            for role in [Role::Worker, Role::Decode, Role::Prefill] {
                let is_wanted = |node: &Node| node.role == role && node.serves_alone();
                let candidates = self.candidates(request, is_last_resort, now, is_wanted);
                if candidates.is_empty() {
                    continue;
                }
                let one = self.pick(&candidates, self.settings.policy, None);
                let is_other = role == Role::Prefill || role == Role::Decode && !request.one_node;
                let why = if is_other { Why::OtherRole } else { why };
                return Some(self.choice_of_one(request, one, why, candidates.len(), now));
            }
        }
        None
    }

    fn candidates(
        &self,
        request: &Request<'_>,
        is_last_resort: bool,
        now: Instant,
        is_wanted: impl Fn(&Node) -> bool,
    ) -> Vec<Candidate> {
        let prompt_tokens = self.prompt_tokens(request);
        let takes = |(id, node): &(NodeId, &Node)| {
            is_wanted(node)
                && request.model.is_none_or(|model| node.serves(model))
                && node.accepts(is_last_resort, now)
                && !request.tried.contains(id)
        };
        let is_doubted = |(_, node): &(NodeId, &Node)| node.doubts.count(now) > 0;
        // Otherwise two nodes that answer 500 would pass every request to each other, and never to a node that serves it.
        let avoids_doubted =
            !request.tried.is_empty() && self.nodes.all().filter(takes).any(|each| !is_doubted(&each));
        let mut load_costs = LoadCosts::new(&self.predictions);
        self.nodes
            .all()
            .filter(|each| takes(each) && !(avoids_doubted && is_doubted(each)))
            .map(|(id, node)| {
                let cached = self.cached_tokens(request, id);
                let pooled = node.pool.as_ref().map_or(0, |pool| self.pooled_tokens(request, pool.slot));
                // A rough match is capped at the prompt's length, or exactly known nodes would win every time. The engine
                // always computes the last token.
                let miss = prompt_tokens.saturating_sub(cached.max(pooled)).max(1);
                let found = prompt_tokens - miss.min(prompt_tokens);
                let loads = found.saturating_sub(cached);
                let grain = self.grain(id).min(prompt_tokens);
                let load_cost = load_costs.of(&node.class, loads, grain);
                Candidate { id, miss: miss + load_cost, found, loads, load_cost, grain }
            })
            .collect()
    }

    fn can_pair(&self, prefill: NodeId, decode: NodeId) -> bool {
        self.nodes.get(prefill).zip(self.nodes.get(decode)).is_some_and(|(one, other)| one.pairs_with(other))
    }

    fn reserve(
        &mut self,
        request: &Request<'_>,
        candidate: Candidate,
        leg: Leg,
        now: Instant,
    ) -> Reservation {
        self.choices += 1;
        // A prefill node answers one token, whatever the client asked for.
        let is_first_token = leg == Leg::Prefill || leg == Leg::Whole && request.streams;
        let Candidate { found, loads, .. } = candidate;
        // A load delays its own request only, because the node computes other requests meanwhile.
        let miss = candidate.miss.saturating_sub(candidate.load_cost);
        let first_token = self.nodes.get(candidate.id).filter(|_| is_first_token).map(|node| {
            let load = &node.load;
            (Terms::new(miss, found, load.own_tokens, load.batch()).loading(loads), now)
        });
        if let Some(node) = self.nodes.get_mut(candidate.id) {
            node.chosen = self.choices;
            node.breaker.sent(now);
        }
        let mut reservation = Reservation::take(&mut self.nodes, candidate.id, leg, miss);
        (reservation.first_token, reservation.streams) = (first_token, request.streams);
        if leg == Leg::Whole && !request.streams {
            reservation.begin_unseen(&mut self.nodes);
        }
        reservation
    }

    pub(super) fn tokens(&self, bytes: u32) -> u64 {
        u64::from(bytes / self.settings.bytes_per_token)
    }

    /// Tokens of the prompt that the node has: by its engine's events, else by the text that was sent there.
    fn cached_tokens(&self, request: &Request<'_>, id: NodeId) -> u64 {
        if let Some(cached) = self.cached.of(id) {
            return cached.tokens;
        }
        self.tokens_of_text(request, self.matched.get(id.slot()).copied().unwrap_or(0))
    }

    /// Tokens of the prompt that a pool has: by its engines' events, else by the text that one of them has prefilled.
    fn pooled_tokens(&self, request: &Request<'_>, pool: usize) -> u64 {
        let reported = self.cached.pooled(pool);
        reported.unwrap_or_else(|| self.tokens_of_text(request, self.pools.bytes_of(pool)))
    }

    fn tokens_of_text(&self, request: &Request<'_>, bytes: u32) -> u64 {
        match (self.cached.prompt_tokens, request.marks.last()) {
            // Nodes known by text compete with nodes known exactly: their share of the text counts as the same share of the
            // tokens.
            (Some(tokens), Some(last)) => tokens * u64::from(bytes) / u64::from(last.bytes).max(1),
            _ => self.tokens(bytes),
        }
    }

    /// Resolution of [`Self::cached_tokens`], in tokens: a block of the node's engine, or the distance of two marks.
    fn grain(&self, id: NodeId) -> u64 {
        self.cached.of(id).map_or_else(|| self.tokens(MARK_BYTES as u32), |cached| cached.block_size)
    }

    fn prompt_tokens(&self, request: &Request<'_>) -> u64 {
        let by_text = || self.tokens(request.marks.last().map_or(0, |mark| mark.bytes));
        self.cached.prompt_tokens.unwrap_or_else(by_text).max(1)
    }

    fn no_node(&self, request: &Request<'_>, now: Instant) -> NoNode {
        if let Some(model) = request.model {
            let is_served = self.nodes.all().any(|(_, node)| node.serves(model));
            let is_any_known = self.nodes.all().any(|(_, node)| !node.models.is_empty());
            if is_any_known && !is_served {
                return NoNode::UnknownModel { model: model.to_owned() };
            }
        }
        let waits = self.nodes.all().filter_map(|(_, node)| node.breaker.wait(now));
        NoNode::NoneLeft { retry_after: waits.min().unwrap_or(Duration::from_secs(1)) }
    }
}
