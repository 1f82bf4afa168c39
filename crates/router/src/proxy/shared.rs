//! What all threads of the proxy share.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hyper::Uri;
use parking_lot::Mutex;
use thiserror::Error;

use super::{outlined::Walkers, places::Places, settings::ProxySettings};
use crate::{
    balance::{self, Balancers},
    beats_refused::BeatsRefused,
    decisions::Decisions,
    ids::Ids,
    knowledge::Knowledge,
    request_metrics::RequestMetrics,
    role_records::Records,
    schedule::{Connector, Node, NodeId, NodeState, Reported, Scheduler},
};

/// Where a node is reached: `http://HOST:PORT`, the path before `/v1` if it has one, and `#RANK` where it is one data-parallel
/// rank of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// As in the Host header.
    pub authority: String,
    /// Name or address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// Without a slash at its end; empty mostly.
    pub path: String,
    /// Of a server that has several: requests name it in a header.
    pub rank: Option<u32>,
}

/// No address of a node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text} is no address of a node: {why}; write it as http://HOST:PORT")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |why| AddressError { text: text.into(), why };
        let (text, rank) = match text.split_once('#') {
            Some((server, rank)) => {
                let digits = rank.bytes().all(|byte| byte.is_ascii_digit());
                let number = rank.parse().ok().filter(|_| digits);
                (server, Some(number.ok_or_else(|| wrong("what follows # is no number of a rank"))?))
            }
            None => (text, None),
        };
        let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = with_scheme.parse().map_err(|_| wrong("it cannot be read"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong("only http is spoken to nodes"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("it has a user's name"));
        }
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if bare.is_empty() {
            return Err(wrong("it names no host"));
        }
        Ok(Self {
            authority: authority.as_str().to_owned(),
            host: bare.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            path: uri.path().trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            rank,
        })
    }
}

impl Address {
    /// Whether both are of one server, be it of several ranks.
    pub fn is_same_server(&self, other: &Self) -> bool {
        (&self.host, self.port, &self.path) == (&other.host, other.port, &other.path)
    }

    /// The same on another host.
    pub fn at_host(&self, host: IpAddr) -> Self {
        let authority = SocketAddr::new(host, self.port).to_string();
        Self { authority, host: host.to_string(), ..self.clone() }
    }

    /// The same server's, one rank of it.
    pub fn with_rank(&self, rank: u32) -> Self {
        Self { rank: Some(rank), ..self.clone() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)?;
        self.rank.map_or(Ok(()), |rank| write!(f, "#{rank}"))
    }
}

/// What has happened since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that no node could serve.
    pub refused: AtomicU64,
    /// Requests that were refused in an overload.
    pub shed: AtomicU64,
    /// Pairs whose prefill node named no blocks: the decode node computes the prompt.
    pub not_handed_over: AtomicU64,
    /// Legs whose client left before the last byte.
    pub left: AtomicU64,
    /// Requests that went to a node of another role, since none of the right one was left.
    pub other_role: AtomicU64,
    /// Beats of nodes that counted.
    pub beats: AtomicU64,
    /// Beats, pings and connections for them that did not count.
    pub beats_refused: BeatsRefused,
    /// Look-ups of names that failed.
    pub names_failed: AtomicU64,
    /// Whether operators can reach the router over its socket: 1, or 0.
    pub control: AtomicU64,
    /// Bytes of bodies that are held, and of the ranges and hashes of their contents.
    pub body_bytes: AtomicU64,
    /// Clients' connections that are open.
    pub connections: AtomicU64,
}

impl Counters {
    /// One more. Answers whether it is the first one.
    pub(crate) fn count(counter: &AtomicU64) -> bool {
        counter.fetch_add(1, Ordering::Relaxed) == 0
    }
}

/// The scheduler, where its nodes are, and counters.
#[derive(Debug)]
pub struct Shared {
    pub(super) settings: ProxySettings,
    /// For clients' connections, over all listeners.
    pub(super) places: Places,
    /// Threads for bodies that are too long for the request's thread.
    pub(super) walkers: Walkers,
    /// Held for microseconds, never over an await.
    pub(super) state: Mutex<State>,
    /// What has happened.
    pub counters: Counters,
    /// Request metrics by route, model and node.
    pub(crate) requests: RequestMetrics,
    pub(super) is_stopping: AtomicBool,
    /// Requests that were cut when the time to drain was over.
    pub(super) cut: AtomicUsize,
    /// What nodes have of prompts, by what their engines tell.
    pub knowledge: Arc<Knowledge>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) scheduler: Scheduler,
    pub(super) addresses: HashMap<NodeId, Arc<Address>>,
    /// How nodes describe their models: JSON objects by model.
    descriptions: HashMap<NodeId, Vec<(Arc<str>, String)>>,
    pub(super) ids: Ids,
    pub(super) decisions: Decisions,
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
    pub(super) fn models_page(&self) -> String {
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
