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

/// An agent that was idle for this long is disconnected. A restarted engine is a new agent, and the old one never says that it
/// has ended. A hand-off in flight uses each of its agents at least every 30 s, because it ends without progress for so long.
const IDLE_KEPT: Duration = Duration::from_secs(60);
/// Most agents that stay connected while they are idle, so that each of hundreds of engines holds few connections.
const IDLE_MAX: usize = 16;
/// Beyond [`IDLE_MAX`], those are disconnected that were idle for longer than this. It exceeds [`SEND_PATIENCE`], so that no
/// message is under way, and the second after which a decode engine renews its lease.
const IDLE_MIN: Duration = Duration::from_secs(6);
const TIDY_EVERY: Duration = Duration::from_secs(3);

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
    tidied: Instant,
}

struct Peer {
    peer: PeerId,
    /// The last message to it, or READ from it.
    last_used: Instant,
    /// READs from it in flight.
    reads: usize,
    to_send: mpsc::Sender<Vec<u8>>,
}

impl Talk {
    /// Call it inside a `LocalSet`, because each agent gets a local task.
    pub(crate) fn new(engine: Arc<Engine>, on_lost: OnLost) -> Talk {
        Talk { engine, peers: HashMap::new(), own: HashSet::new(), on_lost, tidied: Instant::now() }
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
        self.peers.insert(id, Peer { peer, last_used: Instant::now(), reads: 0, to_send });
    }

    /// Disconnects from idle agents if it is time to. Returns when to call it again, and the agents.
    pub(crate) fn tidy(&mut self, now: Instant) -> (Duration, Vec<EngineId>) {
        if self.peers.keys().all(|id| self.own.contains(id)) {
            return (Duration::from_secs(3600), Vec::new());
        }
        let due = self.tidied + TIDY_EVERY;
        if now < due {
            return (due - now, Vec::new());
        }
        self.tidied = now;
        let others = self.peers.iter().filter(|(id, _)| !self.own.contains(id));
        let idle = others.map(|(id, peer)| {
            let idle =
                if peer.reads > 0 { Duration::ZERO } else { now.saturating_duration_since(peer.last_used) };
            (*id, idle)
        });
        let unused = unused(idle.collect());
        unused.iter().for_each(|id| self.forget(*id));
        (TIDY_EVERY, unused)
    }

    /// Notes that a READ from this agent begins.
    pub(crate) fn begin_read(&mut self, id: EngineId) {
        self.peers.get_mut(&id).into_iter().for_each(|peer| peer.reads += 1);
    }

    /// Notes that a READ over this connection has ended.
    pub(crate) fn end_read(&mut self, id: EngineId, of: PeerId) {
        // The agent was lost meanwhile, and may have another connection.
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.peer == of) else { return };
        peer.reads = peer.reads.saturating_sub(1);
        peer.last_used = Instant::now();
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

/// Which agents to disconnect, of all that are connected and for how long each was idle.
fn unused<I>(mut idle: Vec<(I, Duration)>) -> Vec<I> {
    idle.sort_by_key(|(_, idle)| std::cmp::Reverse(*idle));
    let surplus = idle.len().saturating_sub(IDLE_MAX);
    let is_unused = |(index, (_, idle)): &(usize, (I, Duration))| {
        *idle >= IDLE_KEPT || (*index < surplus && *idle > IDLE_MIN)
    };
    idle.into_iter().enumerate().filter(is_unused).map(|(_, (id, _))| id).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use kvlane_fabric::EngineOptions;

    use super::*;

    /// Each start of an engine is another peer. Former ones were kept for ever, and the fabric tried to reconnect to each.
    #[tokio::test]
    async fn engines_that_nobody_talks_to_any_more_are_disconnected() {
        let [own, rank, former, present] = [(); 4].map(|()| Engine::new(EngineOptions::default()).unwrap());
        let all = tokio::task::LocalSet::new();
        all.run_until(async {
            let mut talk = Talk::new(Arc::new(own), Rc::new(|_| panic!("none is lost")));
            let endpoints =
                [&rank, &former, &present].map(|engine| engine.describe().unwrap().to_bytes().unwrap());
            talk.connect_own(&endpoints[0], "an own rank").unwrap();
            let former = talk.connect(&endpoints[1], "the former one").unwrap();
            let present = talk.connect(&endpoints[2], "the present one").unwrap();
            talk.begin_read(present);
            let (began, none) = (talk.tidied, Vec::new());
            assert_eq!(talk.tidy(began), (TIDY_EVERY, none.clone()), "too early");
            let later = Instant::now() + IDLE_KEPT;
            assert_eq!(talk.tidy(later).1, [former], "the other one is read from, and the rank is one's own");
            assert!(talk.peer(former).is_none() && talk.peer(present).is_some());
            let peer = talk.peer(present).unwrap();
            talk.end_read(present, peer);
            assert_eq!(talk.tidy(later + IDLE_KEPT).1, [present]);
            assert_eq!(talk.tidy(later + 2 * IDLE_KEPT), (Duration::from_secs(3600), none));
        })
        .await;
    }

    #[test]
    fn beyond_the_limit_those_that_were_idle_for_longest_go() {
        let seconds = Duration::from_secs;
        let idle = |count: u64, each: u64| (0..count).map(|id| (id, seconds(each))).collect::<Vec<_>>();
        assert_eq!(unused(idle(IDLE_MAX as u64, 59)), [0u64; 0]);
        assert_eq!(unused(idle(IDLE_MAX as u64, 60)).len(), IDLE_MAX);
        assert_eq!(unused(idle(100, 6)), [0u64; 0], "they may be in use");
        assert_eq!(unused(idle(100, 7)).len(), 100 - IDLE_MAX);
        // Ten too many, of which three were not used for longer than IDLE_MIN.
        let mut mixed = idle(IDLE_MAX as u64 + 6, 3);
        mixed.extend([(90, seconds(20)), (91, seconds(30)), (92, seconds(70)), (93, seconds(5))]);
        assert_eq!(unused(mixed), [92, 91, 90]);
    }
}
