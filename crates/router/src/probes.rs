//! Asks each node every few seconds which models it serves, and so whether it is there.
//!
//! ```text
//!              answers                  MISSES in a row
//!   suspect -----------> ready -----------------------------> suspect
//!                          ^      what it had of prompts is       |
//!                          |      forgotten: it may be another    |
//!                          '--- answers: engine now --------------'
//! ```
//! A single miss already means that the prefixes are forgotten at the next answer: engines restart within two periods.

use std::{
    io,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use thiserror::Error;
use tokio::{net::TcpStream, sync::watch, time::timeout};

use crate::{
    proxy::{Address, Shared},
    schedule::{NodeId, NodeState},
};

/// Between two questions to a node. An adapter that was loaded appears within it.
const PERIOD: Duration = Duration::from_secs(2);
/// An answer has to come within this time.
const PATIENCE: Duration = Duration::from_secs(2);
/// Questions without an answer, in a row, that make a node suspect.
const MISSES: u32 = 3;
/// Longest list of models.
const BYTES_MAX: usize = 4 << 20;

/// The asking thread.
#[derive(Debug)]
pub struct Probes {
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

/// Why a node counts as missing.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// No connection, or it ended.
    #[error("no connection: {0}")]
    Connection(io::Error),
    /// It speaks no HTTP.
    #[error("no answer: {0}")]
    Http(#[from] hyper::Error),
    /// Too slow.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    /// It says that it is not well, or knows nothing of models.
    #[error("it answered {0} to GET /v1/models")]
    Status(StatusCode),
    /// Not a list of models.
    #[error("its answer to GET /v1/models is no list of models")]
    NoModels,
}

/// What is known of a node's health. Pure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Health {
    misses: u32,
}

/// What follows from an answer or a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// It is there, and was.
    Well,
    /// It is there again: what it had is unknown.
    Back,
    /// It missed one; that may happen.
    Missed,
    /// It has missed too many.
    Gone,
}

impl Health {
    /// It answered.
    pub fn answered(&mut self) -> Finding {
        let misses = std::mem::take(&mut self.misses);
        if misses == 0 { Finding::Well } else { Finding::Back }
    }

    /// It did not.
    pub fn missed(&mut self) -> Finding {
        self.misses = self.misses.saturating_add(1);
        if self.misses < MISSES { Finding::Missed } else { Finding::Gone }
    }
}

impl Probes {
    /// Asks these nodes until it is stopped.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(shared: &Arc<Shared>, nodes: Vec<(NodeId, Address)>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("kvlane-probes".into()).spawn(move || {
            runtime.block_on(async {
                for (id, address) in nodes {
                    tokio::spawn(ask_for_ever(Arc::clone(&shared), id, address));
                }
                let mut stopped = stopped;
                let _ = stopped.changed().await;
            });
        })?;
        Ok(Self { stop, thread })
    }

    /// Asks no more.
    pub fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.thread.join();
    }
}

async fn ask_for_ever(shared: Arc<Shared>, id: NodeId, address: Address) {
    let mut health = Health::default();
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        let started = Instant::now();
        let asked = timeout(PATIENCE, models_of(&address)).await.unwrap_or(Err(ProbeError::Late));
        if shared.with_scheduler(|scheduler| scheduler.node(id).is_none()) {
            return;
        }
        match asked {
            Ok(models) => {
                let finding = health.answered();
                shared.set_models(id, models);
                note(&shared, id, finding);
                tracing::trace!(node = %address, seconds = started.elapsed().as_secs_f64(), "a node answered");
            }
            Err(error) => {
                let finding = health.missed();
                if note(&shared, id, finding) {
                    tracing::warn!(node = %address, %error, "a node does not answer: it gets no requests until it does");
                }
            }
        }
    }
}

/// Carries out what was found; whether the node's state has changed.
fn note(shared: &Shared, id: NodeId, finding: Finding) -> bool {
    shared.with_scheduler(|scheduler| {
        if finding == Finding::Back {
            scheduler.forget_prefixes(id);
        }
        let Some(node) = scheduler.node_mut(id) else { return false };
        let state = match (finding, node.state) {
            (_, NodeState::Draining) | (Finding::Missed, _) => return false,
            (Finding::Well | Finding::Back, _) => NodeState::Ready,
            (Finding::Gone, _) => NodeState::Suspect,
        };
        let has_changed = node.state != state;
        if has_changed && state == NodeState::Ready {
            tracing::info!(node = %node.name, role = %node.role, models = node.models.join(", "), "a node is ready");
        }
        node.state = state;
        has_changed
    })
}

/// Names of the models that a node serves, each with the JSON object that describes it.
async fn models_of(address: &Address) -> Result<Vec<(Arc<str>, String)>, ProbeError> {
    let body = get(address, "/v1/models").await?;
    let parsed: Value = serde_json::from_slice(&body).map_err(|_| ProbeError::NoModels)?;
    let listed = parsed.get("data").and_then(Value::as_array).ok_or(ProbeError::NoModels)?;
    let named = |model: &Value| Some((Arc::from(model.get("id")?.as_str()?), model.to_string()));
    listed.iter().map(named).collect::<Option<_>>().ok_or(ProbeError::NoModels)
}

async fn get(address: &Address, path: &str) -> Result<Bytes, ProbeError> {
    let stream =
        TcpStream::connect((address.host.as_str(), address.port)).await.map_err(ProbeError::Connection)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = format!("{}{path}", address.path).parse().unwrap_or_default();
    if let Ok(host) = address.authority.parse() {
        request.headers_mut().insert(HOST, host);
    }
    let response = sender.send_request(request).await?;
    let status = response.status();
    let collected = Limited::new(response.into_body(), BYTES_MAX).collect().await;
    drop(sender);
    connection.abort();
    if !status.is_success() {
        return Err(ProbeError::Status(status));
    }
    Ok(collected.map_err(|_| ProbeError::NoModels)?.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lost_answer_is_no_reason_to_leave_a_node() {
        let mut health = Health::default();
        assert_eq!(health.answered(), Finding::Well);
        assert_eq!((health.missed(), health.answered()), (Finding::Missed, Finding::Back));
        let found: Vec<_> = (0..4).map(|_| health.missed()).collect();
        assert_eq!(found, [Finding::Missed, Finding::Missed, Finding::Gone, Finding::Gone]);
        assert_eq!((health.answered(), health.answered()), (Finding::Back, Finding::Well));
    }
}
