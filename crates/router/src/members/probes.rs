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
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::Value;
use thiserror::Error;

use super::{event::Event, inner::Inner};
use crate::{
    address::Address,
    node_page::{self, PageError},
    schedule::NodeId,
};

/// Between two questions to a node. An adapter that was loaded appears within it.
const PERIOD: Duration = Duration::from_secs(2);
/// Questions without an answer, in a row, that make a node suspect.
const MISSES: u32 = 3;
/// Longest list of models.
const BYTES_MAX: usize = 256 << 10;
/// Most models and adapters of a node, and the longest name of one.
const MODELS_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 256;

/// Why a node counts as missing.
#[derive(Debug, Error)]
pub(super) enum ProbeError {
    /// Too slow, not well, or without such a page.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Not a list of models.
    #[error("its answer to GET /v1/models is no list of models")]
    NoModels,
}

/// By name, each with the JSON object that describes it.
type Models = Vec<(Arc<str>, String)>;

/// What is known of a node's health. Pure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Health {
    misses: u32,
}

/// What follows from an answer or a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finding {
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
    pub(super) fn answered(&mut self) -> Finding {
        let misses = std::mem::take(&mut self.misses);
        if misses == 0 { Finding::Well } else { Finding::Back }
    }

    /// It did not.
    pub(super) fn missed(&mut self) -> Finding {
        self.misses = self.misses.saturating_add(1);
        if self.misses < MISSES { Finding::Missed } else { Finding::Gone }
    }
}

/// Asks a node until it has gone.
pub(super) async fn ask(members: Arc<Inner>, id: NodeId, address: Address) {
    let shared = &members.shared;
    let (mut health, mut is_told) = (Health::default(), false);
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        let started = Instant::now();
        let asked = models_of(&address).await;
        if shared.with_scheduler(|scheduler| scheduler.node(id).is_none()) {
            return;
        }
        let told = match asked {
            Ok((models, at)) => {
                is_told = false;
                if health.answered() == Finding::Back {
                    shared.with_scheduler(|scheduler| scheduler.forget_prefixes(id));
                }
                shared.set_models(id, models);
                tracing::trace!(node = %address, seconds = started.elapsed().as_secs_f64(), "a node answered");
                members.tell(Event::Answered { address: address.clone(), at })
            }
            Err(error) => match health.missed() {
                Finding::Gone => {
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!(node = %address, %error, "a node does not answer: it gets no requests until it does");
                    }
                    members.tell(Event::Silent(address.clone()))
                }
                finding => {
                    tracing::debug!(node = %address, %error, ?finding, "no answer");
                    Ok(())
                }
            },
        };
        if let Err(refusal) = told {
            tracing::debug!(node = %address, %refusal, "a probe counts for nothing");
        }
    }
}

/// Names of the models that a node serves, each with the JSON object that describes it.
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
