//! A look at a scheduler's nodes, and what follows from it.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use super::{
    balancer::{Act, Balancer, State, View},
    indicators::{Capacity, Indicators, Sample},
    settings::Settings,
};
use crate::schedule::{Node, NodeId, NodeState, Prediction, Role, Scheduler};

/// So many requests that wait at a decode node, or prompts that wait to be handed over, are a full load.
const QUEUE: f64 = 16.0;

/// Nodes that can hand over to each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// As the operator names it.
    pub name: Arc<str>,
    /// How they hand over.
    pub connector: &'static str,
    /// The first model that they serve; empty while that is not known.
    pub model: Arc<str>,
}

impl Group {
    fn of(node: &Node) -> Self {
        Self {
            name: Arc::clone(&node.group),
            connector: node.connector.name(),
            model: node.models.first().cloned().unwrap_or_default(),
        }
    }
}

/// A balancer for all nodes that can hand over to each other.
#[derive(Debug)]
pub struct Balancers {
    settings: Settings,
    groups: BTreeMap<Group, Balancer>,
}

/// What a look has found and done.
#[derive(Debug, Clone, PartialEq)]
pub struct Looked {
    /// Of which nodes.
    pub group: Group,
    /// The state now.
    pub state: State,
    /// Mean scores of prefill and of decode nodes.
    pub scores: (Option<f64>, Option<f64>),
    /// Whether the state is another one than at the look before.
    pub is_new: bool,
    /// What was done.
    pub acts: Vec<Act>,
    /// Indicators that have a weight and that no node of this role tells: each is named once.
    pub untold: Vec<(Role, &'static str)>,
}

impl Balancers {
    /// Of nothing yet.
    pub fn new(settings: Settings) -> Self {
        Self { settings, groups: BTreeMap::new() }
    }

    /// What was set.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Of each group.
    pub fn groups(&self) -> impl Iterator<Item = (&Group, &Balancer)> {
        self.groups.iter()
    }

    /// Whether the nodes that this one can hand over to are overloaded, and it with them.
    pub fn is_overloaded(&self, node: &Node) -> bool {
        self.groups.get(&Group::of(node)).is_some_and(|balancer| balancer.state() == State::Overload)
    }

    /// A node's score and indicators, of the role that it has.
    pub fn of(&self, id: NodeId) -> Option<(Option<f64>, Indicators)> {
        self.groups.values().find_map(|balancer| Some((balancer.score(id), balancer.indicators(id)?)))
    }

    /// Looks at the scheduler's nodes, and has it do what follows.
    pub fn look(&mut self, scheduler: &mut Scheduler, now: Instant) -> Vec<Looked> {
        let mut views: BTreeMap<Group, Vec<View>> = BTreeMap::new();
        for (id, node) in scheduler.nodes() {
            views.entry(Group::of(node)).or_default().push(view(scheduler, id, node, &self.settings));
        }
        self.groups.retain(|group, _| views.contains_key(group));
        let mut all = Vec::new();
        for (group, views) in views {
            let balancer = self.groups.entry(group.clone()).or_insert_with(|| Balancer::new(self.settings));
            let before = balancer.state();
            let acts = balancer.tick(&views, now);
            let untold = balancer.untold(&views, now);
            acts.iter().for_each(|act| carry_out(scheduler, *act));
            let state = balancer.state();
            all.push(Looked {
                group,
                state,
                scores: balancer.scores(),
                is_new: state != before,
                acts,
                untold,
            });
        }
        let relief = self.settings.ttft.mul_f64(self.settings.relief);
        scheduler.set_relief((!relief.is_zero()).then_some(relief));
        scheduler.set_tpot(Some(self.settings.tpot));
        all
    }
}

fn carry_out(scheduler: &mut Scheduler, act: Act) {
    match act {
        Act::Drain(id, role) => {
            if let Some(node) = scheduler.node_mut(id) {
                node.next_role = Some(role);
            }
        }
        Act::Turn(id, role) => {
            if let Some(node) = scheduler.node_mut(id) {
                (node.role, node.next_role) = (role, None);
            }
        }
        // Nodes are not ours to start and end.
        Act::ScaleUp(_) | Act::ScaleDown(_) => {}
    }
}

fn view(scheduler: &Scheduler, id: NodeId, node: &Node, settings: &Settings) -> View {
    let load = &node.load;
    let prediction = scheduler.prediction(&node.class);
    let rate = prediction.and_then(Prediction::prefill_rate);
    let decodes = prediction.and_then(|prediction| prediction.requests_within(settings.tpot));
    View {
        id,
        role: node.role,
        next_role: node.next_role,
        // It has to be able to do both, and to be found as either.
        may_flip: node.may_flip && node.serves_alone() && node.pairs_with(node),
        is_ready: node.state == NodeState::Ready,
        requests: load.own_requests,
        leans_to_prefill: prediction.and_then(Prediction::leans_to_prefill),
        sample: Sample {
            prefill_tokens: load.prefilling(),
            decoding: load.decoding(),
            waiting: load.waiting.filter(|_| node.role == Role::Decode).map(|waiting| waiting as f64),
            cache_used: load.cache_percent.map(|percent| percent as f64 / 100.0),
            preempted: load.preempted,
            step_tokens: load.step_tokens,
            // Whoever waits to be handed over, and the GPU, nobody tells of yet.
            ..Sample::default()
        },
        capacity: Capacity {
            prefill_rate: rate.unwrap_or(settings.prefill_rate),
            decodes: decodes.map_or(settings.decodes, |decodes| decodes.min(settings.decodes)),
            step_tokens: settings.step_tokens,
            queue: QUEUE,
            ttft: settings.ttft,
        },
    }
}
