//! Probes each node every 2 s with `GET /v1/models`: whether it answers, and which models it serves.
//!
//! ```text
//!              answers                  MISSES in a row
//!   suspect -----------> ready -----------------------------> suspect
//!                          ^      its prefixes are dropped:      |
//!                          |      its engine may be another one  |
//!                          '--- answers -------------------------'
//! ```
//! After a single miss the next answer already drops the node's prefixes, because an engine can restart within two periods.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::Value;
use thiserror::Error;

use super::{event::Event, registry::Registry};
use crate::{
    address::Address,
    node_page::{self, PageError},
    schedule::NodeId,
};

/// Between two probes of a node. A newly loaded adapter appears within this time.
const PERIOD: Duration = Duration::from_secs(2);
/// Probes in a row without an answer that make a node suspect.
const MISSES: u32 = 3;
/// Longest answer, in bytes.
const BYTES_MAX: usize = 256 << 10;
/// Most models and adapters of a node, and the longest name of one. A longer answer counts as a miss.
const MODELS_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 256;

/// Why a probe failed.
#[derive(Debug, Error)]
pub(super) enum ProbeError {
    /// No connection, an error, too slow or too long.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Not a list of models, or longer than the bounds.
    #[error("its answer to GET /v1/models is no list of models")]
    NoModels,
}

/// Names, each with the JSON object that describes the model.
type Models = Vec<(Arc<str>, String)>;

/// Counts a node's misses. Pure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Health {
    /// Misses in a row.
    misses: u32,
}

/// The meaning of an answer or a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finding {
    /// It answered, as before.
    Well,
    /// It answered after a miss, so its prefixes are unknown.
    Back,
    /// It missed fewer than [`MISSES`], which may happen.
    Missed,
    /// It missed [`MISSES`] or more.
    Gone,
}

impl Health {
    pub(super) fn answered(&mut self) -> Finding {
        let misses = std::mem::take(&mut self.misses);
        if misses == 0 { Finding::Well } else { Finding::Back }
    }

    pub(super) fn missed(&mut self) -> Finding {
        self.misses = self.misses.saturating_add(1);
        if self.misses < MISSES { Finding::Missed } else { Finding::Gone }
    }
}

/// Probes a node until it has left, and reports each answer and each loss to the registry.
pub(super) async fn probe(registry: Arc<Registry>, id: NodeId, address: Address) {
    let shared = &registry.shared;
    let (mut health, mut is_logged) = (Health::default(), false);
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        let started = Instant::now();
        let answer = models_of(&address).await;
        if shared.with_scheduler(|scheduler| scheduler.node(id).is_none()) {
            return;
        }
        let applied = match answer {
            Ok((models, at)) => {
                is_logged = false;
                if health.answered() == Finding::Back {
                    shared.with_scheduler(|scheduler| scheduler.forget_prefixes(id));
                }
                shared.set_models(id, models);
                tracing::trace!(node = %address, seconds = started.elapsed().as_secs_f64(), "node answered its probe");
                registry.apply(Event::Answered { address: address.clone(), at })
            }
            Err(error) => match health.missed() {
                Finding::Gone => {
                    if !std::mem::replace(&mut is_logged, true) {
                        // Log: three probes in a row failed; the node becomes suspect, and is probed further. Do:
                        // look at the engine's log; the error says how the probe failed.
                        tracing::warn!(node = %address, %error, misses = MISSES, "node does not answer its probes");
                    }
                    registry.apply(Event::Silent(address.clone()))
                }
                finding => {
                    tracing::debug!(node = %address, %error, ?finding, "node missed a probe");
                    Ok(())
                }
            },
        };
        if let Err(refusal) = applied {
            tracing::debug!(node = %address, "probe ignored: {refusal}");
        }
    }
}

/// The models that a node serves, and the address of the connection.
async fn models_of(address: &Address) -> Result<(Models, Option<SocketAddr>), ProbeError> {
    let page = node_page::get(address, "/v1/models", BYTES_MAX).await?;
    let parsed: Value = serde_json::from_slice(&page.body).map_err(|_| ProbeError::NoModels)?;
    let listed = parsed.get("data").and_then(Value::as_array).ok_or(ProbeError::NoModels)?;
    if listed.len() > MODELS_MAX {
        return Err(ProbeError::NoModels);
    }
    let is_name = |name: &&str| name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control);
    let named =
        |model: &Value| Some((Arc::from(model.get("id")?.as_str().filter(is_name)?), model.to_string()));
    let models = listed.iter().map(named).collect::<Option<_>>().ok_or(ProbeError::NoModels)?;
    Ok((models, page.at))
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
