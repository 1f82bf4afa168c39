//! Messages to other agents over the fabric: in order for each of them, and who is lost is told.

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

/// Most messages that wait for one agent.
const WAITING_MAX: usize = 4096;
/// After so long a message is given up, and whoever it is for counts as lost.
const SEND_PATIENCE: Duration = Duration::from_secs(5);
/// Patience between processes of one engine: a message is lost only if a process ends, and the kernel reports that at once.
const SEND_PATIENCE_WITHIN: Duration = Duration::from_secs(3600);

/// Who was not talked to for so long counts as lost when somebody new comes: engines that were restarted are others, and the
/// old ones say nothing of that.
const IDLE_KEPT: Duration = Duration::from_secs(600);

/// Why an agent cannot work.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The fabric's engine.
    #[error("{0}")]
    Fabric(#[from] FabricError),
    /// The kernel's refusal of a thread, or of random bytes.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A GPU's driver.
    #[error("{0}")]
    Gpu(#[from] GpuError),
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
    /// Processes of this engine, whose silence does not count.
    own: HashSet<EngineId>,
    on_lost: OnLost,
}

struct Known {
    peer: PeerId,
    /// When it was talked to, or read from, the last time.
    talked: Instant,
    to_send: mpsc::Sender<Vec<u8>>,
}

impl Talk {
    /// Nobody yet. To be used inside a `LocalSet`.
    pub(crate) fn new(engine: Arc<Engine>, on_lost: OnLost) -> Talk {
        Talk { engine, peers: HashMap::new(), own: HashSet::new(), on_lost }
    }

    /// The peer that a descriptor is of; connections are made meanwhile. None: the descriptor is none, or cannot be used.
    /// Connects to a process. `name` is for the log.
    pub(crate) fn reach(&mut self, endpoint: &Endpoint, name: impl Display) -> Option<EngineId> {
        let descriptor = Descriptor::from_bytes(endpoint).ok()?;
        let id = EngineId::from(&descriptor);
        if let Some(known) = self.peers.get_mut(&id) {
            // Whoever asks is about to read from it, or to say something.
            known.talked = Instant::now();
        } else {
            let peer = self.engine.connect(&descriptor).ok()?;
            self.add(id, peer, name);
        }
        Some(id)
    }

    /// Connects to another process of this engine, whose silence does not count.
    pub(crate) fn reach_own(&mut self, endpoint: &Endpoint, name: impl Display) -> Option<EngineId> {
        let id = EngineId::from(&Descriptor::from_bytes(endpoint).ok()?);
        self.own.insert(id);
        self.engine.allow_silence(id);
        self.reach(endpoint, name)
    }

    /// The same of one that is connected already. Where it is talked to otherwise, this goes on: what was said waits there.
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
        self.forget_idle(Instant::now());
        self.peers.insert(id, Known { peer, talked: Instant::now(), to_send });
    }

    fn forget_idle(&self, now: Instant) {
        let is_idle = |known: &Known| now.saturating_duration_since(known.talked) >= IDLE_KEPT;
        self.peers.iter().filter(|(_, known)| is_idle(known)).for_each(|(id, _)| (self.on_lost)(*id));
    }

    /// The number of a peer in the fabric's engine.
    pub(crate) fn peer(&self, id: EngineId) -> Option<PeerId> {
        self.peers.get(&id).map(|known| known.peer)
    }

    /// After all that was sent to it before.
    pub(crate) fn send(&mut self, to: EngineId, message: &Message) {
        let Some(known) = self.peers.get_mut(&to) else { return };
        known.talked = Instant::now();
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::cell::RefCell;

    use kvlane_fabric::EngineOptions;

    use super::*;

    /// Each start of an engine is another peer. Those of before were kept for ever, each with a connection that was tried again
    /// and again.
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
            let former = talk.reach(&former, "the former one").unwrap();
            let present = talk.reach(&at_present, "the present one").unwrap();
            talk.forget_idle(Instant::now());
            assert!(lost.borrow().is_empty());
            for id in [former, present] {
                talk.peers.get_mut(&id).unwrap().talked -= Duration::from_secs(1);
            }
            // It is only read from: that says nothing to it, and goes by this.
            talk.reach(&at_present, "the present one");
            talk.forget_idle(talk.peers[&present].talked + IDLE_KEPT - Duration::from_millis(500));
            assert_eq!(*lost.borrow(), [former]);
        })
        .await;
    }
}
