//! What happens to nodes, and what follows.

use std::{net::IpAddr, net::SocketAddr, str::FromStr, sync::Arc};

use thiserror::Error;

use super::limits::{BEAT_MISSED, NODES_MAX};
use crate::{
    address::Address,
    schedule::{Connector, KnownBy, NodeState, Role},
};

/// A node as somebody names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where it is: what tells it from others.
    pub address: Address,
    /// What it is for.
    pub role: Role,
    /// Whom it can hand over to, or take over from.
    pub group: Arc<str>,
    /// Nodes of one class are alike: what one takes for a prompt says what the others take.
    pub class: Arc<str>,
    /// Where it runs, as far as that matters for hand-overs; None: the host of its address.
    pub host: Option<Arc<str>>,
    /// How. None leaves it to the node's pings; [`Connector::Store`] if it sends none.
    pub connector: Option<Connector>,
    /// Where other engines reach its connector, `HOST:PORT`.
    pub connector_address: Option<Arc<str>>,
    /// Pool that the node shares with others; None leaves it to the node's metrics.
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

/// The text of the address at which other engines reach an engine's connector, `HOST:PORT`: it becomes part of requests and of
/// their ids, so it has nothing else in it.
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

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A flag or the file names a node: it is never forgotten.
    Configured(Spec),
    /// The reloaded configuration adds or changes this node. Its role replaces that of other sources.
    Reconfigured(Spec),
    /// The reloaded configuration no longer has this node. It finishes its requests and leaves, unless another source names it.
    Unconfigured(Address),
    /// The reloaded configuration no longer has the name with this number.
    Unnamed(usize),
    /// An operator adds a node, or ends its draining: it is never forgotten either.
    Added(Spec),
    /// An operator has a node finish what it has, and gives it nothing new.
    Drained(Address),
    /// An operator takes a node away: at once, or when it has finished what it has.
    Removed {
        /// Which one.
        address: Address,
        /// Without waiting for what it has.
        now: bool,
    },
    /// A node says that it is there.
    Beat(Spec),
    /// A node that beats says that it goes.
    Bye(Address),
    /// A name has these addresses now.
    Resolved {
        /// Which one of the names.
        name: usize,
        /// What the nodes at the addresses are like; of its address all but the host counts.
        like: Spec,
        /// All of them.
        hosts: Vec<IpAddr>,
    },
    /// A node has answered a probe, over a connection to this address.
    Answered {
        /// Which one.
        address: Address,
        /// Where it was reached.
        at: Option<SocketAddr>,
    },
    /// A node has not answered for so long that it counts as away.
    Silent(Address),
    /// A node has nothing to do any more.
    Idle(Address),
    /// Time passes.
    Tick,
}

/// What follows. Changes of one event are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A node joins. It counts as suspect until something else is said.
    Join {
        /// What it is; `connector` is known.
        spec: Spec,
        /// Higher than that of any node before.
        epoch: u64,
    },
    /// A node goes.
    Leave {
        /// Which one.
        address: Address,
        /// The epoch that it joined with.
        epoch: u64,
        /// As in the log.
        why: &'static str,
    },
    /// A node's state is another one.
    State {
        /// Which one.
        address: Address,
        /// From now on.
        state: NodeState,
        /// As in the log.
        why: &'static str,
    },
    /// Others than before have named a node.
    KnownBy {
        /// Which one.
        address: Address,
        /// All who have.
        known_by: KnownBy,
    },
    /// A node has told how it hands over.
    HandsOver {
        /// Which one.
        address: Address,
        /// How.
        connector: Connector,
        /// Where other engines reach its connector.
        connector_address: Option<Arc<str>>,
    },
}

/// An event that changes nothing, and why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Nobody knows it.
    #[error("{0} is no node of this router; `kvlane route list` names them")]
    Unknown(Address),
    /// It is there for something else.
    #[error("{address} is there already, as {role} of the group '{group}': remove it first")]
    Differs {
        /// Which one.
        address: Address,
        /// What it is.
        role: Role,
        /// Of which group.
        group: Arc<str>,
    },
    /// Its ZeroMQ address has changed more often than engines start.
    #[error("{0} names another ZeroMQ address again within {s} s: an engine does not start so often", s = BEAT_MISSED.as_secs())]
    TooOften(Address),
    /// There are as many as may be.
    #[error("there are {NODES_MAX} nodes, which is the most that are not named by flags or the file")]
    TooMany,
    /// An operator has removed it while it goes on to call.
    #[error("{0} was removed by an operator, and stays away until it is added or has been silent for 30 s")]
    WasRemoved(Address),
}
