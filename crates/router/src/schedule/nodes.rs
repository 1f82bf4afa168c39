//! The nodes that a router knows.

use std::{fmt, str::FromStr, sync::Arc, time::Instant};

use super::{breaker::Breaker, doubts::Doubts, hand_offs::HandOffs, load::Load, pools::PoolOf};

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Prefills prompts for decode nodes.
    Prefill,
    /// Goes on where a prefill node ended; prefills short prompts itself.
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

/// How a prefill node hands over to a decode node. Both ends of a pair have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Connector {
    /// Through a store that both share: the prefill node first, then the decode node, by `kv_transfer_params`.
    #[default]
    Store,
    /// vLLM's NixlConnector: as [`Self::Store`], with other fields, which the router passes on.
    Nixl,
    /// vLLM's P2pNcclConnector: by addresses in the request's id.
    P2pNccl,
    /// Both at once: the decode node reads what the prefill node computes. kvlane's engines with `kvlane.direct`.
    Direct,
}

impl Connector {
    /// All of them.
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

/// Names a node for as long as it is known; a node that comes back has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) slot: u32,
    pub(super) epoch: u32,
}

impl NodeId {
    /// The number that indexes have a bit for. Another node may have it later.
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
    /// It does.
    Ready,
    /// It has not answered, or not yet: only when no other node could serve a request.
    Suspect,
    /// It finishes what it has.
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

/// Who has named a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownBy {
    /// A flag or the file.
    pub flag: bool,
    /// An operator.
    pub operator: bool,
    /// Records of a name.
    pub dns: bool,
    /// Its own beats.
    pub beat: bool,
}

impl KnownBy {
    /// As in answers.
    pub fn names(self) -> Vec<&'static str> {
        let all = [(self.flag, "flag"), (self.operator, "operator"), (self.dns, "dns"), (self.beat, "beat")];
        all.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
    }
}

/// One node.
#[derive(Debug, Clone)]
pub struct Node {
    /// For people, metrics and logs: its address, and its rank if it is one of several.
    pub name: Arc<str>,
    /// What it is for.
    pub role: Role,
    /// Prefill and decode nodes of one group can hand over to each other: they share a daemon and a layout.
    pub group: Arc<str>,
    /// How they do that.
    pub connector: Connector,
    /// Where other engines reach its connector, `HOST:PORT`: of [`Connector::P2pNccl`] its ZeroMQ socket, of
    /// [`Connector::Direct`] where it hands over.
    pub connector_address: Option<Arc<str>>,
    /// Who has named it, for people.
    pub known_by: KnownBy,
    /// Where it runs: nodes of one host hand over to each other sooner, mostly.
    pub host: Arc<str>,
    /// Of nodes that are alike, so that what one takes says what the others take.
    pub class: Arc<str>,
    /// Models and adapters that it serves.
    pub models: Vec<Arc<str>>,
    /// Whether it gets requests.
    pub state: NodeState,
    /// Whether its role may change, as the work does.
    pub may_flip: bool,
    /// The role that it takes once its requests are over; it gets no others until then.
    pub next_role: Option<Role>,
    /// What it has to do.
    pub load: Load,
    /// Keeps requests away while it fails.
    pub breaker: Breaker,
    /// The pool that it shares with other nodes: [`Scheduler::set_pool`](super::Scheduler::set_pool).
    pub(super) pool: Option<PoolOf>,
    /// Answers of 500 that may be the requests' fault.
    pub(super) doubts: Doubts,
    /// Reason of its last failure; None after it has served a request.
    pub(super) last_failure: Option<Arc<str>>,
    /// Stops pairs with this node while it hands nothing over.
    pub hand_offs: HandOffs,
    /// Number of the choice that took it last.
    pub(super) chosen: u64,
}

impl Node {
    /// A node that has not answered yet.
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
            hand_offs: HandOffs::default(),
            chosen: 0,
        }
    }

    /// Whether it has this model or adapter.
    pub fn serves(&self, model: &str) -> bool {
        self.models.iter().any(|served| &**served == model)
    }

    /// The name of the pool that it can load blocks from.
    pub fn pool(&self) -> Option<&str> {
        self.pool.as_ref().map(|pool| &*pool.name)
    }

    /// Whether this one can hand over to the other one.
    pub fn pairs_with(&self, other: &Self) -> bool {
        self.group == other.group
            && self.connector == other.connector
            && self.can_be_named_as(Role::Prefill)
            && other.can_be_named_as(Role::Decode)
    }

    /// Whether it is known where the other end finds it, as far as it looks for it. P2P NCCL engines look for each other; of a
    /// direct pair the one that decodes looks for the other one.
    fn can_be_named_as(&self, role: Role) -> bool {
        match (self.connector, role) {
            (Connector::P2pNccl, _) | (Connector::Direct, Role::Prefill) => self.connector_address.is_some(),
            _ => true,
        }
    }

    /// Whether it can serve a whole request. vLLM's P2pNcclConnector reads addresses from each request's id, and ends its engine
    /// where there are none.
    pub fn serves_alone(&self) -> bool {
        self.connector != Connector::P2pNccl
    }

    /// Whether it may get a request; suspects only where nobody else can.
    pub(super) fn takes(&self, is_last_resort: bool, now: Instant) -> bool {
        let is_up = self.state == NodeState::Ready || is_last_resort && self.state == NodeState::Suspect;
        // Whoever changes its role serves still, where nobody else does.
        let is_here = self.next_role.is_none() || is_last_resort;
        is_up && is_here && (is_last_resort || self.breaker.allows(now))
    }
}

/// Nodes in numbered slots, which the [index](super::Index) has bits for.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    epoch: u32,
    node: Option<Node>,
}

impl Nodes {
    pub(super) fn add(&mut self, node: Node) -> NodeId {
        let free = self.slots.iter().position(|slot| slot.node.is_none());
        let slot = free.unwrap_or_else(|| {
            self.slots.push(Slot { epoch: 0, node: None });
            self.slots.len() - 1
        });
        let place = &mut self.slots[slot];
        place.epoch += 1;
        place.node = Some(node);
        NodeId { slot: slot as u32, epoch: place.epoch }
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
        let id = |slot: usize, epoch| NodeId { slot: slot as u32, epoch };
        self.slots
            .iter()
            .enumerate()
            .filter_map(move |(slot, place)| Some((id(slot, place.epoch), place.node.as_ref()?)))
    }
}
