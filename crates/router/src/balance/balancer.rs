//! The balancer of one group: from the levels of both roles to a state, and from the state to acts.
//!
//! ```text
//!                        decode nodes
//!                  low          middle        high
//!         low   underload  |   normal     | imbalanced: to decode
//! prefill mid   normal     |   normal     | imbalanced: to decode
//! nodes   high  imbalanced: to prefill    | overload
//! ```
//! A tick returns, in this order:
//!
//! 1. roles for workers that have none yet, and the new role of each node that has drained;
//! 2. a node for a role that has lost its last one;
//! 3. only if there was nothing of 1 and 2: one flip towards the overloaded role; else a swap of two nodes that are each
//!    better at the other's work;
//! 4. a wish for one node more or less, if an overload or underload has lasted.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::{
    indicators::{Capacity, Indicators, NAMES, Sample, Window, score},
    level::{Latch, Level},
    missing::MissingIndicators,
    settings::{BalanceSettings, RoleSettings},
};
use crate::schedule::{NodeId, Role};

/// A node as the balancer sees it at one tick.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// The scheduler's id.
    pub id: NodeId,
    /// The role that it has now.
    pub role: Role,
    /// The role that it takes once its requests have ended; until then it gets no new ones.
    pub next_role: Option<Role>,
    /// Whether the balancer may change its role.
    pub may_flip: bool,
    /// Whether it is up; a node that changes its role may be ready and get no requests.
    pub is_ready: bool,
    /// Legs of this router that have not ended.
    pub requests: u64,
    /// How much better it is at prefilling than at decoding: [`Prediction::leans_to_prefill`](crate::schedule::Prediction).
    /// None until learned.
    pub leans_to_prefill: Option<f64>,
    /// Its load at this tick.
    pub sample: Sample,
    /// The load that it can take.
    pub capacity: Capacity,
}

/// A change that the caller has to carry out, or a wish for the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The node gets no new requests, and this role once its requests have ended.
    Drain(NodeId, Role),
    /// The node takes this role now.
    Turn(NodeId, Role),
    /// One node more of this role is wanted, because both roles have been overloaded for long.
    ScaleUp(Role),
    /// One node of this role could go, because the others can take its work.
    ScaleDown(Role),
}

/// How well the nodes of both roles fit the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// Neither role has too much to do, and not both have too little.
    #[default]
    Normal,
    /// The nodes of this role have too much to do; those of the other one do not.
    Imbalanced(Role),
    /// Both roles have too much to do.
    Overload,
    /// Both roles have so little to do that fewer nodes would be enough.
    Underload,
}

impl State {
    /// As in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Imbalanced(Role::Prefill) => "imbalanced: too few prefill nodes",
            Self::Imbalanced(_) => "imbalanced: too few decode nodes",
            Self::Overload => "overload",
            Self::Underload => "underload",
        }
    }

    fn of(prefill: Level, decode: Level) -> Self {
        match (prefill, decode) {
            (Level::High, Level::High) => Self::Overload,
            (Level::High, _) => Self::Imbalanced(Role::Prefill),
            (_, Level::High) => Self::Imbalanced(Role::Decode),
            (Level::Low, Level::Low) => Self::Underload,
            _ => Self::Normal,
        }
    }
}

/// Nodes whose `leans_to_prefill` differ by no more than this factor count as equally good at both roles.
const ALIKE: f64 = 1.25;

#[derive(Debug, Clone, Default)]
struct NodeWindow {
    /// The role that the window's samples are of.
    role: Option<Role>,
    /// When this balancer gave it its role; None if it did not.
    since: Option<Instant>,
    window: Window,
}

/// Decides the roles of one group's nodes, tick by tick.
#[derive(Debug)]
pub struct Balancer {
    settings: BalanceSettings,
    nodes: HashMap<NodeId, NodeWindow>,
    prefill: Latch,
    decode: Latch,
    /// Means of prefill and of decode nodes.
    scores: (Option<f64>, Option<f64>),
    state: State,
    /// When `state` began.
    since: Option<Instant>,
    /// When a node last changed its role by a refill, flip or swap.
    flipped: Option<Instant>,
    /// When this state last asked for more or fewer nodes.
    scaled: Option<Instant>,
    /// Those of prefill and of decode nodes.
    missing: (MissingIndicators, MissingIndicators),
}

impl Balancer {
    /// A balancer before its first tick.
    pub fn new(settings: BalanceSettings) -> Self {
        Self {
            settings,
            nodes: HashMap::new(),
            prefill: Latch::default(),
            decode: Latch::default(),
            scores: (None, None),
            state: State::default(),
            since: None,
            flipped: None,
            scaled: None,
            missing: <(MissingIndicators, MissingIndicators)>::default(),
        }
    }

    /// As given to [`Self::new`].
    pub fn settings(&self) -> &BalanceSettings {
        &self.settings
    }

    /// At the last tick.
    pub fn state(&self) -> State {
        self.state
    }

    /// Mean scores of prefill and of decode nodes at the last tick; None for a role without nodes.
    pub fn scores(&self) -> (Option<f64>, Option<f64>) {
        self.scores
    }

    /// The means of a node's indicators in its present role.
    pub fn indicators(&self, id: NodeId) -> Option<Indicators> {
        self.nodes.get(&id).map(|watched| watched.window.mean())
    }

    /// A node's score in its present role. None for a worker.
    pub fn score(&self, id: NodeId) -> Option<f64> {
        let watched = self.nodes.get(&id)?;
        let role = watched.role.filter(|role| *role != Role::Worker)?;
        score(&watched.window.mean(), self.weights(role))
    }

    fn weights(&self, role: Role) -> &[f64; NAMES.len()] {
        match role {
            Role::Prefill => &self.settings.prefill.weights,
            _ => &self.settings.decode.weights,
        }
    }

    /// Indicators with a weight that no node of the role has reported for half a minute, each once. Call it after
    /// [`Self::tick`].
    pub fn missing_indicators(&mut self, views: &[View], now: Instant) -> Vec<(Role, &'static str)> {
        let means = |role| -> Vec<Indicators> {
            serving(views, role).filter_map(|view| self.indicators(view.id)).collect()
        };
        let (prefill, decode) = (means(Role::Prefill), means(Role::Decode));
        let (of_prefill, of_decode) = &mut self.missing;
        let prefill = of_prefill.observe(prefill.iter(), &self.settings.prefill.weights, now);
        let decode = of_decode.observe(decode.iter(), &self.settings.decode.weights, now);
        let prefill = prefill.into_iter().map(|name| (Role::Prefill, name));
        prefill.chain(decode.into_iter().map(|name| (Role::Decode, name))).collect()
    }

    /// Takes in the views of all nodes, and decides. Returns the acts to carry out, in order.
    pub fn tick(&mut self, views: &[View], now: Instant) -> Vec<Act> {
        self.watch(views);
        self.scores = (self.mean(views, Role::Prefill), self.mean(views, Role::Decode));
        let BalanceSettings { level_dwell, prefill, decode, .. } = self.settings;
        let (of_prefill, of_decode) = self.scores;
        let prefill = self.prefill.update(of_prefill, &prefill.thresholds, level_dwell, now);
        let decode = self.decode.update(of_decode, &decode.thresholds, level_dwell, now);
        let state = State::of(prefill, decode);
        if state != self.state {
            (self.state, self.since, self.scaled) = (state, Some(now), None);
        }
        let mut acts: Vec<Act> = self.first_roles(views).into_iter().chain(drained(views)).collect();
        let turns_to = |role| acts.iter().any(|act| matches!(act, Act::Turn(_, to) if *to == role));
        let refill = self.refill(views).filter(|(_, role)| !turns_to(*role));
        let more = match refill {
            Some((id, role)) => vec![Act::Turn(id, role)],
            None if acts.is_empty() => {
                self.flip(views, now).map_or_else(|| self.swap(views, now), |flip| vec![flip])
            }
            None => Vec::new(),
        };
        if !more.is_empty() {
            self.flipped = Some(now);
            acts.extend(more);
        }
        if let Some(scale) = self.scale(views, now) {
            self.scaled = Some(now);
            acts.push(scale);
        }
        if !self.settings.drains {
            // Without draining, the node takes the other role's requests at once.
            acts.iter_mut().for_each(|act| {
                if let Act::Drain(id, role) = *act {
                    *act = Act::Turn(id, role);
                }
            });
        }
        for act in &acts {
            if let Act::Turn(id, role) = act {
                self.nodes
                    .insert(*id, NodeWindow { role: Some(*role), since: Some(now), ..NodeWindow::default() });
            }
        }
        acts
    }

    fn watch(&mut self, views: &[View]) {
        self.nodes.retain(|id, _| views.iter().any(|view| view.id == *id));
        for view in views {
            let watched = self.nodes.entry(view.id).or_default();
            if watched.role != Some(view.role) {
                *watched = NodeWindow { role: Some(view.role), ..NodeWindow::default() };
            }
            let sample = match view.role {
                Role::Prefill => view.sample.of_prefill(&view.capacity),
                Role::Decode | Role::Worker => view.sample.of_decode(&view.capacity),
            };
            watched.window.push(sample, self.settings.window);
        }
    }

    /// Mean score of the role's nodes that get requests.
    fn mean(&self, views: &[View], role: Role) -> Option<f64> {
        let scores = serving(views, role).filter_map(|view| self.score(view.id));
        let (sum, count) = scores.fold((0.0, 0.0), |(sum, count), score| (sum + score, count + 1.0));
        (count > 0.0).then(|| sum / count)
    }

    /// Gives each worker the role that fewer nodes have; at a tie decode, because a decode node also serves alone. A single
    /// node stays a worker and serves everything.
    fn first_roles(&self, views: &[View]) -> Vec<Act> {
        let ready = || views.iter().filter(|view| view.is_ready);
        if !self.settings.flips || ready().count() < 2 {
            return Vec::new();
        }
        let count = |role| ready().filter(|view| view.next_role.unwrap_or(view.role) == role).count();
        let (mut prefill, mut decode) = (count(Role::Prefill), count(Role::Decode));
        let free = ready().filter(|view| view.may_flip && view.role == Role::Worker);
        free.map(|view| {
            let role = if prefill < decode { Role::Prefill } else { Role::Decode };
            *(if role == Role::Prefill { &mut prefill } else { &mut decode }) += 1;
            Act::Turn(view.id, role)
        })
        .collect()
    }

    /// Gives a role that has lost its last node one of the other role's nodes at once, if that role has two.
    fn refill(&self, views: &[View]) -> Option<(NodeId, Role)> {
        if !self.settings.flips {
            return None;
        }
        let work = |view: &&View| (view.sample.prefill_tokens.saturating_add(view.sample.decoding), view.id);
        let ready = || views.iter().filter(|view| view.is_ready);
        [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)].into_iter().find_map(
            |(empty, other)| {
                if serving(views, empty).next().is_some() {
                    return None;
                }
                // A node that is draining towards this role takes it now; one that is draining away from it stays.
                let coming = ready().find(|view| view.next_role == Some(empty));
                let leaving = || ready().find(|view| view.role == empty && view.next_role.is_some());
                let has_two = serving(views, other).nth(1).is_some();
                let spare = || serving(views, other).filter(|view| has_two && view.may_flip).min_by_key(work);
                let node = coming.or_else(leaving).or_else(spare)?;
                Some((node.id, empty))
            },
        )
    }

    /// Moves a node to the overloaded role, if the other nodes of its own role can take its work.
    fn flip(&self, views: &[View], now: Instant) -> Option<Act> {
        let settings = &self.settings;
        let State::Imbalanced(hot) = self.state else { return None };
        let under_way = views.iter().filter(|view| view.next_role.is_some()).count();
        let may = settings.flips
            && under_way < settings.flips_at_once
            && is_over(self.since, settings.flip_after, now)
            && is_over(self.flipped, settings.flip_every, now);
        if !may {
            return None;
        }
        let (cold, thresholds) = match hot {
            Role::Prefill => (Role::Decode, settings.decode.thresholds),
            _ => (Role::Prefill, settings.prefill.thresholds),
        };
        if self.score_of_one_less(views, cold)? >= thresholds.high_exit {
            return None;
        }
        let may_turn: Vec<&View> = self.movable(views, cold, now).collect();
        // Among the nodes that are best at the new role, takes the one with the least to do.
        let leans = |view: &View| match (view.leans_to_prefill, hot) {
            (None, _) => None,
            (Some(leans), Role::Prefill) => Some(leans),
            (Some(leans), _) => Some(1.0 / leans),
        };
        let best = may_turn.iter().filter_map(|view| leans(view)).fold(0.0, f64::max);
        let is_good = |view: &&&View| leans(view).is_none_or(|leans| leans * ALIKE >= best);
        let work = |view: &&&View| (view.sample.prefill_tokens.saturating_add(view.sample.decoding), view.id);
        let node = may_turn.iter().filter(is_good).min_by_key(work)?;
        Some(Act::Drain(node.id, hot))
    }

    /// The mean score of a role's nodes if one of them were gone; None if none were left. Prefill nodes may still decode
    /// requests from before their flip. These count for the decode nodes, because their successors will come there.
    fn score_of_one_less(&self, views: &[View], role: Role) -> Option<f64> {
        let count = serving(views, role).count();
        let left = count.checked_sub(1).filter(|left| *left > 0)?;
        let others = views.iter().filter(|view| role == Role::Decode && view.role == Role::Prefill);
        let still: f64 = others.map(|view| view.sample.decodes(&view.capacity)).sum();
        let score = if role == Role::Prefill { self.scores.0? } else { self.scores.1? };
        Some((score * count as f64 + still) / left as f64)
    }

    /// Asks for one node more or less, once for each `scale_up_after` or `scale_down_after` that the state lasts.
    fn scale(&self, views: &[View], now: Instant) -> Option<Act> {
        let lasts = |time| is_over(self.since, time, now) && is_over(self.scaled, time, now);
        let (prefill, decode) = (self.scores.0?, self.scores.1?);
        let high = |settings: &RoleSettings| settings.thresholds.high_enter;
        match self.state {
            State::Overload if lasts(self.settings.scale_up_after) => {
                let is_prefill =
                    prefill / high(&self.settings.prefill) > decode / high(&self.settings.decode);
                Some(Act::ScaleUp(if is_prefill { Role::Prefill } else { Role::Decode }))
            }
            State::Underload if lasts(self.settings.scale_down_after) => {
                let after = |role, settings: &RoleSettings| {
                    let after = self.score_of_one_less(views, role)?;
                    (after < settings.thresholds.low_exit).then_some((after, role))
                };
                let prefill = after(Role::Prefill, &self.settings.prefill);
                let decode = after(Role::Decode, &self.settings.decode);
                let least = prefill.into_iter().chain(decode).min_by(|one, other| one.0.total_cmp(&other.0));
                least.map(|(_, role)| Act::ScaleDown(role))
            }
            _ => None,
        }
    }

    /// The role's nodes that may change it now.
    fn movable<'a>(&'a self, views: &'a [View], role: Role, now: Instant) -> impl Iterator<Item = &'a View> {
        let since = |view: &View| self.nodes.get(&view.id).and_then(|watched| watched.since);
        serving(views, role)
            .filter(|view| view.may_flip)
            .filter(move |view| is_over(since(view), self.settings.role_dwell, now))
    }

    /// Swaps the roles of a prefill and a decode node, if each is better at the other's work.
    fn swap(&self, views: &[View], now: Instant) -> Vec<Act> {
        let settings = &self.settings;
        if !settings.flips || !is_over(self.flipped, settings.flip_every.max(settings.role_dwell), now) {
            return Vec::new();
        }
        // Nodes that drain serve neither role meanwhile, so one more has to stay.
        let least_left = if settings.drains { 2 } else { 1 };
        let is_enough = |role| serving(views, role).count() >= least_left;
        let is_under_way = views.iter().any(|view| view.next_role.is_some());
        if is_under_way || !is_enough(Role::Prefill) || !is_enough(Role::Decode) {
            return Vec::new();
        }
        let leaning =
            |role| self.movable(views, role, now).filter_map(|view| Some((view.leans_to_prefill?, view.id)));
        let least = leaning(Role::Prefill).min_by(|one, other| one.0.total_cmp(&other.0));
        let most = leaning(Role::Decode).max_by(|one, other| one.0.total_cmp(&other.0));
        match (least, most) {
            (Some((least, prefill)), Some((most, decode))) if most > ALIKE * least => {
                vec![Act::Drain(prefill, Role::Decode), Act::Drain(decode, Role::Prefill)]
            }
            _ => Vec::new(),
        }
    }
}

fn is_over(since: Option<Instant>, time: Duration, now: Instant) -> bool {
    since.is_none_or(|since| now.saturating_duration_since(since) >= time)
}

/// The role's nodes that get requests.
fn serving(views: &[View], role: Role) -> impl Iterator<Item = &View> {
    views.iter().filter(move |view| view.is_ready && view.role == role && view.next_role.is_none())
}

/// The new role of each node whose requests have ended.
fn drained(views: &[View]) -> impl Iterator<Item = Act> {
    let is_over = |view: &&View| view.requests == 0;
    views.iter().filter(is_over).filter_map(|view| Some(Act::Turn(view.id, view.next_role?)))
}
