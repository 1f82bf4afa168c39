//! Replays a trace through a scheduler and a fleet of simulated engines, event by event in virtual time.
//!
//! ```text
//!   Arrives --> choose --> Starts --> StepOver* --> one node: ended after the last token
//!                 ^                       '-------> pair: first token --> HandedOver --> StepOver* --> ended
//!                 '--- a node dies before the client has got a token: at most ATTEMPTS times
//! ```
//! Further events: Scrape and Metrics (the router reads engines' metrics), BalanceTick, and nodes that join, drain, die and
//! return.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_policy::spread;
use kvlane_router::balance::{self, BalanceSettings, Balancers};
use kvlane_router::body::Mark;
use kvlane_router::schedule::{
    Cached, CachedPrefixes, Chosen, Connector, LegEnd, Node, NodeId, NodeState, Reported,
    Request as ToSchedule, Reservation, Role, Scheduler, SchedulerSettings,
};

use crate::costs::milliseconds;
use crate::engine::{Class, Engine, Job, StepOutput};
use crate::lab::{Chooser, Lab};
use crate::outcome::Served;
use crate::pool::{Pool, PoolSetup};
use crate::trace::Trace;

/// Most attempts of a request whose nodes die.
const ATTEMPTS: u32 = 3;

/// A node of the fleet.
#[derive(Debug, Clone)]
pub struct NodeSetup {
    /// At the start; the balancer may change it.
    pub role: Role,
    /// Hardware and settings of its engine.
    pub class: Arc<Class>,
    /// Decides whether a transfer stays within a host.
    pub host: String,
    /// Index into [`Setup::pools`].
    pub pool: Option<usize>,
    /// When it dies, and after which time it returns with an empty cache. None: it does not.
    pub dies: Option<(Duration, Option<Duration>)>,
    /// When it joins, with an empty cache. None: it is there from the start.
    pub joins: Option<Duration>,
    /// When it starts to drain: it finishes its requests and gets no new ones. None: never.
    pub drains: Option<Duration>,
}

impl NodeSetup {
    /// A node that is there all the time.
    pub fn new(role: Role, class: Arc<Class>) -> Self {
        Self { role, class, host: String::new(), pool: None, dies: None, joins: None, drains: None }
    }
}

/// The time of a prompt's transfer from a prefill to a decode node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransferSetup {
    /// Milliseconds from the prefill node's last token until the decode node has all: the part that does not depend on the
    /// prompt's length.
    pub base_ms: f64,
    /// Further milliseconds for each token of the prompt.
    pub token_ms: f64,
    /// The same between nodes of different hosts. None: as `token_ms`.
    pub far_token_ms: Option<f64>,
}

impl Default for TransferSetup {
    /// From the last layer to landed, over sockets: bench/pd/results/2026-11-26-handoff-10000-tokens.json, and a round trip.
    fn default() -> Self {
        Self { base_ms: 2.0, token_ms: 0.001, far_token_ms: None }
    }
}

/// The signals by which the router hears of nodes, and their delays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signals {
    /// Time between two scrapes of their metrics.
    pub every: Duration,
    /// Age of a scrape's answer when it comes.
    pub late: Duration,
    /// Percent of the answers that do not come.
    pub lost_percent: u8,
    /// Time from a node's death until the router stops sending it requests.
    pub death: Duration,
    /// Whether engines report their blocks, at once and without loss. If not, the router goes by the prompts that it has sent.
    pub kv_events: bool,
}

impl Default for Signals {
    fn default() -> Self {
        let every = Duration::from_millis(1000);
        Self {
            every,
            late: Duration::from_millis(5),
            lost_percent: 0,
            death: Duration::from_secs(3),
            kv_events: false,
        }
    }
}

/// A fleet and its router.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Numbered from 0; at least one.
    pub nodes: Vec<NodeSetup>,
    /// Pools that nodes share.
    pub pools: Vec<PoolSetup>,
    /// The router's scheduler.
    pub scheduler: SchedulerSettings,
    /// Factor by which requests come faster than they were recorded.
    pub speed: f64,
    /// Between prefill and decode nodes.
    pub transfer: TransferSetup,
    /// From all nodes to the router.
    pub signals: Signals,
    /// Settings of the router's balancer. None: nodes keep their roles.
    pub balance: Option<BalanceSettings>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Joins(usize),
    Drains(usize),
    Dies(usize),
    Returns(usize),
    /// The router notices that a node is dead.
    DeathNoticed(usize),
    Arrives(usize),
    /// A request reaches its engine: node, request, attempt.
    Starts(usize, usize, u32),
    /// A node's step has ended: node, life.
    StepOver(usize, u32),
    /// A prompt is ready at a node, so that a step may begin.
    Wake(usize),
    /// A transfer has ended: request, attempt.
    HandedOver(usize, u32),
    /// The router scrapes all nodes.
    Scrape,
    /// A node's answer to a scrape reaches the router.
    Metrics(usize, Scraped),
    BalanceTick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Scraped {
    requests: u64,
    waiting: u64,
    cache_percent: u64,
    /// The router's own requests at the node before the scrape.
    own_before: u64,
}

/// A request's present attempt.
#[derive(Debug, Default)]
struct Open {
    prefill: Option<Reservation>,
    decode: Option<Reservation>,
    attempt: u32,
    /// Nodes that died with an earlier attempt.
    tried: Vec<NodeId>,
    is_pair: bool,
    /// When its nodes were chosen.
    chosen: Duration,
}

struct SimulatedNode {
    engine: Engine,
    id: NodeId,
    /// Counts its deaths, so that the end of a step from before one is ignored.
    life: u32,
    is_alive: bool,
}

struct World<'a, L> {
    trace: &'a Trace,
    setup: &'a Setup,
    start: Instant,
    scheduler: Scheduler,
    balancer: Option<Balancers>,
    lab: &'a mut L,
    nodes: Vec<SimulatedNode>,
    pools: Vec<Pool>,
    marks: Vec<Vec<Mark>>,
    open: Vec<Open>,
    served: Vec<Served>,
    /// By time, then by number.
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    /// Number of the last event.
    event_number: u64,
    /// Requests that have not ended.
    left: usize,
    rng: u64,
    role_changes: Vec<RoleChange>,
}

/// The result of a replay.
#[derive(Debug, Clone, Default)]
pub struct Replayed {
    /// One for each request of the trace, in its order.
    pub served: Vec<Served>,
    /// Ordered by time.
    pub role_changes: Vec<RoleChange>,
}

/// The balancer changed a node's role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleChange {
    /// From the replay's start.
    pub at: Duration,
    /// Number of the node.
    pub node: usize,
    /// Its role from then on.
    pub role: Role,
}

/// Replays a whole trace. Calls `progress` from time to time with the number of requests that have ended since the last call.
pub fn replay(trace: &Trace, setup: &Setup, progress: impl FnMut(usize)) -> Replayed {
    replay_in(&mut (), trace, setup, progress)
}

/// As [`replay`], with a router that an experiment changes. An experiment that chooses nodes needs a fleet of workers.
pub fn replay_in(
    lab: &mut impl Lab,
    trace: &Trace,
    setup: &Setup,
    mut progress: impl FnMut(usize),
) -> Replayed {
    let mut world = World::new(trace, setup, lab);
    let mut reported = world.left;
    while world.left > 0 {
        let Some(Reverse((now, _, event))) = world.events.pop() else { break };
        world.handle(now, event);
        if reported - world.left >= 256 {
            progress(reported - world.left);
            reported = world.left;
        }
    }
    progress(reported - world.left);
    debug_assert!(world.left > 0 || world.is_at_rest(), "a reservation of an ended request is left");
    Replayed { served: world.served, role_changes: world.role_changes }
}

impl<'a, L: Lab> World<'a, L> {
    fn new(trace: &'a Trace, setup: &'a Setup, lab: &'a mut L) -> Self {
        let mut scheduler = Scheduler::new(setup.scheduler.clone());
        let pools: Vec<Pool> = setup.pools.iter().map(|pool| Pool::new(pool, trace.block_tokens)).collect();
        let nodes = setup.nodes.iter().enumerate().map(|(number, node)| {
            let id = scheduler.add(scheduler_node(number, node, lab.class(&node.class.name)));
            if let Some(pool) = reported_pool(setup, node) {
                scheduler.set_pool(id, Some(&pool.name.as_str().into()), true);
            }
            let pool = node.pool.and_then(|pool| pools.get(pool)).cloned();
            let engine = Engine::new(Arc::clone(&node.class), trace.block_tokens, pool);
            SimulatedNode { engine, id, life: 0, is_alive: true }
        });
        let nodes = nodes.collect();
        let count = trace.requests.len();
        let bytes = setup.scheduler.bytes_per_token.max(1);
        let marks = trace.requests.iter().map(|request| {
            let end = |index: usize| ((index as u64 + 1) * trace.block_tokens).min(request.prompt_tokens);
            let mark = |(index, hash): (usize, &u64)| Mark {
                hash: *hash,
                bytes: u32::try_from(end(index) * u64::from(bytes)).unwrap_or(u32::MAX),
            };
            request.blocks.iter().enumerate().map(mark).collect()
        });
        let served = trace.requests.iter().map(|request| Served {
            at: request.at.div_f64(setup.speed.max(1e-9)),
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            ..Served::default()
        });
        let mut world = World {
            trace,
            setup,
            start: Instant::now(),
            scheduler,
            balancer: setup.balance.map(Balancers::new),
            lab,
            nodes,
            pools,
            marks: marks.collect(),
            open: (0..count).map(|_| Open::default()).collect(),
            served: served.collect(),
            events: BinaryHeap::new(),
            event_number: 0,
            left: count,
            role_changes: Vec::new(),
            rng: setup.scheduler.seed ^ 0x9e37_79b9_7f4a_7c15,
        };
        for request in 0..count {
            world.later(world.served[request].at, Event::Arrives(request));
        }
        for (number, node) in setup.nodes.iter().enumerate() {
            node.joins.into_iter().for_each(|at| world.later(at, Event::Joins(number)));
            node.drains.into_iter().for_each(|at| world.later(at, Event::Drains(number)));
            if let Some((at, back)) = node.dies {
                world.later(at, Event::Dies(number));
                back.into_iter().for_each(|back| world.later(at + back, Event::Returns(number)));
            }
        }
        world.later(setup.signals.every, Event::Scrape);
        if setup.balance.is_some() {
            world.later(Duration::ZERO, Event::BalanceTick);
        }
        world
    }

    /// Whether no reservation is left.
    fn is_at_rest(&self) -> bool {
        self.scheduler.nodes().all(|(_, node)| {
            let load = &node.load;
            [load.own_requests, load.own_tokens, load.own_unseen, load.own_decodes, load.own_awaited]
                == [0; 5]
        })
    }

    /// Adds an event. Events of one time are handled in the order in which they were added.
    fn later(&mut self, at: Duration, event: Event) {
        self.event_number += 1;
        self.events.push(Reverse((at, self.event_number, event)));
    }

    fn handle(&mut self, now: Duration, event: Event) {
        match event {
            Event::Arrives(request) => self.arrives(now, request),
            Event::Starts(node, request, attempt) => self.starts(now, node, request, attempt),
            Event::StepOver(node, life) if self.nodes[node].life == life => self.step_over(now, node),
            Event::StepOver(..) => {}
            Event::Wake(node) => self.step(now, node),
            Event::HandedOver(request, attempt) => self.handed_over(now, request, attempt),
            Event::Scrape => self.scrape(now),
            Event::Metrics(node, scraped) => self.observe(node, scraped),
            Event::BalanceTick => self.tick_balance(now),
            Event::Joins(node) => self.set_state(node, NodeState::Ready),
            Event::Drains(node) => self.set_state(node, NodeState::Draining),
            Event::Dies(node) => self.dies(now, node),
            Event::DeathNoticed(node) if !self.nodes[node].is_alive => {
                self.set_state(node, self.state_of(node, now, NodeState::Suspect));
            }
            Event::DeathNoticed(_) => {}
            Event::Returns(node) => {
                self.nodes[node].is_alive = true;
                // Requests that the router sent before it noticed the death are lost too.
                self.nodes[node].engine.die(self.trace.block_tokens);
                self.scheduler.forget_prefixes(self.nodes[node].id);
                self.set_state(node, self.state_of(node, now, NodeState::Ready));
            }
        }
    }

    /// This state, unless the node drains.
    fn state_of(&self, node: usize, now: Duration, state: NodeState) -> NodeState {
        let is_draining = self.setup.nodes[node].drains.is_some_and(|drains| drains <= now);
        if is_draining { NodeState::Draining } else { state }
    }

    fn set_state(&mut self, node: usize, state: NodeState) {
        if let Some(node) = self.scheduler.node_mut(self.nodes[node].id) {
            node.state = state;
        }
    }

    fn number_of(&self, id: NodeId) -> Option<usize> {
        self.nodes.iter().position(|node| node.id == id)
    }

    /// Starts an attempt: chooses nodes, and sends the request to the first one.
    fn arrives(&mut self, now: Duration, request: usize) {
        let mut tried = std::mem::take(&mut self.open[request].tried);
        let dead = tried.len();
        if let Some(chooser) = self.lab.chooser() {
            // All other nodes count as tried, so the scheduler has to take this one.
            let node = chooser.choose(request, &self.trace.requests[request]);
            let others = self.nodes.iter().enumerate().filter(|(number, _)| Some(*number) != node);
            tried.extend(others.map(|(_, other)| other.id));
        }
        let to_schedule = ToSchedule {
            model: None,
            marks: &self.marks[request],
            one_node: false,
            streams: true,
            tried: &tried,
        };
        let cached =
            if self.setup.signals.kv_events { self.cached(request) } else { CachedPrefixes::default() };
        let chosen = self.scheduler.choose_with(&to_schedule, cached, self.start + now);
        tried.truncate(dead);
        let open = &mut self.open[request];
        open.tried = tried;
        (open.attempt, open.chosen) = (open.attempt + 1, now);
        self.served[request].attempts = open.attempt;
        let (first, second) = match chosen.map(|choice| choice.chosen) {
            Err(_) => return self.end(request),
            Ok(Chosen::One(one)) => (one, None),
            Ok(Chosen::Pair { prefill, decode }) => (prefill, Some(decode)),
        };
        open.is_pair = second.is_some();
        let (attempt, prefill) = (open.attempt, first.node);
        let decode = second.as_ref().map_or(prefill, |second| second.node);
        (open.prefill, open.decode) = (Some(first), second);
        self.served[request].prefill = self.number_of(prefill);
        self.served[request].decode = self.number_of(decode);
        if let Some(node) = self.number_of(prefill) {
            self.nodes[node].engine.expect(&self.trace.requests[request].blocks);
            self.later(now, Event::Starts(node, request, attempt));
        }
    }

    /// The tokens of a prompt that each engine and pool has, or will have once it has prefilled its requests.
    fn cached(&self, request: usize) -> CachedPrefixes {
        let recorded = &self.trace.requests[request];
        let mut prefixes = CachedPrefixes::of_length(recorded.prompt_tokens);
        for (pool, setup) in self.pools.iter().zip(&self.setup.pools).filter(|(_, setup)| setup.is_reported) {
            if let Some(slot) = self.scheduler.pool_slot(&setup.name) {
                let tokens = pool.leading_blocks(&recorded.blocks) as u64 * self.trace.block_tokens;
                prefixes.set_pooled(slot, tokens);
            }
        }
        for node in self.nodes.iter().filter(|node| node.is_alive) {
            let tokens = node.engine.leading_blocks(&recorded.blocks) * self.trace.block_tokens;
            let cached =
                Cached { tokens: tokens.min(recorded.prompt_tokens), block_size: self.trace.block_tokens };
            prefixes.set(node.id, cached);
        }
        prefixes
    }

    fn starts(&mut self, now: Duration, node: usize, request: usize, attempt: u32) {
        if self.open[request].attempt != attempt {
            return;
        }
        if !self.nodes[node].is_alive {
            return self.fails(now, request);
        }
        let output = if self.open[request].is_pair { 1 } else { self.served[request].output_tokens };
        self.nodes[node].engine.push(Job { request, output, is_handed_over: false, attempt });
        self.step(now, node);
    }

    fn step(&mut self, now: Duration, node: usize) {
        if !self.nodes[node].is_alive {
            return;
        }
        let life = self.nodes[node].life;
        match self.nodes[node].engine.begin_step(self.trace, now) {
            Ok(over) => self.later(over, Event::StepOver(node, life)),
            Err(Some(ready)) => self.later(ready, Event::Wake(node)),
            Err(None) => {}
        }
    }

    fn step_over(&mut self, now: Duration, node: usize) {
        let observer = self.lab.chooser().map(|chooser| (node, chooser));
        for output in self.nodes[node].engine.end_step(self.trace, observer) {
            let (StepOutput::First { job, .. } | StepOutput::Last(job)) = output;
            if self.open[job.request].attempt != job.attempt {
                continue;
            }
            match output {
                StepOutput::First { job, found } => self.first(now, job, found),
                StepOutput::Last(job) => self.last(now, job),
            }
        }
        self.step(now, node);
    }

    /// A leg's first token has come.
    fn first(&mut self, now: Duration, job: Job, found: u64) {
        let Job { request, is_handed_over, .. } = job;
        let is_pair = self.open[request].is_pair;
        if !is_handed_over {
            self.served[request].found_tokens = found;
        }
        if is_handed_over || !is_pair {
            let at = self.served[request].at;
            self.served[request].first.get_or_insert(now - at);
        }
        let read = self.read_at(now, request);
        let open = &mut self.open[request];
        let reservation = if is_handed_over { open.decode.as_mut() } else { open.prefill.as_mut() };
        if let Some(reservation) = reservation {
            self.scheduler.prefilled(reservation, &self.marks[request], read);
        }
        if let Some(chooser) = self.lab.chooser() {
            chooser.prefilled(request);
        }
    }

    /// A leg's last token has come: its reservation ends, and a prefill leg's transfer begins.
    fn last(&mut self, now: Duration, job: Job) {
        let Job { request, is_handed_over, attempt, .. } = job;
        let read = self.read_at(now, request);
        let open = &mut self.open[request];
        let is_prefill = open.is_pair && !is_handed_over;
        let reservation = if is_handed_over { open.decode.take() } else { open.prefill.take() };
        if let Some(mut reservation) = reservation {
            reservation.generated(job.output);
            self.scheduler.end(reservation, LegEnd::Served, read);
        }
        if is_prefill {
            let takes = self.transfer_time(&self.served[request]);
            return self.later(now + takes, Event::HandedOver(request, attempt));
        }
        let at = self.served[request].at;
        self.served[request].last = Some(now - at);
        self.end(request);
    }

    fn transfer_time(&self, served: &Served) -> Duration {
        let TransferSetup { base_ms, token_ms, far_token_ms } = self.setup.transfer;
        let [from, to] =
            [served.prefill, served.decode].map(|node| node.map(|node| &self.setup.nodes[node].host));
        let token_ms = if from == to { token_ms } else { far_token_ms.unwrap_or(token_ms) };
        milliseconds(base_ms + token_ms * served.prompt_tokens as f64)
    }

    /// The present time as the router observes it for this request ([`Lab::read`]).
    fn read_at(&self, now: Duration, request: usize) -> Instant {
        let chosen = self.open[request].chosen;
        self.start + chosen + self.lab.read(now.saturating_sub(chosen), request)
    }

    fn handed_over(&mut self, now: Duration, request: usize, attempt: u32) {
        let Some(node) = self.served[request].decode.filter(|_| self.open[request].attempt == attempt) else {
            return;
        };
        if !self.nodes[node].is_alive {
            return self.fails(now, request);
        }
        let output = self.served[request].output_tokens;
        self.nodes[node].engine.push(Job { request, output, is_handed_over: true, attempt });
        self.step(now, node);
    }

    fn scrape(&mut self, now: Duration) {
        for number in 0..self.nodes.len() {
            let is_lost = self.random() % 100 < u64::from(self.setup.signals.lost_percent);
            let node = &self.nodes[number];
            if is_lost || !node.is_alive {
                continue;
            }
            let own_before = self.scheduler.node(node.id).map_or(0, |node| node.load.own_requests);
            let engine = &node.engine;
            let (requests, waiting, cache_percent) =
                (engine.requests(), engine.waiting(), engine.cache_percent());
            let scraped = Scraped { requests, waiting, cache_percent, own_before };
            self.later(now + self.setup.signals.late, Event::Metrics(number, scraped));
        }
        self.later(now + self.setup.signals.every.max(Duration::from_millis(1)), Event::Scrape);
    }

    fn observe(&mut self, node: usize, scraped: Scraped) {
        let Scraped { requests, waiting, cache_percent, own_before } = scraped;
        if let Some(node) = self.scheduler.node_mut(self.nodes[node].id) {
            node.load.observe(
                Reported {
                    requests,
                    waiting: Some(waiting),
                    cache_percent: Some(cache_percent),
                    ..Reported::default()
                },
                own_before,
            );
        }
    }

    fn tick_balance(&mut self, now: Duration) {
        let Some(balancer) = &mut self.balancer else { return };
        let reports = balancer.tick(&mut self.scheduler, self.start + now);
        let changes = reports.iter().flat_map(|report| &report.acts).filter_map(|act| match act {
            balance::Act::Turn(id, role) => {
                let node = self.nodes.iter().position(|node| node.id == *id)?;
                Some(RoleChange { at: now, node, role: *role })
            }
            _ => None,
        });
        self.role_changes.extend(changes);
        let every = balancer.settings().every.max(Duration::from_millis(10));
        self.later(now + every, Event::BalanceTick);
    }

    fn dies(&mut self, now: Duration, node: usize) {
        let dead = &mut self.nodes[node];
        (dead.is_alive, dead.life) = (false, dead.life + 1);
        let lost = dead.engine.die(self.trace.block_tokens);
        self.later(now + self.setup.signals.death, Event::DeathNoticed(node));
        for job in lost {
            if self.open[job.request].attempt == job.attempt {
                self.fails(now, job.request);
            }
        }
    }

    /// A node of the request is dead: ends its reservations. If its client has got no token yet, another attempt starts.
    fn fails(&mut self, now: Duration, request: usize) {
        let open = &mut self.open[request];
        let legs: Vec<Reservation> = open.prefill.take().into_iter().chain(open.decode.take()).collect();
        for leg in legs {
            let is_dead = self.nodes.iter().any(|node| node.id == leg.node && !node.is_alive);
            if is_dead {
                self.open[request].tried.push(leg.node);
            }
            let end = if is_dead { LegEnd::Failed } else { LegEnd::Left };
            self.scheduler.end(leg, end, self.start + now);
        }
        if self.served[request].first.is_some() || self.open[request].attempt >= ATTEMPTS {
            self.open[request].attempt += 1;
            return self.end(request);
        }
        self.served[request].found_tokens = 0;
        if let Some(chooser) = self.lab.chooser() {
            chooser.over(request);
        }
        self.arrives(now, request);
    }

    /// The request has ended, served or not.
    fn end(&mut self, request: usize) {
        debug_assert!(self.open[request].prefill.is_none() && self.open[request].decode.is_none());
        self.left -= 1;
        if let Some(chooser) = self.lab.chooser() {
            chooser.over(request);
        }
    }

    fn random(&mut self) -> u64 {
        self.rng = self.rng.wrapping_add(1);
        mixed(self.rng)
    }
}

/// SplitMix64: a random number that depends on `number` only.
fn mixed(number: u64) -> u64 {
    spread(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The pool of a node, if the router learns of it.
fn reported_pool<'s>(setup: &'s Setup, node: &NodeSetup) -> Option<&'s PoolSetup> {
    setup.pools.get(node.pool?).filter(|pool| pool.is_reported)
}

/// A node as the router knows it. `class`: the class under which the router knows it.
fn scheduler_node(number: usize, setup: &NodeSetup, class: &str) -> Node {
    let mut node = Node::new(&format!("{}-{number}", setup.role), setup.role, "fleet");
    node.class = class.into();
    // A node that joins later gets no requests until then, as if it drained.
    let state = if setup.joins.is_some() { NodeState::Draining } else { NodeState::Ready };
    (node.state, node.connector) = (state, Connector::Direct);
    node.may_flip = setup.role == Role::Worker;
    node.host = setup.host.as_str().into();
    // Nodes that hand over directly need an address for it.
    node.connector_address = Some("fleet:1".into());
    node
}
