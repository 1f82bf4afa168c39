//! [`Shared`]: the nodes, what is known of them, and the last decisions.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{outlined::Walkers, places::Places, settings::ProxySettings};
use crate::{
    address::Address,
    balance::{self, Balancers, Indicators},
    counters::Counters,
    decisions::Decisions,
    ids::Ids,
    knowledge::Knowledge,
    request_metrics::RequestMetrics,
    role_records::Records,
    schedule::{Connector, Node, NodeId, NodeState, Reported, Scheduler},
};

/// The scheduler, where its nodes are, and counters.
#[derive(Debug)]
pub struct Shared {
    pub(crate) settings: ProxySettings,
    /// For clients' connections, over all listeners.
    pub(crate) places: Places,
    /// Threads for bodies that are too long for the request's thread.
    pub(crate) walkers: Walkers,
    /// Held for microseconds, never over an await.
    pub(crate) state: Mutex<State>,
    /// What has happened.
    pub counters: Counters,
    /// Request metrics by route, model and node.
    pub(crate) requests: RequestMetrics,
    pub(crate) is_stopping: AtomicBool,
    /// Requests that were cut when the time to drain was over.
    pub(crate) cut: AtomicUsize,
    /// What nodes have of prompts, by what their engines tell.
    pub knowledge: Arc<Knowledge>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) scheduler: Scheduler,
    pub(crate) addresses: HashMap<NodeId, Arc<Address>>,
    /// How nodes describe their models: JSON objects by model.
    descriptions: HashMap<NodeId, Vec<(Arc<str>, String)>>,
    pub(crate) ids: Ids,
    pub(crate) decisions: Decisions,
    /// None: nodes keep their roles.
    balancers: Option<Balancers>,
    records: Records,
}

impl Shared {
    /// Without nodes. `run` is random: it tells this run's requests from others'.
    pub fn new(settings: ProxySettings, scheduler: Scheduler, run: u64) -> Arc<Self> {
        Self::knowing(settings, scheduler, run, Arc::new(Knowledge::none()))
    }

    /// The same, with tokenizers, or engines that tell of their blocks.
    pub fn knowing(
        settings: ProxySettings,
        scheduler: Scheduler,
        run: u64,
        knowledge: Arc<Knowledge>,
    ) -> Arc<Self> {
        let state = State {
            scheduler,
            addresses: HashMap::new(),
            descriptions: HashMap::new(),
            ids: Ids::new(run),
            decisions: Decisions::default(),
            balancers: None,
            records: Records::default(),
        };
        let places = Places::new(settings.connections_max);
        Arc::new(Self {
            settings,
            places,
            walkers: Walkers::default(),
            state: Mutex::new(state),
            counters: Counters::default(),
            requests: RequestMetrics::default(),
            is_stopping: AtomicBool::new(false),
            cut: AtomicUsize::new(0),
            knowledge,
        })
    }

    /// Nodes that serve whole requests prefill or decode from now on, as the work needs it.
    pub fn balance(&self, settings: balance::Settings) {
        self.state.lock().balancers = Some(Balancers::new(settings));
    }

    /// Whether nodes change their roles.
    pub(crate) fn is_balancing(&self) -> bool {
        self.state.lock().balancers.is_some()
    }

    /// Looks at the balancers, if there are some, and at what they did. Must not take long: all requests wait.
    pub(crate) fn with_balance<T>(&self, work: impl FnOnce(&Balancers, &Records) -> T) -> Option<T> {
        let state = self.state.lock();
        state.balancers.as_ref().map(|balancers| work(balancers, &state.records))
    }

    /// Of each node: its score, and what it comes from. None where nodes keep their roles.
    pub(crate) fn scores(&self) -> HashMap<NodeId, (Option<f64>, Indicators)> {
        let state = self.state.lock();
        let Some(balancers) = &state.balancers else { return HashMap::new() };
        state.scheduler.nodes().filter_map(|(id, _)| Some((id, balancers.of(id)?))).collect()
    }

    /// A look of the balancers at all nodes: what is new, as JSON.
    pub(crate) fn look(&self, now: Instant) -> Vec<serde_json::Value> {
        let mut state = self.state.lock();
        let State { scheduler, balancers, records, .. } = &mut *state;
        let Some(balancers) = balancers else { return Vec::new() };
        let all = balancers.look(scheduler, now);
        let name = |id| scheduler.node(id).map(|node| Arc::clone(&node.name));
        all.iter().flat_map(|looked| records.note(looked, name)).collect()
    }

    /// How long a request of this class has to wait before it is sent again, if it is refused now: all nodes that serve the model
    /// are overloaded, and the operator wants it.
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

    /// A node joins.
    pub fn add(&self, node: Node, address: Address) -> NodeId {
        let mut state = self.state.lock();
        let name = Arc::clone(&node.name);
        let id = state.scheduler.add(node);
        self.knowledge.add(id, &name);
        state.addresses.insert(id, Arc::new(address));
        id
    }

    /// A node goes. What it works at goes on, and counts nowhere any more.
    pub fn remove(&self, id: NodeId) -> Option<Node> {
        let mut state = self.state.lock();
        state.addresses.remove(&id);
        state.descriptions.remove(&id);
        self.knowledge.set_pool(id, None);
        state.scheduler.remove(id)
    }

    /// A node has told how it hands over.
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
            tracing::info!(%node, pool = name.as_deref(), "node's metrics changed its pool");
        }
    }

    /// A node has told which models it serves: their names, and a JSON object of each, as its /v1/models has it.
    pub fn set_models(&self, id: NodeId, models: Vec<(Arc<str>, String)>) {
        self.knowledge.set_models(id, &models);
        let mut state = self.state.lock();
        let Some(node) = state.scheduler.node_mut(id) else { return };
        node.models = models.iter().map(|(name, _)| Arc::clone(name)).collect();
        state.descriptions.insert(id, models);
    }

    /// Where nodes are.
    pub(crate) fn addresses(&self) -> Vec<(NodeId, Arc<Address>)> {
        let state = self.state.lock();
        let address = |(id, _)| Some((id, Arc::clone(state.addresses.get(&id)?)));
        state.scheduler.nodes().filter_map(address).collect()
    }

    /// Whether some node serves this model.
    pub(crate) fn is_served(&self, model: &str) -> bool {
        self.state.lock().scheduler.nodes().any(|(_, node)| node.serves(model))
    }

    /// Whether the node is still known.
    pub(crate) fn is_there(&self, id: NodeId) -> bool {
        self.state.lock().scheduler.node(id).is_some()
    }

    /// Names of nodes.
    pub fn names(&self) -> Vec<(NodeId, Arc<str>)> {
        let state = self.state.lock();
        state.scheduler.nodes().map(|(id, node)| (id, Arc::clone(&node.name))).collect()
    }

    /// Requests of this router that a node has.
    pub(crate) fn own_requests(&self, id: NodeId) -> u64 {
        self.state.lock().scheduler.node(id).map_or(0, |node| node.load.own_requests)
    }

    /// A node's own metrics have come, and how many requests it had of this router when it was asked; or none came for long.
    pub(crate) fn observe_load(&self, id: NodeId, found: Option<(Reported, u64)>) {
        if let Some(node) = self.state.lock().scheduler.node_mut(id) {
            match found {
                Some((reported, own_before)) => node.load.observe(reported, own_before),
                None => node.load.observe_nothing(),
            }
        }
    }

    /// JSON of all models that some node serves.
    pub(crate) fn models_page(&self) -> String {
        let state = self.state.lock();
        let all: BTreeMap<&str, &str> =
            state.descriptions.values().flatten().map(|(name, json)| (&**name, json.as_str())).collect();
        let listed: Vec<&str> = all.into_values().collect();
        format!(r#"{{"object": "list", "data": [{}]}}"#, listed.join(", "))
    }

    /// JSON of the last choices, and of the last changes of roles and states, the newest first.
    pub(crate) fn decisions_page(&self, most: usize) -> serde_json::Value {
        let state = self.state.lock();
        let decisions = state.decisions.page(most, self.settings.quiet_decisions);
        serde_json::json!({ "decisions": decisions, "balance": state.records.page(most) })
    }

    /// Connections without a request that were closed because another one needed their slot.
    pub(crate) fn displaced(&self) -> u64 {
        self.places.displaced()
    }

    /// Looks at the scheduler, or changes it. Must not take long: all requests wait.
    pub fn with_scheduler<T>(&self, work: impl FnOnce(&mut Scheduler) -> T) -> T {
        work(&mut self.state.lock().scheduler)
    }
}
