//! [`Shared`]: the state of the router that all its threads use. Methods take the lock for microseconds, and never over an
//! await.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{body_scanner::BodyScanner, connection_slots::ConnectionSlots, settings::ProxySettings};
use crate::{
    address::Address,
    balance::{BalanceSettings, Balancers, Indicators},
    counters::Counters,
    decisions::Decisions,
    ids::Ids,
    knowledge::Knowledge,
    recording::Recording,
    request_metrics::RequestMetrics,
    role_records::Records,
    schedule::{Connector, Node, NodeId, NodeState, Reported, Scheduler},
    traces::Traces,
};

/// The scheduler, its nodes' addresses, settings and counters.
#[derive(Debug)]
pub struct Shared {
    pub(crate) settings: ProxySettings,
    /// Slots for clients, over all listeners.
    pub(crate) connections: ConnectionSlots,
    pub(crate) scanner: BodyScanner,
    /// Held for microseconds, never over an await.
    pub(crate) state: Mutex<SharedState>,
    /// Since the start; without the lock.
    pub counters: Counters,
    /// Request metrics by route, model and node.
    pub(crate) requests: RequestMetrics,
    pub(crate) recording: Arc<Recording>,
    /// Empty if spans and metrics are not exported.
    pub(crate) traces: OnceLock<Arc<Traces>>,
    pub(crate) is_stopping: AtomicBool,
    /// Requests that the router cut when its time to drain had passed.
    pub(crate) cut: AtomicUsize,
    /// The prefixes that nodes have, by their engines' events.
    pub knowledge: Arc<Knowledge>,
}

#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) scheduler: Scheduler,
    pub(crate) addresses: HashMap<NodeId, Arc<Address>>,
    /// Each node's models, with the JSON objects that describe them in its `/v1/models`.
    descriptions: HashMap<NodeId, Vec<(Arc<str>, String)>>,
    pub(crate) ids: Ids,
    pub(crate) decisions: Decisions,
    /// None: nodes keep their roles.
    balancers: Option<Balancers>,
    records: Records,
}

impl Shared {
    /// No nodes, and no knowledge beyond prompts' texts. `run` is random: it tells this run's request ids from another run's.
    pub fn new(settings: ProxySettings, scheduler: Scheduler, run: u64) -> Arc<Self> {
        Self::with_knowledge(settings, scheduler, run, Arc::new(Knowledge::none()))
    }

    /// As [`Self::new`], with tokenizers, or engines that publish KV events.
    pub fn with_knowledge(
        settings: ProxySettings,
        scheduler: Scheduler,
        run: u64,
        knowledge: Arc<Knowledge>,
    ) -> Arc<Self> {
        let state = SharedState {
            scheduler,
            addresses: HashMap::new(),
            descriptions: HashMap::new(),
            ids: Ids::new(run),
            decisions: Decisions::default(),
            balancers: None,
            records: Records::default(),
        };
        let connections = ConnectionSlots::new(settings.connections_max);
        Arc::new(Self {
            settings,
            connections,
            scanner: BodyScanner::default(),
            state: Mutex::new(state),
            counters: Counters::default(),
            requests: RequestMetrics::default(),
            recording: Arc::default(),
            traces: OnceLock::new(),
            is_stopping: AtomicBool::new(false),
            cut: AtomicUsize::new(0),
            knowledge,
        })
    }

    /// Turns the balancer on: from now on it gives workers a role as the work needs it.
    pub fn balance(&self, settings: BalanceSettings) {
        self.state.lock().balancers = Some(Balancers::new(settings));
    }

    /// Whether the balancer is on.
    pub(crate) fn is_balancing(&self) -> bool {
        self.state.lock().balancers.is_some()
    }

    /// Runs `work` on the balancers and their records, if the balancer is on. It holds the lock, so all requests wait for it.
    pub(crate) fn with_balance<T>(&self, work: impl FnOnce(&Balancers, &Records) -> T) -> Option<T> {
        let state = self.state.lock();
        state.balancers.as_ref().map(|balancers| work(balancers, &state.records))
    }

    /// Each node's score and indicators. Empty if the balancer is off.
    pub(crate) fn scores(&self) -> HashMap<NodeId, (Option<f64>, Indicators)> {
        let state = self.state.lock();
        let Some(balancers) = &state.balancers else { return HashMap::new() };
        state.scheduler.nodes().filter_map(|(id, _)| Some((id, balancers.of(id)?))).collect()
    }

    /// One tick of the balancers. Returns the records of what changed, as JSON.
    pub(crate) fn tick_balance(&self, now: Instant) -> Vec<serde_json::Value> {
        let mut state = self.state.lock();
        let SharedState { scheduler, balancers, records, .. } = &mut *state;
        let Some(balancers) = balancers else { return Vec::new() };
        let reports = balancers.tick(scheduler, now);
        let name = |id| scheduler.node(id).map(|node| Arc::clone(&node.name));
        reports.iter().flat_map(|report| records.note(report, name)).collect()
    }

    /// The time to the retry of a request of this class, if the router refuses it now: the operator has named the class, and
    /// all nodes that serve the model are overloaded.
    pub(crate) fn refusal(&self, class: &str, model: Option<&str>) -> Option<Duration> {
        let (_, wait) = self.settings.refuse.iter().find(|(name, _)| name == class)?;
        let state = self.state.lock();
        let balancers = state.balancers.as_ref()?;
        let serves =
            |node: &&Node| node.state == NodeState::Ready && model.is_none_or(|model| node.serves(model));
        let mut nodes = state.scheduler.nodes().map(|(_, node)| node).filter(serves).peekable();
        let is_overloaded = nodes.peek().is_some() && nodes.all(|node| balancers.is_overloaded(node));
        is_overloaded.then_some(*wait)
    }

    /// Adds a node to the scheduler and to the knowledge.
    pub fn add(&self, node: Node, address: Address) -> NodeId {
        let mut state = self.state.lock();
        let name = Arc::clone(&node.name);
        let id = state.scheduler.add(node);
        self.knowledge.add(id, &name);
        state.addresses.insert(id, Arc::new(address));
        id
    }

    /// Removes a node. Its requests continue, and no longer count as any node's load.
    pub fn remove(&self, id: NodeId) -> Option<Node> {
        let mut state = self.state.lock();
        state.addresses.remove(&id);
        state.descriptions.remove(&id);
        self.knowledge.set_pool(id, None);
        state.scheduler.remove(id)
    }

    /// Sets how a node hands over, as its beat or ping says.
    pub fn set_connector(&self, id: NodeId, connector: Connector, connector_address: Option<Arc<str>>) {
        self.with_scheduler(|scheduler| {
            if let Some(node) = scheduler.node_mut(id) {
                (node.connector, node.connector_address) = (connector, connector_address);
            }
        });
    }

    /// Sets the pool that the router's file names for a node.
    pub(crate) fn configure_pool(&self, id: NodeId, name: &Arc<str>) {
        let mut state = self.state.lock();
        let slot = state.scheduler.set_pool(id, Some(name), true);
        self.knowledge.set_pool(id, slot);
    }

    /// Sets the pool that a node's own metrics name; None if they name none.
    pub(crate) fn observe_pool(&self, id: NodeId, name: Option<&str>) {
        let mut state = self.state.lock();
        let Some(node) = state.scheduler.node(id).filter(|node| node.pool() != name) else { return };
        let node = Arc::clone(&node.name);
        let name = name.map(Arc::from);
        let slot = state.scheduler.set_pool(id, name.as_ref(), false);
        self.knowledge.set_pool(id, slot);
        if state.scheduler.node(id).and_then(Node::pool) == name.as_deref() {
            // Log: the engine found its daemon, another one, or a restarted one; the router forgets what the
            // node's former pool held.
            tracing::info!(%node, pool = name.as_deref(), "node's metrics changed its pool");
        }
    }

    /// Sets the models that a node serves: names, and the JSON object of each from its `/v1/models`.
    pub fn set_models(&self, id: NodeId, models: Vec<(Arc<str>, String)>) {
        self.knowledge.set_models(id, &models);
        let mut state = self.state.lock();
        let Some(node) = state.scheduler.node_mut(id) else { return };
        node.models = models.iter().map(|(name, _)| Arc::clone(name)).collect();
        state.descriptions.insert(id, models);
    }

    /// All nodes with their addresses.
    pub(crate) fn addresses(&self) -> Vec<(NodeId, Arc<Address>)> {
        let state = self.state.lock();
        let address = |(id, _)| Some((id, Arc::clone(state.addresses.get(&id)?)));
        state.scheduler.nodes().filter_map(address).collect()
    }

    /// Whether some node serves this model.
    pub(crate) fn is_served(&self, model: &str) -> bool {
        self.state.lock().scheduler.nodes().any(|(_, node)| node.serves(model))
    }

    /// False once the node has been removed.
    pub(crate) fn has_node(&self, id: NodeId) -> bool {
        self.state.lock().scheduler.node(id).is_some()
    }

    /// All nodes with their names.
    pub fn names(&self) -> Vec<(NodeId, Arc<str>)> {
        let state = self.state.lock();
        state.scheduler.nodes().map(|(id, node)| (id, Arc::clone(&node.name))).collect()
    }

    /// Legs of this router at a node.
    pub(crate) fn own_requests(&self, id: NodeId) -> u64 {
        self.state.lock().scheduler.node(id).map_or(0, |node| node.load.own_requests)
    }

    /// Takes in a node's metrics, with the number of this router's requests before the scrape. None: scrapes have failed for
    /// long.
    pub(crate) fn observe_load(&self, id: NodeId, found: Option<(Reported, u64)>) {
        if let Some(node) = self.state.lock().scheduler.node_mut(id) {
            match found {
                Some((reported, own_before)) => node.load.observe(reported, own_before),
                None => node.load.observe_nothing(),
            }
        }
    }

    /// JSON of all models that at least one node serves, for `/v1/models`.
    pub(crate) fn models_page(&self) -> String {
        let state = self.state.lock();
        let all: BTreeMap<&str, &str> =
            state.descriptions.values().flatten().map(|(name, json)| (&**name, json.as_str())).collect();
        let listed: Vec<&str> = all.into_values().collect();
        format!(r#"{{"object": "list", "data": [{}]}}"#, listed.join(", "))
    }

    /// JSON of the last choices, and of the last changes of roles and states, newest first.
    pub(crate) fn decisions_page(&self, most: usize) -> serde_json::Value {
        let state = self.state.lock();
        let decisions = state.decisions.page(most, self.settings.quiet_decisions);
        serde_json::json!({ "decisions": decisions, "balance": state.records.page(most) })
    }

    /// The last choices, newest first, without the ids of requests.
    pub(crate) fn decisions_without_ids(&self, most: usize) -> serde_json::Value {
        let state = self.state.lock();
        let serves = |model: &str| state.scheduler.nodes().any(|(_, node)| node.serves(model));
        state.decisions.page_without_ids(most, self.settings.quiet_decisions, serves)
    }

    /// Connections without a request that were closed because another one needed their slot.
    pub(crate) fn displaced(&self) -> u64 {
        self.connections.displaced()
    }

    /// Runs `work` on the scheduler. It holds the lock, so all requests wait for it.
    pub fn with_scheduler<T>(&self, work: impl FnOnce(&mut Scheduler) -> T) -> T {
        work(&mut self.state.lock().scheduler)
    }
}
