//! How the two legs of a pair find each other: the prefill node's connector decides.

use std::sync::Arc;

use crate::{
    schedule::{Connector, NodeId},
    shared::Shared,
};

/// The order of a pair's legs, and how the decode node finds the prompt's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PairingMode {
    /// Prefill, then decode. The prefill node's answer says where the blocks are.
    ByAnswer,
    /// Prefill, then decode, with one request id. Each engine takes the other's address from it.
    ByRequestId {
        /// Address of the prefill node's ZeroMQ socket.
        prefill: Arc<str>,
        /// Address of the decode node's ZeroMQ socket.
        decode: Arc<str>,
    },
    /// Both legs at once. The decode leg names this address, at which the prefill node offers its blocks.
    Concurrent(Arc<str>),
}

impl Shared {
    /// The mode of a pair that has just been chosen.
    ///
    /// # Errors
    /// The node that has been removed since, or whose address is unknown. The router does not try a pair without its addresses,
    /// because P2P NCCL engines exit at a request id that has none.
    pub(super) fn pairing_mode(&self, prefill: NodeId, decode: NodeId) -> Result<PairingMode, NodeId> {
        let state = self.state.lock();
        let node = |id| state.scheduler.node(id).ok_or(id);
        let (one, other) = (node(prefill)?, node(decode)?);
        match one.connector {
            Connector::Store | Connector::Nixl => Ok(PairingMode::ByAnswer),
            Connector::Direct => Ok(PairingMode::Concurrent(one.connector_address.clone().ok_or(prefill)?)),
            Connector::P2pNccl => Ok(PairingMode::ByRequestId {
                prefill: one.connector_address.clone().ok_or(prefill)?,
                decode: other.connector_address.clone().ok_or(decode)?,
            }),
        }
    }
}
