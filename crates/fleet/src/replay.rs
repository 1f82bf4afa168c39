//! A trace through a router and a fleet, event by event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_policy::spread;
use kvlane_router::balance::{self, Balancers};
use kvlane_router::body::Mark;
use kvlane_router::schedule::{
    Cached, Chosen, Connector, Known, LegEnd, Node, NodeId, NodeState, Reported, Request as Asked,
    Reservation, Role, Scheduler, Settings,
};

use crate::costs::milliseconds;
use crate::engine::{Came, Class, Engine, Job};
use crate::lab::{Chooser, Lab};
use crate::outcome::Served;
use crate::pool::{Pool, PoolSetup};
use crate::trace::Trace;

/// A request is begun so often, if nodes die under it.
const ATTEMPTS: u32 = 3;

/// A node of the fleet.
#[derive(Debug, Clone)]
pub struct NodeSetup {
    /// What it is for.
    pub role: Role,
    /// What it is.
    pub class: Arc<Class>,
    /// Where it is.
    pub host: String,
    /// Index of the node's pool.
    pub pool: Option<usize>,
    /// It dies then, if it does, and comes back with nothing so much later, if it does.
    pub dies: Option<(Duration, Option<Duration>)>,
    /// It is there from then on only, with nothing in its cache.
    pub joins: Option<Duration>,
    /// From then on it gets no more requests, and finishes those that it has.
    pub drains: Option<Duration>,
}

impl NodeSetup {
    /// One that is there all the time.
    pub fn new(role: Role, class: Arc<Class>) -> Self {
        Self { role, class, host: String::new(), pool: None, dies: None, joins: None, drains: None }
    }
}

/// How prompts go from a prefill node to a decode node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HandOver {
    /// Milliseconds from the last token of the prompt until the decode node has all, whatever its length.
    pub base_ms: f64,
    /// Milliseconds more for each token.
    pub token_ms: f64,
    /// In place of that between nodes of different hosts; None: no other.
    pub far_token_ms: Option<f64>,
}

impl Default for HandOver {
    /// From the last layer to landed, over sockets: bench/pd/results/2026-11-26-handoff-10000-tokens.json, and a round trip.
    fn default() -> Self {
        Self { base_ms: 2.0, token_ms: 0.001, far_token_ms: None }
    }
}

/// What the router hears of nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signals {
    /// Their metrics are asked for so often.
    pub every: Duration,
    /// An answer is so old when it comes.
    pub late: Duration,
    /// So many of 100 do not come.
    pub lost_percent: u8,
    /// A node that has died gets no more requests after so long.
    pub death: Duration,
    /// Engines tell which blocks they have, at once and without loss; else the router goes by the prompts that it has sent.
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
    /// At least one.
    pub nodes: Vec<NodeSetup>,
    /// Pools that nodes share.
    pub pools: Vec<PoolSetup>,
    /// Of the scheduler.
    pub scheduler: Settings,
    /// Requests come so many times as fast as they were recorded.
    pub speed: f64,
    /// Between prefill and decode nodes.
    pub hand_over: HandOver,
    /// What the router hears.
    pub signals: Signals,
    /// How the router divides nodes between both roles; None: they keep theirs.
    pub balance: Option<balance::Settings>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Joins(usize),
    Drains(usize),
    Dies(usize),
    Returns(usize),
    Hidden(usize),
    Arrives(usize),
    /// The request may be looked at by the engine: node, request, attempt.
    Starts(usize, usize, u32),
    StepOver(usize, u32),
    Wake(usize),
    HandedOver(usize, u32),
    Asked,
    Told(usize, Told),
    Looked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Told {
    requests: u64,
    waiting: u64,
    cache_percent: u64,
    own_before: u64,
}

/// A request that is under way.
#[derive(Debug, Default)]
struct Open {
    prefill: Option<Reservation>,
    decode: Option<Reservation>,
    attempt: u32,
    tried: Vec<NodeId>,
    is_pair: bool,
    /// When its nodes were chosen.
    chosen: Duration,
}

struct Place {
    engine: Engine,
    id: NodeId,
    /// Counts its lives: a step of an earlier one is over for nobody.
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
    places: Vec<Place>,
    pools: Vec<Pool>,
    marks: Vec<Vec<Mark>>,
    open: Vec<Open>,
    served: Vec<Served>,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    next: u64,
    /// Requests that are not over.
    left: usize,
    chance: u64,
    turns: Vec<Turn>,
}

/// What a replay has brought.
#[derive(Debug, Clone, Default)]
pub struct Replayed {
    /// One for each request of the trace, in its order.
    pub served: Vec<Served>,
    /// By time.
    pub turns: Vec<Turn>,
}

/// A node has got another role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Since the replay began.
    pub at: Duration,
    /// By its number.
    pub node: usize,
    /// That it has from then on.
    pub role: Role,
}

/// Replays a whole trace; `progress` is told now and then how many more requests are over.
pub fn replay(trace: &Trace, setup: &Setup, progress: impl FnMut(usize)) -> Replayed {
    replay_in(&mut (), trace, setup, progress)
}

/// The same with a router that an experiment changes. One that chooses nodes itself is for fleets of workers.
pub fn replay_in(
    lab: &mut impl Lab,
    trace: &Trace,
    setup: &Setup,
    mut progress: impl FnMut(usize),
) -> Replayed {
    let mut world = World::new(trace, setup, lab);
    let mut told = world.left;
    while world.left > 0 {
        let Some(Reverse((now, _, event))) = world.events.pop() else { break };
        world.happens(now, event);
        if told - world.left >= 256 {
            progress(told - world.left);
            told = world.left;
        }
    }
    progress(told - world.left);
    debug_assert!(world.left > 0 || world.is_at_rest(), "whoever is over holds nothing");
    Replayed { served: world.served, turns: world.turns }
}

impl<'a, L: Lab> World<'a, L> {
    fn new(trace: &'a Trace, setup: &'a Setup, lab: &'a mut L) -> Self {
        let mut scheduler = Scheduler::new(setup.scheduler.clone());
        let pools: Vec<Pool> = setup.pools.iter().map(|pool| Pool::new(pool, trace.block_tokens)).collect();
        let places = setup.nodes.iter().enumerate().map(|(number, node)| {
            let id = scheduler.add(of_scheduler(number, node, lab.class(&node.class.name)));
            if let Some(pool) = told_pool(setup, node) {
                scheduler.set_pool(id, Some(&pool.name.as_str().into()), true);
            }
            let pool = node.pool.and_then(|pool| pools.get(pool)).cloned();
            let engine = Engine::new(Arc::clone(&node.class), trace.block_tokens, pool);
            Place { engine, id, life: 0, is_alive: true }
        });
        let places = places.collect();
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
            places,
            pools,
            marks: marks.collect(),
            open: (0..count).map(|_| Open::default()).collect(),
            served: served.collect(),
            events: BinaryHeap::new(),
            next: 0,
            left: count,
            turns: Vec::new(),
            chance: setup.scheduler.seed ^ 0x9e37_79b9_7f4a_7c15,
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
        world.later(setup.signals.every, Event::Asked);
        if setup.balance.is_some() {
            world.later(Duration::ZERO, Event::Looked);
        }
        world
    }

    fn is_at_rest(&self) -> bool {
        self.scheduler.nodes().all(|(_, node)| {
            let load = &node.load;
            [load.own_requests, load.own_tokens, load.own_unseen, load.own_decodes, load.own_awaited]
                == [0; 5]
        })
    }

    fn later(&mut self, at: Duration, event: Event) {
        self.next += 1;
        self.events.push(Reverse((at, self.next, event)));
    }

    fn happens(&mut self, now: Duration, event: Event) {
        match event {
            Event::Arrives(request) => self.arrives(now, request),
            Event::Starts(node, request, attempt) => self.starts(now, node, request, attempt),
            Event::StepOver(node, life) if self.places[node].life == life => self.step_over(now, node),
            Event::StepOver(..) => {}
            Event::Wake(node) => self.step(now, node),
            Event::HandedOver(request, attempt) => self.handed_over(now, request, attempt),
            Event::Asked => self.ask_for_metrics(now),
            Event::Told(node, told) => self.told(node, told),
            Event::Looked => self.look(now),
            Event::Joins(node) => self.set_state(node, NodeState::Ready),
            Event::Drains(node) => self.set_state(node, NodeState::Draining),
            Event::Dies(node) => self.dies(now, node),
            Event::Hidden(node) if !self.places[node].is_alive => {
                self.set_state(node, self.state_of(node, now, NodeState::Suspect));
            }
            Event::Hidden(_) => {}
            Event::Returns(node) => {
                self.places[node].is_alive = true;
                // What it was given while nobody knew that it is dead is not there.
                self.places[node].engine.die(self.trace.block_tokens);
                self.scheduler.forget_prefixes(self.places[node].id);
                self.set_state(node, self.state_of(node, now, NodeState::Ready));
            }
        }
    }

    /// This one, unless it has left.
    fn state_of(&self, node: usize, now: Duration, state: NodeState) -> NodeState {
        let has_left = self.setup.nodes[node].drains.is_some_and(|drains| drains <= now);
        if has_left { NodeState::Draining } else { state }
    }

    fn set_state(&mut self, node: usize, state: NodeState) {
        if let Some(node) = self.scheduler.node_mut(self.places[node].id) {
            node.state = state;
        }
    }

    fn place_of(&self, id: NodeId) -> Option<usize> {
        self.places.iter().position(|place| place.id == id)
    }

    fn arrives(&mut self, now: Duration, request: usize) {
        let mut tried = std::mem::take(&mut self.open[request].tried);
        let dead = tried.len();
        if let Some(chooser) = self.lab.chooser() {
            // The scheduler takes the only one that is left to it.
            let node = chooser.choose(request, &self.trace.requests[request]);
            let others = self.places.iter().enumerate().filter(|(number, _)| Some(*number) != node);
            tried.extend(others.map(|(_, place)| place.id));
        }
        let asked =
            Asked { model: None, marks: &self.marks[request], one_node: false, streams: true, tried: &tried };
        let known = if self.setup.signals.kv_events { self.known(request) } else { Known::default() };
        let chosen = self.scheduler.choose_knowing(&asked, known, self.start + now);
        tried.truncate(dead);
        let open = &mut self.open[request];
        open.tried = tried;
        (open.attempt, open.chosen) = (open.attempt + 1, now);
        self.served[request].attempts = open.attempt;
        let (first, second) = match chosen.map(|choice| choice.chosen) {
            Err(_) => return self.is_over(request),
            Ok(Chosen::One(one)) => (one, None),
            Ok(Chosen::Pair { prefill, decode }) => (prefill, Some(decode)),
        };
        open.is_pair = second.is_some();
        let (attempt, prefill) = (open.attempt, first.node);
        let decode = second.as_ref().map_or(prefill, |second| second.node);
        (open.prefill, open.decode) = (Some(first), second);
        self.served[request].prefill = self.place_of(prefill);
        self.served[request].decode = self.place_of(decode);
        if let Some(node) = self.place_of(prefill) {
            self.places[node].engine.expect(&self.trace.requests[request].blocks);
            self.later(now, Event::Starts(node, request, attempt));
        }
    }

    /// What engines have of a prompt, or will have once they have prefilled what they got.
    fn known(&self, request: usize) -> Known {
        let asked = &self.trace.requests[request];
        let mut known = Known::counted(asked.prompt_tokens);
        for (pool, setup) in self.pools.iter().zip(&self.setup.pools).filter(|(_, setup)| setup.is_told) {
            if let Some(slot) = self.scheduler.pool_slot(&setup.name) {
                let tokens = pool.leading_blocks(&asked.blocks) as u64 * self.trace.block_tokens;
                known.set_pooled(slot, tokens);
            }
        }
        for place in self.places.iter().filter(|place| place.is_alive) {
            let tokens = place.engine.leading_blocks(&asked.blocks) * self.trace.block_tokens;
            let cached =
                Cached { tokens: tokens.min(asked.prompt_tokens), block_size: self.trace.block_tokens };
            known.set(place.id, cached);
        }
        known
    }

    fn starts(&mut self, now: Duration, node: usize, request: usize, attempt: u32) {
        if self.open[request].attempt != attempt {
            return;
        }
        if !self.places[node].is_alive {
            return self.fails(now, request);
        }
        let output = if self.open[request].is_pair { 1 } else { self.served[request].output_tokens };
        self.places[node].engine.push(Job { request, output, is_handed_over: false, attempt });
        self.step(now, node);
    }

    fn step(&mut self, now: Duration, node: usize) {
        if !self.places[node].is_alive {
            return;
        }
        let life = self.places[node].life;
        match self.places[node].engine.begin_step(self.trace, now) {
            Ok(over) => self.later(over, Event::StepOver(node, life)),
            Err(Some(ready)) => self.later(ready, Event::Wake(node)),
            Err(None) => {}
        }
    }

    fn step_over(&mut self, now: Duration, node: usize) {
        let told = self.lab.chooser().map(|chooser| (node, chooser));
        for came in self.places[node].engine.end_step(self.trace, told) {
            let (Came::First { job, .. } | Came::Last(job)) = came;
            if self.open[job.request].attempt != job.attempt {
                continue;
            }
            match came {
                Came::First { job, found } => self.first(now, job, found),
                Came::Last(job) => self.last(now, job),
            }
        }
        self.step(now, node);
    }

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

    fn last(&mut self, now: Duration, job: Job) {
        let Job { request, is_handed_over, attempt, .. } = job;
        let read = self.read_at(now, request);
        let open = &mut self.open[request];
        let goes_on = open.is_pair && !is_handed_over;
        let reservation = if is_handed_over { open.decode.take() } else { open.prefill.take() };
        if let Some(mut reservation) = reservation {
            reservation.generated(job.output);
            self.scheduler.end(reservation, LegEnd::Served, read);
        }
        if goes_on {
            let takes = self.hand_over(&self.served[request]);
            return self.later(now + takes, Event::HandedOver(request, attempt));
        }
        let at = self.served[request].at;
        self.served[request].last = Some(now - at);
        self.is_over(request);
    }

    fn hand_over(&self, served: &Served) -> Duration {
        let HandOver { base_ms, token_ms, far_token_ms } = self.setup.hand_over;
        let [from, to] =
            [served.prefill, served.decode].map(|node| node.map(|node| &self.setup.nodes[node].host));
        let token_ms = if from == to { token_ms } else { far_token_ms.unwrap_or(token_ms) };
        milliseconds(base_ms + token_ms * served.prompt_tokens as f64)
    }

    /// When something of a request happened, as the router reads it.
    fn read_at(&self, now: Duration, request: usize) -> Instant {
        let chosen = self.open[request].chosen;
        self.start + chosen + self.lab.read(now.saturating_sub(chosen), request)
    }

    fn handed_over(&mut self, now: Duration, request: usize, attempt: u32) {
        let Some(node) = self.served[request].decode.filter(|_| self.open[request].attempt == attempt) else {
            return;
        };
        if !self.places[node].is_alive {
            return self.fails(now, request);
        }
        let output = self.served[request].output_tokens;
        self.places[node].engine.push(Job { request, output, is_handed_over: true, attempt });
        self.step(now, node);
    }

    fn ask_for_metrics(&mut self, now: Duration) {
        for node in 0..self.places.len() {
            let is_lost = self.any() % 100 < u64::from(self.setup.signals.lost_percent);
            let place = &self.places[node];
            if is_lost || !place.is_alive {
                continue;
            }
            let own_before = self.scheduler.node(place.id).map_or(0, |node| node.load.own_requests);
            let engine = &place.engine;
            let (requests, waiting, cache_percent) =
                (engine.requests(), engine.waiting(), engine.cache_percent());
            let told = Told { requests, waiting, cache_percent, own_before };
            self.later(now + self.setup.signals.late, Event::Told(node, told));
        }
        self.later(now + self.setup.signals.every.max(Duration::from_millis(1)), Event::Asked);
    }

    fn told(&mut self, node: usize, told: Told) {
        let Told { requests, waiting, cache_percent, own_before } = told;
        if let Some(node) = self.scheduler.node_mut(self.places[node].id) {
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

    fn look(&mut self, now: Duration) {
        let Some(balancer) = &mut self.balancer else { return };
        let looked = balancer.look(&mut self.scheduler, self.start + now);
        let turns = looked.iter().flat_map(|looked| &looked.acts).filter_map(|act| match act {
            balance::Act::Turn(id, role) => {
                let node = self.places.iter().position(|place| place.id == *id)?;
                Some(Turn { at: now, node, role: *role })
            }
            _ => None,
        });
        self.turns.extend(turns);
        let every = balancer.settings().every.max(Duration::from_millis(10));
        self.later(now + every, Event::Looked);
    }

    fn dies(&mut self, now: Duration, node: usize) {
        let place = &mut self.places[node];
        (place.is_alive, place.life) = (false, place.life + 1);
        let lost = place.engine.die(self.trace.block_tokens);
        self.later(now + self.setup.signals.death, Event::Hidden(node));
        for job in lost {
            if self.open[job.request].attempt == job.attempt {
                self.fails(now, job.request);
            }
        }
    }

    /// A node that had it is dead. Another one begins it anew, as long as its client has heard nothing.
    fn fails(&mut self, now: Duration, request: usize) {
        let open = &mut self.open[request];
        let legs: Vec<Reservation> = open.prefill.take().into_iter().chain(open.decode.take()).collect();
        for leg in legs {
            let is_dead = self.places.iter().any(|place| place.id == leg.node && !place.is_alive);
            if is_dead {
                self.open[request].tried.push(leg.node);
            }
            let end = if is_dead { LegEnd::Failed } else { LegEnd::Left };
            self.scheduler.end(leg, end, self.start + now);
        }
        if self.served[request].first.is_some() || self.open[request].attempt >= ATTEMPTS {
            self.open[request].attempt += 1;
            return self.is_over(request);
        }
        self.served[request].found_tokens = 0;
        if let Some(chooser) = self.lab.chooser() {
            chooser.over(request);
        }
        self.arrives(now, request);
    }

    fn is_over(&mut self, request: usize) {
        debug_assert!(self.open[request].prefill.is_none() && self.open[request].decode.is_none());
        self.left -= 1;
        if let Some(chooser) = self.lab.chooser() {
            chooser.over(request);
        }
    }

    fn any(&mut self) -> u64 {
        self.chance = self.chance.wrapping_add(1);
        mixed(self.chance)
    }
}

/// Any number, always the same for the same one: SplitMix64.
fn mixed(number: u64) -> u64 {
    spread(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Pool of a node, if the router learns of it.
fn told_pool<'s>(setup: &'s Setup, node: &NodeSetup) -> Option<&'s PoolSetup> {
    setup.pools.get(node.pool?).filter(|pool| pool.is_told)
}

/// `class`: what the router takes the node's class for.
fn of_scheduler(number: usize, setup: &NodeSetup, class: &str) -> Node {
    let mut node = Node::new(&format!("{}-{number}", setup.role), setup.role, "fleet");
    node.class = class.into();
    // Who is not there yet gets as little as who leaves.
    let state = if setup.joins.is_some() { NodeState::Draining } else { NodeState::Ready };
    (node.state, node.connector) = (state, Connector::Direct);
    node.may_flip = setup.role == Role::Worker;
    node.host = setup.host.as_str().into();
    // Who hands over directly has an address for that.
    node.connector_address = Some("fleet:1".into());
    node
}
