//! A node as the scheduler sees it, and the numbered slots that hold all nodes.

use std::{fmt, str::FromStr, sync::Arc, time::Instant};

use super::{breaker::Breaker, doubts::Doubts, load::Load, pairing::PairingBreaker, pools::NodePool};

/// The part of requests that a node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Prefills prompts for decode nodes.
    Prefill,
    /// Decodes what a prefill node has prefilled; prefills short prompts itself.
    Decode,
    /// Serves whole requests.
    Worker,
}

impl Role {
    /// As in flags, metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Worker => "worker",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Self::Prefill, Self::Decode, Self::Worker]
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or_else(|| format!("{name} is no role; choose prefill, decode or worker"))
    }
}

/// How blocks get from a prefill to a decode node. Both nodes of a pair have the same connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Connector {
    /// Through a store that both share: the prefill node first, then the decode node, by `kv_transfer_params`.
    #[default]
    Store,
    /// vLLM's NixlConnector: as [`Self::Store`], with other fields, which the router passes on.
    Nixl,
    /// vLLM's P2pNcclConnector: by addresses in the request's id.
    P2pNccl,
    /// Both at once: the decode node reads blocks while the prefill node computes. kvlane's engines with `kvlane.direct`.
    Direct,
}

impl Connector {
    /// In the order in which errors name them.
    pub const ALL: [Self; 4] = [Self::Store, Self::Nixl, Self::P2pNccl, Self::Direct];

    /// As in flags, files and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Nixl => "nixl",
            Self::P2pNccl => "p2p-nccl",
            Self::Direct => "direct",
        }
    }
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Connector {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|connector| connector.name() == name)
            .ok_or_else(|| format!("{name} is no connector; choose store, nixl, p2p-nccl or direct"))
    }
}

/// Identifies a node from its join to its removal. A node that comes back gets a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) slot: u32,
    pub(super) epoch: u32,
}

impl NodeId {
    /// The node's bit in the indexes. A later node may reuse it.
    pub(crate) fn slot(self) -> usize {
        self.slot as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.epoch)
    }
}

/// Whether a node gets requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// Gets the requests of its role.
    Ready,
    /// Does not answer probes, or not yet. Gets requests only if no other node could serve them.
    Suspect,
    /// Gets no requests, and finishes those that it has.
    Draining,
}

impl NodeState {
    /// As in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
        }
    }
}

/// The sources that name a node, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownBy {
    /// A flag or the file.
    pub flag: bool,
    /// An operator's `kvlane route add`.
    pub operator: bool,
    /// DNS records of a name.
    pub dns: bool,
    /// Its own beats or pings.
    pub beat: bool,
}

impl KnownBy {
    /// As in `/nodes` and `kvlane route list`.
    pub fn names(self) -> Vec<&'static str> {
        let all = [(self.flag, "flag"), (self.operator, "operator"), (self.dns, "dns"), (self.beat, "beat")];
        all.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
    }
}

/// An engine's server, or one data-parallel rank of it.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its address, and its rank if it is one of several. Metrics, pages and logs show it.
    pub name: Arc<str>,
    /// Changed by the balancer if `may_flip`.
    pub role: Role,
    /// Only prefill and decode nodes of one group can pair, because they share a daemon and a layout.
    pub group: Arc<str>,
    /// How the group's nodes hand over.
    pub connector: Connector,
    /// `HOST:PORT` at which other engines reach its connector: the ZeroMQ socket of [`Connector::P2pNccl`], the hand-off
    /// address of [`Connector::Direct`].
    pub connector_address: Option<Arc<str>>,
    /// For people only.
    pub known_by: KnownBy,
    /// Where it runs. Transfers within a host are mostly faster.
    pub host: Arc<str>,
    /// Nodes of one class are alike: times learned at one hold for the others.
    pub class: Arc<str>,
    /// Models and adapters that it serves.
    pub models: Vec<Arc<str>>,
    /// Whether it gets requests.
    pub state: NodeState,
    /// Whether the balancer may change its role.
    pub may_flip: bool,
    /// The role that it takes once its requests have ended; until then it gets no new ones.
    pub next_role: Option<Role>,
    /// Changed by reservations and by the node's metrics.
    pub load: Load,
    /// Keeps requests away while it fails.
    pub breaker: Breaker,
    /// The pool that it shares with other nodes: [`Scheduler::set_pool`](super::Scheduler::set_pool).
    pub(super) pool: Option<NodePool>,
    /// Answers of 500 that may be the requests' fault.
    pub(super) doubts: Doubts,
    /// Reason of its last failure; None after it has served a request.
    pub(super) last_failure: Option<Arc<str>>,
    /// Stops pairs with this node while it hands nothing over.
    pub pairing: PairingBreaker,
    /// Number of the last choice that took it.
    pub(super) chosen: u64,
}

impl Node {
    /// A node that is suspect until its first answer.
    pub fn new(name: &str, role: Role, group: &str) -> Self {
        Self {
            name: name.into(),
            role,
            group: group.into(),
            connector: Connector::default(),
            connector_address: None,
            known_by: KnownBy::default(),
            host: "".into(),
            class: "".into(),
            models: Vec::new(),
            state: NodeState::Suspect,
            may_flip: false,
            next_role: None,
            load: Load::default(),
            breaker: Breaker::default(),
            pool: None,
            doubts: Doubts::default(),
            last_failure: None,
            pairing: PairingBreaker::default(),
            chosen: 0,
        }
    }

    /// Whether it serves this model or adapter.
    pub fn serves(&self, model: &str) -> bool {
        self.models.iter().any(|served| &**served == model)
    }

    /// The name of the pool that it can load blocks from.
    pub fn pool(&self) -> Option<&str> {
        self.pool.as_ref().map(|pool| &*pool.name)
    }

    /// Whether this node, as prefill node, can hand over to the other one.
    pub fn pairs_with(&self, other: &Self) -> bool {
        self.group == other.group
            && self.connector == other.connector
            && self.is_reachable_as(Role::Prefill)
            && other.is_reachable_as(Role::Decode)
    }

    /// Whether it has an address for the other node of a pair, if that one connects to it. P2P NCCL engines connect to each
    /// other; in a direct pair only the decode node connects.
    fn is_reachable_as(&self, role: Role) -> bool {
        match (self.connector, role) {
            (Connector::P2pNccl, _) | (Connector::Direct, Role::Prefill) => self.connector_address.is_some(),
            _ => true,
        }
    }

    /// Whether it can serve a whole request. vLLM's P2pNcclConnector cannot: it reads addresses from each request's id, and its
    /// engine crashes if there are none.
    pub fn serves_alone(&self) -> bool {
        self.connector != Connector::P2pNccl
    }

    /// Whether it may get a request. As a last resort also if it is suspect, changes its role, or has an open breaker.
    pub(super) fn accepts(&self, is_last_resort: bool, now: Instant) -> bool {
        let is_up = self.state == NodeState::Ready || is_last_resort && self.state == NodeState::Suspect;
        let keeps_role = self.next_role.is_none() || is_last_resort;
        is_up && keeps_role && (is_last_resort || self.breaker.allows(now))
    }
}

/// All nodes, in numbered slots. The [index](super::Index) has a bit for each slot, so a new node takes the lowest free one.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    /// Counts the nodes that have had this slot, so that ids of removed nodes match nothing.
    epoch: u32,
    node: Option<Node>,
}

impl Nodes {
    pub(super) fn add(&mut self, node: Node) -> NodeId {
        let free = self.slots.iter().position(|slot| slot.node.is_none());
        let number = free.unwrap_or_else(|| {
            self.slots.push(Slot { epoch: 0, node: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[number];
        slot.epoch += 1;
        slot.node = Some(node);
        NodeId { slot: number as u32, epoch: slot.epoch }
    }

    pub(super) fn remove(&mut self, id: NodeId) -> Option<Node> {
        self.get(id)?;
        self.slots[id.slot as usize].node.take()
    }

    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        let slot = self.slots.get(id.slot as usize).filter(|slot| slot.epoch == id.epoch)?;
        slot.node.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        let slot = self.slots.get_mut(id.slot as usize).filter(|slot| slot.epoch == id.epoch)?;
        slot.node.as_mut()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let id = |number: usize, epoch| NodeId { slot: number as u32, epoch };
        self.slots
            .iter()
            .enumerate()
            .filter_map(move |(number, slot)| Some((id(number, slot.epoch), slot.node.as_ref()?)))
    }
}
