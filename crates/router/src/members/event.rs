//! Events that reach [`Members`](super::Members), and the changes and refusals that it returns.

use std::{net::IpAddr, net::SocketAddr, str::FromStr, sync::Arc};

use thiserror::Error;

use super::limits::{BEAT_MISSED, NODES_MAX};
use crate::{
    address::Address,
    schedule::{Connector, KnownBy, NodeState, Role},
};

/// A node as a source describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Identifies the node.
    pub address: Address,
    /// The role under which it joins.
    pub role: Role,
    /// Only nodes of one group can pair.
    pub group: Arc<str>,
    /// Nodes of one class are alike: times learned at one hold for the others.
    pub class: Arc<str>,
    /// The host it runs on, which transfers depend on. None: the host of its address.
    pub host: Option<Arc<str>>,
    /// How it hands over. None leaves it to the node's pings; [`Connector::Store`] if it sends none.
    pub connector: Option<Connector>,
    /// Where other engines reach its connector, `HOST:PORT`.
    pub connector_address: Option<Arc<str>>,
    /// The pool that it shares with others. None leaves it to the node's metrics.
    pub pool: Option<Arc<str>>,
}

impl Spec {
    /// A node of the default group.
    pub fn new(address: Address, role: Role) -> Self {
        Self {
            address,
            role,
            group: "".into(),
            class: "".into(),
            host: None,
            connector: None,
            connector_address: None,
            pool: None,
        }
    }
}

/// `HOST:PORT` at which other engines reach an engine's connector. It becomes part of requests and of their ids, so parsing
/// admits no other characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectorAddress(pub Arc<str>);

impl FromStr for ConnectorAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_[]:".contains(&byte);
        match text.rsplit_once(':') {
            Some((host, port))
                if !host.is_empty()
                    && host.bytes().all(fits)
                    && port.parse::<u16>().is_ok_and(|port| port > 0) =>
            {
                Ok(Self(text.into()))
            }
            _ => Err("it has to be HOST:PORT"),
        }
    }
}

/// An observation about a node, by its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A flag or the file names a node, which is then never forgotten.
    Configured(Spec),
    /// The reloaded configuration adds or changes this node. Its role replaces that of other sources.
    Reconfigured(Spec),
    /// The reloaded configuration no longer has this node. It finishes its requests and leaves, unless another source names it.
    Unconfigured(Address),
    /// The reloaded configuration no longer has the name with this number.
    Unnamed(usize),
    /// An operator adds a node, or ends its draining. The node is never forgotten either.
    Added(Spec),
    /// An operator drains a node: it finishes its requests and gets no new ones.
    Drained(Address),
    /// An operator removes a node: at once, or once it has finished its requests.
    Removed {
        /// Address of the node.
        address: Address,
        /// Whether it leaves before its requests have ended.
        now: bool,
    },
    /// A node's beat or ping.
    Beat(Spec),
    /// A node's beats end with a good-bye.
    Bye(Address),
    /// A name resolves to these addresses now.
    Resolved {
        /// Number of the name.
        name: usize,
        /// A template for the nodes at these addresses. The host of its own address does not count.
        like: Spec,
        /// All addresses of the name.
        hosts: Vec<IpAddr>,
    },
    /// A node has answered a probe.
    Answered {
        /// Address of the node.
        address: Address,
        /// The address of the probe's connection.
        at: Option<SocketAddr>,
    },
    /// A node has left too many probes unanswered.
    Silent(Address),
    /// A node that is to leave has no requests any more.
    Idle(Address),
    /// The clock: expires beats, DNS records and the names of removed nodes.
    Tick,
}

/// A change that the scheduler's nodes need. The changes of one event are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChange {
    /// A node joins, as suspect until a [`Self::State`] says otherwise.
    Join {
        /// `connector` is set.
        spec: Spec,
        /// Higher than that of any earlier node.
        epoch: u64,
    },
    /// A node leaves the router.
    Leave {
        /// Address of the node.
        address: Address,
        /// The epoch that it joined with.
        epoch: u64,
        /// Reason for the log.
        why: &'static str,
    },
    /// A node changes its state.
    State {
        /// Address of the node.
        address: Address,
        /// The state from now on.
        state: NodeState,
        /// Reason for the log.
        why: &'static str,
    },
    /// The set of sources that name a node has changed.
    KnownBy {
        /// Address of the node.
        address: Address,
        /// All sources that name it now.
        known_by: KnownBy,
    },
    /// A node's pings say how it hands over.
    HandsOver {
        /// Address of the node.
        address: Address,
        /// Both nodes of a pair must have the same.
        connector: Connector,
        /// Where other engines reach its connector.
        connector_address: Option<Arc<str>>,
    },
}

/// Why an event changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// No node has this address.
    #[error("{0} is no node of this router; `kvlane route list` names them")]
    Unknown(Address),
    /// The node exists with another role or group.
    #[error("{address} is there already, as {role} of the group '{group}': remove it first")]
    Differs {
        /// Address of the node.
        address: Address,
        /// The role that it has.
        role: Role,
        /// The group that it has.
        group: Arc<str>,
    },
    /// Its ZeroMQ address changes more often than engines start.
    #[error("{0} names another ZeroMQ address again within {s} s: an engine does not start so often", s = BEAT_MISSED.as_secs())]
    TooOften(Address),
    /// The limit on nodes that neither flags nor the file name is reached.
    #[error("there are {NODES_MAX} nodes, which is the most that are not named by flags or the file")]
    TooMany,
    /// An operator has removed it, and it still sends beats.
    #[error("{0} was removed by an operator, and stays away until it is added or has been silent for 30 s")]
    WasRemoved(Address),
}
