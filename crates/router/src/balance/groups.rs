//! One balancer for each group of nodes that can pair. A tick takes all groups' views from the scheduler, has each balancer
//! decide, and carries the acts out at the scheduler.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use super::{
    balancer::{Act, Balancer, State, View},
    indicators::{Capacity, Indicators, Sample},
    settings::BalanceSettings,
};
use crate::schedule::{Node, NodeId, NodeState, Prediction, Role, Scheduler};

/// Requests waiting at a decode node, or prompts waiting for their transfer, that count as a full load.
const QUEUE: f64 = 16.0;

/// Nodes that can pair: one group, one connector, one model.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// As the operator names it.
    pub name: Arc<str>,
    /// The connector's name.
    pub connector: &'static str,
    /// The first model that they serve; empty until their first answer.
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

/// The balancers of all groups.
#[derive(Debug)]
pub struct Balancers {
    settings: BalanceSettings,
    groups: BTreeMap<Group, Balancer>,
}

/// One group's state after a tick, and the acts of that tick.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupReport {
    /// The group whose nodes these are.
    pub group: Group,
    /// The state after the tick.
    pub state: State,
    /// Mean scores of prefill and of decode nodes; None for a role without nodes.
    pub scores: (Option<f64>, Option<f64>),
    /// Whether the tick changed the state.
    pub is_new: bool,
    /// In the order in which they were carried out.
    pub acts: Vec<Act>,
    /// Indicators with a weight that no node of this role reports. Each is listed in one report only.
    pub missing: Vec<(Role, &'static str)>,
}

impl Balancers {
    /// No groups yet; ticks add them.
    pub fn new(settings: BalanceSettings) -> Self {
        Self { settings, groups: BTreeMap::new() }
    }

    /// The settings of all groups.
    pub fn settings(&self) -> &BalanceSettings {
        &self.settings
    }

    /// Each group's balancer.
    pub fn groups(&self) -> impl Iterator<Item = (&Group, &Balancer)> {
        self.groups.iter()
    }

    /// Whether both roles of the node's group are overloaded.
    pub fn is_overloaded(&self, node: &Node) -> bool {
        self.groups.get(&Group::of(node)).is_some_and(|balancer| balancer.state() == State::Overload)
    }

    /// A node's score and indicators in its present role. None for a node that no tick has seen.
    pub fn of(&self, id: NodeId) -> Option<(Option<f64>, Indicators)> {
        self.groups.values().find_map(|balancer| Some((balancer.score(id), balancer.indicators(id)?)))
    }

    /// Runs all balancers over the scheduler's nodes, and carries out their acts there. Call it every
    /// [`BalanceSettings::every`].
    pub fn tick(&mut self, scheduler: &mut Scheduler, now: Instant) -> Vec<GroupReport> {
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
            let missing = balancer.missing_indicators(&views, now);
            acts.iter().for_each(|act| carry_out(scheduler, *act));
            let state = balancer.state();
            all.push(GroupReport {
                group,
                state,
                scores: balancer.scores(),
                is_new: state != before,
                acts,
                missing,
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
        // For the operator's webhook, because the router starts and stops no engines.
        Act::ScaleUp(_) | Act::ScaleDown(_) => {}
    }
}

fn view(scheduler: &Scheduler, id: NodeId, node: &Node, settings: &BalanceSettings) -> View {
    let load = &node.load;
    let prediction = scheduler.prediction(&node.class);
    let rate = prediction.and_then(Prediction::prefill_rate);
    let decodes = prediction.and_then(|prediction| prediction.requests_within(settings.tpot));
    View {
        id,
        role: node.role,
        next_role: node.next_role,
        // It must be able to serve both roles, and to be reached in either.
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
            // No source reports prompts that wait for their transfer, or the use of the GPU, yet.
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
