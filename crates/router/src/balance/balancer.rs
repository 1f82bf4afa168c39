//! From loads to a state, and from a state to what is done.
//!
//! ```text
//!                        decode nodes
//!                  low          middle        high
//!         low   underload  |   normal     | imbalanced: to decode
//! prefill mid   normal     |   normal     | imbalanced: to decode
//! nodes   high  imbalanced: to prefill    | overload
//! ```

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::{
    indicators::{Capacity, Indicators, NAMES, Sample, Window, score},
    level::{Latch, Level},
    settings::{RoleSettings, Settings},
    untold::Untold,
};
use crate::schedule::{NodeId, Role};

/// What the balancer is told of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// Which one.
    pub id: NodeId,
    /// What it does now.
    pub role: Role,
    /// The role that it takes when its requests are over; it gets no others until then.
    pub next_role: Option<Role>,
    /// Whether its role may change.
    pub may_flip: bool,
    /// Whether it gets requests, but for a change of its role.
    pub is_ready: bool,
    /// Requests that are not over.
    pub requests: u64,
    /// How much better it is at prefilling than at decoding, beside nodes of other classes; None while that is not known.
    pub leans_to_prefill: Option<f64>,
    /// Its load.
    pub sample: Sample,
    /// What it can take.
    pub capacity: Capacity,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The node gets no more requests, and another role once it has none.
    Drain(NodeId, Role),
    /// The node has this role from now on.
    Turn(NodeId, Role),
    /// One node more of this role is wanted: all have had too much to do for long.
    ScaleUp(Role),
    /// One node of this role could go: the others can take its work.
    ScaleDown(Role),
}

/// How the work fits the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// It does.
    #[default]
    Normal,
    /// Nodes of this role have too much to do, those of the other one do not.
    Imbalanced(Role),
    /// All have too much to do.
    Overload,
    /// All have so little to do that fewer would be enough.
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

/// Nodes are alike that differ by less than this factor in how much better they are at prefilling than at decoding.
const ALIKE: f64 = 1.25;

#[derive(Debug, Clone, Default)]
struct Watched {
    role: Option<Role>,
    /// When it took its role from this balancer; None if it had it before.
    since: Option<Instant>,
    window: Window,
}

/// Looks at all nodes now and then.
#[derive(Debug)]
pub struct Balancer {
    settings: Settings,
    nodes: HashMap<NodeId, Watched>,
    prefill: Latch,
    decode: Latch,
    scores: (Option<f64>, Option<f64>),
    state: State,
    since: Option<Instant>,
    flipped: Option<Instant>,
    /// When more or fewer nodes were asked for last.
    scaled: Option<Instant>,
    untold: (Untold, Untold),
}

impl Balancer {
    /// One that has seen nothing.
    pub fn new(settings: Settings) -> Self {
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
            untold: <(Untold, Untold)>::default(),
        }
    }

    /// What was set.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The state at the last look.
    pub fn state(&self) -> State {
        self.state
    }

    /// Mean scores of prefill and of decode nodes at the last look; None where there are none.
    pub fn scores(&self) -> (Option<f64>, Option<f64>) {
        self.scores
    }

    /// The means of a node's indicators, of the role that it has.
    pub fn indicators(&self, id: NodeId) -> Option<Indicators> {
        self.nodes.get(&id).map(|watched| watched.window.mean())
    }

    /// A node's score, of the role that it has.
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

    /// Indicators that have a weight, and that no node of the role has told for half a minute: each once. To be asked after a
    /// look.
    pub fn untold(&mut self, views: &[View], now: Instant) -> Vec<(Role, &'static str)> {
        let means = |role| -> Vec<Indicators> {
            serving(views, role).filter_map(|view| self.indicators(view.id)).collect()
        };
        let (prefill, decode) = (means(Role::Prefill), means(Role::Decode));
        let (of_prefill, of_decode) = &mut self.untold;
        let prefill = of_prefill.see(prefill.iter(), &self.settings.prefill.weights, now);
        let decode = of_decode.see(decode.iter(), &self.settings.decode.weights, now);
        let prefill = prefill.into_iter().map(|name| (Role::Prefill, name));
        prefill.chain(decode.into_iter().map(|name| (Role::Decode, name))).collect()
    }

    /// A look at all nodes.
    pub fn tick(&mut self, views: &[View], now: Instant) -> Vec<Act> {
        self.watch(views);
        self.scores = (self.mean(views, Role::Prefill), self.mean(views, Role::Decode));
        let Settings { level_dwell, prefill, decode, .. } = self.settings;
        let (of_prefill, of_decode) = self.scores;
        let prefill = self.prefill.see(of_prefill, &prefill.thresholds, level_dwell, now);
        let decode = self.decode.see(of_decode, &decode.thresholds, level_dwell, now);
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
            // The other role's requests come at once.
            acts.iter_mut().for_each(|act| {
                if let Act::Drain(id, role) = *act {
                    *act = Act::Turn(id, role);
                }
            });
        }
        for act in &acts {
            if let Act::Turn(id, role) = act {
                self.nodes.insert(*id, Watched { role: Some(*role), since: Some(now), ..Watched::default() });
            }
        }
        acts
    }

    fn watch(&mut self, views: &[View]) {
        self.nodes.retain(|id, _| views.iter().any(|view| view.id == *id));
        for view in views {
            let watched = self.nodes.entry(view.id).or_default();
            if watched.role != Some(view.role) {
                *watched = Watched { role: Some(view.role), ..Watched::default() };
            }
            let sample = match view.role {
                Role::Prefill => view.sample.of_prefill(&view.capacity),
                Role::Decode | Role::Worker => view.sample.of_decode(&view.capacity),
            };
            watched.window.push(sample, self.settings.window);
        }
    }

    /// Of the nodes that get requests.
    fn mean(&self, views: &[View], role: Role) -> Option<f64> {
        let scores = serving(views, role).filter_map(|view| self.score(view.id));
        let (sum, count) = scores.fold((0.0, 0.0), |(sum, count), score| (sum + score, count + 1.0));
        (count > 0.0).then(|| sum / count)
    }

    /// Nodes that have no role of their own get one: of both, the one that fewer have. A decode node serves alone, too. Where one
    /// node is all there is, it keeps serving all.
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

    /// A role that has lost its last node gets one of the other role's at once, if that has two.
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
                // Who is on its way there need not drain first, and who is leaving comes back.
                let coming = ready().find(|view| view.next_role == Some(empty));
                let leaving = || ready().find(|view| view.role == empty && view.next_role.is_some());
                let has_two = serving(views, other).nth(1).is_some();
                let spare = || serving(views, other).filter(|view| has_two && view.may_flip).min_by_key(work);
                let node = coming.or_else(leaving).or_else(spare)?;
                Some((node.id, empty))
            },
        )
    }

    /// A node of the role that has less to do goes over to the one that has too much, if the others of its role can take its
    /// work.
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
        // Those that are best at it, and of these the one with the least to do.
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

    /// What the mean score of a role's nodes would be if one of them were gone; None if none were left. What prefill nodes still
    /// decode, since they did so before, counts for decode nodes: whatever comes in its place will come to them.
    fn score_of_one_less(&self, views: &[View], role: Role) -> Option<f64> {
        let count = serving(views, role).count();
        let left = count.checked_sub(1).filter(|left| *left > 0)?;
        let others = views.iter().filter(|view| role == Role::Decode && view.role == Role::Prefill);
        let still: f64 = others.map(|view| view.sample.decodes(&view.capacity)).sum();
        let score = if role == Role::Prefill { self.scores.0? } else { self.scores.1? };
        Some((score * count as f64 + still) / left as f64)
    }

    /// Whether more or fewer nodes are wanted, each time that the state has lasted so long.
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

    /// Those of a role that may take another one.
    fn movable<'a>(&'a self, views: &'a [View], role: Role, now: Instant) -> impl Iterator<Item = &'a View> {
        let since = |view: &View| self.nodes.get(&view.id).and_then(|watched| watched.since);
        serving(views, role)
            .filter(|view| view.may_flip)
            .filter(move |view| is_over(since(view), self.settings.role_dwell, now))
    }

    /// A prefill and a decode node change places, if each is better at the other's work.
    fn swap(&self, views: &[View], now: Instant) -> Vec<Act> {
        let settings = &self.settings;
        if !settings.flips || !is_over(self.flipped, settings.flip_every.max(settings.role_dwell), now) {
            return Vec::new();
        }
        // Nodes that drain serve neither role meanwhile.
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

/// Those of a role that get requests.
fn serving(views: &[View], role: Role) -> impl Iterator<Item = &View> {
    views.iter().filter(move |view| view.is_ready && view.role == role && view.next_role.is_none())
}

/// Those whose requests are over.
fn drained(views: &[View]) -> impl Iterator<Item = Act> {
    let is_over = |view: &&View| view.requests == 0;
    views.iter().filter(is_over).filter_map(|view| Some(Act::Turn(view.id, view.next_role?)))
}
