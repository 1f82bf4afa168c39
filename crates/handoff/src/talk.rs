//! Sends messages to other agents over the fabric, in order for each agent, and reports agents that are lost.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_fabric::{Descriptor, Engine, EngineId, FabricError, PeerId, Priority, SendOptions};
use kvlane_gpu::GpuError;
use thiserror::Error;
use tokio::sync::mpsc;

use crate::geometry::GeometryError;
use crate::message::{Endpoint, Message};

/// Most messages queued for one agent.
const WAITING_MAX: usize = 4096;
/// Timeout of a message. After it the agent counts as lost.
const SEND_PATIENCE: Duration = Duration::from_secs(5);
/// Timeout between processes of one engine: a message is lost only if a process ends, and the kernel reports that at once.
const SEND_PATIENCE_WITHIN: Duration = Duration::from_secs(3600);

/// An agent that was idle for this long counts as lost when a new one is added. A restarted engine is a new agent, and the old
/// one never says that it has ended.
const IDLE_KEPT: Duration = Duration::from_secs(600);

/// Why an agent cannot start.
#[derive(Debug, Error)]
pub enum AgentError {
    /// From the fabric engine.
    #[error("{0}")]
    Fabric(#[from] FabricError),
    /// The kernel refuses a thread, or random bytes.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// From a GPU's driver.
    #[error("{0}")]
    Gpu(#[from] GpuError),
    /// The rank's regions cannot be handed over.
    #[error("{0}")]
    Geometry(#[from] GeometryError),
    /// An endpoint that the caller named as a rank's is no descriptor.
    #[error("not the descriptor of a rank's engine")]
    NoRank,
    /// A descriptor of so many regions, or a Want of so many ranks, exceeds the length of a message.
    #[error("{0} regions or ranks are too many to be told of")]
    TooMany(usize),
}

/// Called for each agent that is lost; it may be called more than once for one.
pub(crate) type OnLost = Rc<dyn Fn(EngineId)>;

/// The other agents, each with a queue of messages and a task that sends them.
pub(crate) struct Talk {
    engine: Arc<Engine>,
    peers: HashMap<EngineId, Peer>,
    /// Other processes of this engine, whose silence is no loss.
    own: HashSet<EngineId>,
    on_lost: OnLost,
}

struct Peer {
    peer: PeerId,
    /// The last message to it, or READ from it.
    last_used: Instant,
    to_send: mpsc::Sender<Vec<u8>>,
}

impl Talk {
    /// Call it inside a `LocalSet`, because each agent gets a local task.
    pub(crate) fn new(engine: Arc<Engine>, on_lost: OnLost) -> Talk {
        Talk { engine, peers: HashMap::new(), own: HashSet::new(), on_lost }
    }

    /// Connects to an agent, unless it is connected. Returns at once: the fabric makes the connections meanwhile. None if the
    /// bytes are no descriptor, or the fabric cannot use it. `name` is for the log.
    pub(crate) fn connect(&mut self, endpoint: &Endpoint, name: impl Display) -> Option<EngineId> {
        let descriptor = Descriptor::from_bytes(endpoint).ok()?;
        let id = EngineId::from(&descriptor);
        if let Some(peer) = self.peers.get_mut(&id) {
            // The caller is about to read from it, or to send to it.
            peer.last_used = Instant::now();
        } else {
            let peer = self.engine.connect(&descriptor).ok()?;
            self.add(id, peer, name);
        }
        Some(id)
    }

    /// Connects to another process of this engine, whose silence is no loss.
    pub(crate) fn connect_own(&mut self, endpoint: &Endpoint, name: impl Display) -> Option<EngineId> {
        let id = EngineId::from(&Descriptor::from_bytes(endpoint).ok()?);
        self.own.insert(id);
        self.engine.allow_silence(id);
        self.connect(endpoint, name)
    }

    /// Adds an agent that the fabric has connected to by its address. If the agent has a connection already, the older one
    /// stays, because messages may be queued on it.
    pub(crate) fn add(&mut self, id: EngineId, peer: PeerId, name: impl Display) {
        if self.peers.contains_key(&id) {
            return self.engine.disconnect(peer);
        }
        self.engine.name_peer(peer, name.to_string());
        let (to_send, mut waiting) = mpsc::channel::<Vec<u8>>(WAITING_MAX);
        let (engine, on_lost) = (Arc::clone(&self.engine), Rc::clone(&self.on_lost));
        let timeout = if self.own.contains(&id) { SEND_PATIENCE_WITHIN } else { SEND_PATIENCE };
        tokio::task::spawn_local(async move {
            while let Some(bytes) = waiting.recv().await {
                let options = SendOptions { timeout, priority: Priority::High };
                let is_there = match engine.send(peer, bytes, options) {
                    Ok(sent) => sent.await.is_ok(),
                    Err(_) => false,
                };
                if !is_there {
                    return on_lost(id);
                }
            }
        });
        self.report_idle(Instant::now());
        self.peers.insert(id, Peer { peer, last_used: Instant::now(), to_send });
    }

    /// Reports idle agents as lost; their agent then forgets them.
    fn report_idle(&self, now: Instant) {
        let is_idle = |peer: &Peer| now.saturating_duration_since(peer.last_used) >= IDLE_KEPT;
        self.peers.iter().filter(|(_, peer)| is_idle(peer)).for_each(|(id, _)| (self.on_lost)(*id));
    }

    /// The fabric engine's id of an agent that is connected.
    pub(crate) fn peer(&self, id: EngineId) -> Option<PeerId> {
        self.peers.get(&id).map(|peer| peer.peer)
    }

    /// Queues a message behind those that were sent to this agent before. Reports the agent as lost if its queue is full.
    pub(crate) fn send(&mut self, to: EngineId, message: &Message) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        peer.last_used = Instant::now();
        if peer.to_send.try_send(message.encode()).is_err() {
            // The queue is full, or its task has ended because the agent is lost.
            (self.on_lost)(to);
        }
    }

    /// Disconnects from an agent.
    pub(crate) fn forget(&mut self, id: EngineId) {
        if let Some(peer) = self.peers.remove(&id) {
            self.engine.disconnect(peer.peer);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::cell::RefCell;

    use kvlane_fabric::EngineOptions;

    use super::*;

    /// Each start of an engine is another peer. Former ones were kept for ever, and the fabric tried to reconnect to each.
    #[tokio::test]
    async fn engines_that_nobody_talks_to_any_more_are_lost() {
        let [own, former, present] = [(); 3].map(|()| Engine::new(EngineOptions::default()).unwrap());
        let lost = Rc::new(RefCell::new(Vec::new()));
        let keeps = Rc::clone(&lost);
        let on_lost = Rc::new(move |id| keeps.borrow_mut().push(id));
        let all = tokio::task::LocalSet::new();
        all.run_until(async {
            let mut talk = Talk::new(Arc::new(own), on_lost);
            let [former, present] = [&former, &present].map(|engine| engine.describe().unwrap());
            let [former, at_present] = [former, present].map(|endpoint| endpoint.to_bytes().unwrap());
            let former = talk.connect(&former, "the former one").unwrap();
            let present = talk.connect(&at_present, "the present one").unwrap();
            talk.report_idle(Instant::now());
            assert!(lost.borrow().is_empty());
            for id in [former, present] {
                talk.peers.get_mut(&id).unwrap().last_used -= Duration::from_secs(1);
            }
            // A READ sends no message, but calls this.
            talk.connect(&at_present, "the present one");
            talk.report_idle(talk.peers[&present].last_used + IDLE_KEPT - Duration::from_millis(500));
            assert_eq!(*lost.borrow(), [former]);
        })
        .await;
    }
}
