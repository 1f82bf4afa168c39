//! Reads the KV events of all nodes' engines, on one thread. Each node has a task that
//!
//! 1. subscribes at the engine's socket, and then replays what was published before, so that no message falls in between;
//! 2. applies live messages in order, and replays missing ones ([`progress`](super::progress) decides);
//! 3. on an error marks the node as not live, and connects again after a pause.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use bytes::Bytes;
use kvlane_door::RuntimeThread;
use kvlane_kv_events::{
    FramesError, Limits as EventLimits, Published, Replayed, decode_batch, replay_request,
};
use kvlane_zmtp::{ConnectionError, Dealer, Limits, PeerOptions, Subscriber};
use thiserror::Error;
use tokio::{net::lookup_host, task::JoinHandle as Task, time::timeout};

use super::{
    progress::{Next, Progress},
    settings::{Endpoint, EventSource},
    shared::Knowledge,
};
use crate::schedule::NodeId;

/// Period of the check for nodes that joined or left.
const SCAN_PERIOD: Duration = Duration::from_millis(500);
/// Pause before the next connection attempt: the first, which then doubles, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// After this time without a message the task connects again, because the replay shows whether it is still the same engine.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Time for each message of a replay to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most messages of one replay. vLLM keeps ten thousand.
const REPLAYED_MAX: usize = 1 << 20;
/// Bytes of a message beside its batch: topic, number and framing.
const AROUND_A_BATCH: usize = 64 << 10;

/// Lists the nodes that exist.
pub type ListNodes = dyn Fn() -> Vec<(NodeId, Arc<str>)> + Send;

/// The reading thread.
#[derive(Debug)]
pub struct EventReaders(RuntimeThread);

/// Why the connection to an engine's events has ended.
#[derive(Debug, Error)]
enum ReadError {
    #[error("the name {0} cannot be resolved")]
    Unresolved(Endpoint),
    #[error("{0}: {1}")]
    Connection(Endpoint, ConnectionError),
    #[error("{0} sends something else than KV events: {1}")]
    Frames(Endpoint, FramesError),
    #[error("{at} answers no replay within {} s", PATIENCE.as_secs())]
    Late { at: Endpoint },
    #[error("{0} replays without an end")]
    Endless(Endpoint),
    #[error("nothing was published for {} s", SILENCE_MAX.as_secs())]
    Silent,
}

impl EventReaders {
    /// Reads the events of these nodes, and of those that join later, until it is stopped.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(knowledge: &Arc<Knowledge>, nodes: Box<ListNodes>) -> io::Result<Self> {
        let knowledge = Arc::clone(knowledge);
        let read = move || async move { follow(&knowledge, nodes).await };
        Ok(Self(RuntimeThread::start("kvlane-events", read)?))
    }

    /// Stops all tasks and the thread.
    pub fn stop(self) {
        self.0.stop();
    }
}

/// Keeps one running reader for each node that publishes events.
async fn follow(knowledge: &Arc<Knowledge>, nodes: Box<ListNodes>) {
    let mut readers: HashMap<NodeId, Task<()>> = HashMap::new();
    let mut period = tokio::time::interval(SCAN_PERIOD);
    loop {
        period.tick().await;
        let there: HashMap<NodeId, Arc<str>> = nodes().into_iter().collect();
        readers.retain(|id, reader| {
            let stays = there.contains_key(id);
            if !stays {
                reader.abort();
            }
            stays
        });
        for (id, name) in there {
            if let Some(source) = knowledge.source_of(&name)
                && !readers.contains_key(&id)
            {
                let reader = Reader {
                    knowledge: Arc::clone(knowledge),
                    id,
                    source: source.clone(),
                    progress: Progress::default(),
                };
                readers.insert(id, tokio::spawn(reader.run()));
            }
        }
    }
}

struct Reader {
    knowledge: Arc<Knowledge>,
    id: NodeId,
    source: EventSource,
    progress: Progress,
}

impl Reader {
    async fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let mut was_live = false;
            let Err(error) = self.read(&mut was_live).await;
            if was_live {
                pause = PAUSE_MIN;
            }
            if matches!(error, ReadError::Silent) {
                continue;
            }
            tracing::debug!(node = self.source.node, %error, "cannot read a node's events; connecting again");
            self.knowledge.set_live(self.id, false);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Connects, catches up, and applies live messages until an error.
    async fn read(&mut self, was_live: &mut bool) -> Result<std::convert::Infallible, ReadError> {
        let at = self.source.events.clone();
        let failed = |error| ReadError::Connection(at.clone(), error);
        let mut subscriber =
            Subscriber::connect(resolve(&at).await?, b"", options()).await.map_err(failed)?;
        self.progress.connected();
        if self.source.replay.is_some() {
            self.catch_up().await?;
        } else if self.progress.has_begun() {
            // Messages were lost meanwhile, and it may be another engine.
            self.progress.forgotten();
            self.knowledge.lost(self.id);
        }
        self.knowledge.set_live(self.id, true);
        *was_live = true;
        loop {
            let frames = match self.source.replay {
                Some(_) => match timeout(SILENCE_MAX, subscriber.recv()).await {
                    Ok(frames) => frames,
                    Err(_) => return Err(ReadError::Silent),
                },
                None => subscriber.recv().await,
            };
            self.message(&frames.map_err(failed)?).await?;
        }
    }

    async fn message(&mut self, frames: &[Bytes]) -> Result<(), ReadError> {
        let wrong = |error| ReadError::Frames(self.source.events.clone(), error);
        let Published { sequence, payload, .. } = Published::of_frames(frames).map_err(wrong)?;
        match self.progress.live(sequence) {
            Next::Skip => return Ok(()),
            Next::Apply => {}
            next => {
                if next == Next::ForgetAndApply {
                    self.knowledge.restarted(self.id);
                    self.progress.forgotten();
                }
                if self.source.replay.is_some() {
                    self.catch_up().await?;
                    if self.progress.has_begun() && self.progress.replay_from() >= sequence {
                        return Ok(());
                    }
                } else if next != Next::ForgetAndApply {
                    self.knowledge.lost(self.id);
                }
            }
        }
        self.apply(sequence, payload);
        Ok(())
    }

    /// Replays the messages that were missed. If the engine has restarted, all blocks are dropped first.
    async fn catch_up(&mut self) -> Result<(), ReadError> {
        let Some(at) = self.source.replay.clone() else { return Ok(()) };
        if !self.replay(&at).await? {
            self.knowledge.restarted(self.id);
            self.progress.forgotten();
            self.replay(&at).await?;
        }
        Ok(())
    }

    /// One replay from the last applied message. False if the engine does not have that message.
    async fn replay(&mut self, at: &Endpoint) -> Result<bool, ReadError> {
        let failed = |error| ReadError::Connection(at.clone(), error);
        let mut dealer =
            Dealer::connect(resolve(at).await?, Bytes::new(), options()).await.map_err(failed)?;
        let had_begun = self.progress.has_begun();
        dealer.send(&replay_request(self.progress.replay_from())).await.map_err(failed)?;
        let mut is_first = true;
        for _ in 0..REPLAYED_MAX {
            let received =
                timeout(PATIENCE, dealer.recv()).await.map_err(|_| ReadError::Late { at: at.clone() })?;
            let frames = received.map_err(failed)?;
            let replayed =
                Replayed::of_frames(&frames).map_err(|error| ReadError::Frames(at.clone(), error))?;
            let Replayed::Batch { sequence, payload } = replayed else { return Ok(!(had_begun && is_first)) };
            match self.progress.replayed(sequence, payload, is_first) {
                Next::Skip => {}
                Next::ForgetAndApply if had_begun => return Ok(false),
                Next::ForgetAndApply => {
                    self.knowledge.lost(self.id);
                    self.apply(sequence, payload);
                }
                Next::Apply | Next::Replay(_) => self.apply(sequence, payload),
            }
            is_first = false;
        }
        Err(ReadError::Endless(at.clone()))
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) {
        match decode_batch(payload, &EventLimits::default()) {
            Ok(batch) => self.knowledge.apply(self.id, &batch),
            Err(error) => {
                // Log: an event of this engine has a form that the router does not know; its blocks become known
                // again with later events. Do: use a vLLM that this router supports.
                tracing::warn!(node = self.source.node, sequence, %error, "cannot decode a node's events; its known blocks are dropped");
                self.knowledge.lost(self.id);
            }
        }
        self.progress.applied(sequence, payload);
    }
}

async fn resolve(at: &Endpoint) -> Result<std::net::SocketAddr, ReadError> {
    let found = lookup_host((at.host.as_str(), at.port)).await.ok().and_then(|mut found| found.next());
    found.ok_or_else(|| ReadError::Unresolved(at.clone()))
}

fn options() -> PeerOptions {
    let bytes = EventLimits::default().batch_bytes + AROUND_A_BATCH;
    let limits = Limits { frame_bytes: bytes, message_bytes: bytes, ..Limits::default() };
    PeerOptions { limits, ..PeerOptions::default() }
}
