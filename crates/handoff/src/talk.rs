//! Messages to other agents over the fabric: in order for each of them, and who is lost is told.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{Descriptor, Engine, EngineId, FabricError, PeerId, Priority, SendOptions};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::geometry::GeometryError;
use crate::message::{Endpoint, Message};

/// Most messages that wait for one agent.
const WAITING_MAX: usize = 4096;
/// After so long a message is given up, and whoever it is for counts as lost.
const SEND_PATIENCE: Duration = Duration::from_secs(5);

/// Why an agent cannot work.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The fabric's engine.
    #[error("{0}")]
    Fabric(#[from] FabricError),
    /// The kernel's refusal of a thread, or of random bytes.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// What it is about cannot be handed over.
    #[error("{0}")]
    Geometry(#[from] GeometryError),
    /// What a rank's descriptor is said to be.
    #[error("not the descriptor of a rank's engine")]
    NoRank,
    /// It does not fit into a message.
    #[error("{0} regions or ranks are too many to be told of")]
    TooMany(usize),
}

/// Called with who is lost.
pub(crate) type OnLost = Rc<dyn Fn(EngineId)>;

/// Everybody that is talked to.
pub(crate) struct Talk {
    engine: Arc<Engine>,
    peers: HashMap<EngineId, Known>,
    on_lost: OnLost,
}

struct Known {
    peer: PeerId,
    to_send: mpsc::Sender<Vec<u8>>,
}

impl Talk {
    /// Nobody yet. To be used inside a `LocalSet`.
    pub(crate) fn new(engine: Arc<Engine>, on_lost: OnLost) -> Talk {
        Talk { engine, peers: HashMap::new(), on_lost }
    }

    /// The peer that a descriptor is of; connections are made meanwhile. None: the descriptor is none, or cannot be used.
    pub(crate) fn reach(&mut self, endpoint: &Endpoint) -> Option<EngineId> {
        let descriptor = Descriptor::from_bytes(endpoint).ok()?;
        let id = EngineId::from(&descriptor);
        if !self.peers.contains_key(&id) {
            let peer = self.engine.connect(&descriptor).ok()?;
            self.add(id, peer);
        }
        Some(id)
    }

    /// The same of one that is connected already. Where it is talked to otherwise, this goes on: what was said waits there.
    pub(crate) fn add(&mut self, id: EngineId, peer: PeerId) {
        if self.peers.contains_key(&id) {
            return self.engine.disconnect(peer);
        }
        let (to_send, mut waiting) = mpsc::channel::<Vec<u8>>(WAITING_MAX);
        let (engine, on_lost) = (Arc::clone(&self.engine), Rc::clone(&self.on_lost));
        tokio::task::spawn_local(async move {
            while let Some(bytes) = waiting.recv().await {
                let options = SendOptions { timeout: SEND_PATIENCE, priority: Priority::High };
                let is_there = match engine.send(peer, bytes, options) {
                    Ok(sent) => sent.await.is_ok(),
                    Err(_) => false,
                };
                if !is_there {
                    return on_lost(id);
                }
            }
        });
        self.peers.insert(id, Known { peer, to_send });
    }

    /// The number of a peer in the fabric's engine.
    pub(crate) fn peer(&self, id: EngineId) -> Option<PeerId> {
        self.peers.get(&id).map(|known| known.peer)
    }

    /// After all that was sent to it before.
    pub(crate) fn send(&mut self, to: EngineId, message: &Message) {
        let Some(known) = self.peers.get(&to) else { return };
        if known.to_send.try_send(message.encode()).is_err() {
            // It takes nothing, or is lost already.
            (self.on_lost)(to);
        }
    }

    /// Ends the connections to it.
    pub(crate) fn forget(&mut self, id: EngineId) {
        if let Some(known) = self.peers.remove(&id) {
            self.engine.disconnect(known.peer);
        }
    }
}
