//! How the two nodes of a pair find each other.

use std::sync::Arc;

use crate::{
    schedule::{Connector, NodeId},
    shared::Shared,
};

/// How a prompt gets from one node to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HandOver {
    /// The prefill node's answer says where it is.
    ByAnswer,
    /// Both nodes take each other's address from the request's id.
    ById {
        /// Of the prefill node's ZeroMQ socket.
        prefill: Arc<str>,
        /// Of the decode node's.
        decode: Arc<str>,
    },
    /// Both get the request at once. The decode node is told where the prefill node hands over.
    AtOnce(Arc<str>),
}

impl Shared {
    /// How these two do it, which were chosen together.
    ///
    /// # Errors
    /// A node that has gone since. What is not known must not be tried: P2P NCCL engines end at an id without addresses.
    pub(super) fn hand_over(&self, prefill: NodeId, decode: NodeId) -> Result<HandOver, NodeId> {
        let state = self.state.lock();
        let node = |id| state.scheduler.node(id).ok_or(id);
        let (one, other) = (node(prefill)?, node(decode)?);
        match one.connector {
            Connector::Store | Connector::Nixl => Ok(HandOver::ByAnswer),
            Connector::Direct => Ok(HandOver::AtOnce(one.connector_address.clone().ok_or(prefill)?)),
            Connector::P2pNccl => Ok(HandOver::ById {
                prefill: one.connector_address.clone().ok_or(prefill)?,
                decode: other.connector_address.clone().ok_or(decode)?,
            }),
        }
    }
}
