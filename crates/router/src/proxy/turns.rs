//! Logs one line when a node stops getting requests, and one when it gets them again.

use std::{sync::Arc, time::Instant};

use crate::{
    counters::Counters,
    schedule::{NodeId, Pairing, Turn},
    shared::Shared,
};

impl Shared {
    /// Logs a turn of a node's breaker, if there is one.
    pub(super) fn log_turn(&self, node: NodeId, turn: Option<Turn>) {
        let Some(turn) = turn else { return };
        let found = self.with_scheduler(|scheduler| {
            let failure = scheduler.last_failure(node);
            scheduler.node(node).map(|node| (Arc::clone(&node.name), failure))
        });
        let Some((node, failure)) = found else { return };
        match turn {
            Turn::Ejected { pause, failures } => tracing::warn!(
                %node,
                "node ejected for {} s: {failures} failures in a row; last: {}",
                pause.as_secs_f64(),
                failure.as_deref().unwrap_or("unknown")
            ),
            Turn::Returned { after } => {
                tracing::info!(%node, "node returned: it served a request after {:.1} s", after.as_secs_f64());
            }
        }
    }

    /// Counts an answer of a prefill node. Logs when the router stops or resumes sending requests to pairs with this node.
    pub(super) fn prefill_answered(&self, node: NodeId, handed_over: bool) {
        let (pairing, name) = self.with_scheduler(|scheduler| {
            let pairing = scheduler.prefill_answered(node, handed_over, Instant::now());
            let is_logged = !handed_over || pairing != Pairing::Same;
            (pairing, scheduler.node(node).filter(|_| is_logged).map(|node| Arc::clone(&node.name)))
        });
        let is_first = !handed_over && Counters::count(&self.counters.not_handed_over);
        let Some(node) = name else { return };
        match pairing {
            Pairing::Stopped { missed, probe_in } => tracing::warn!(
                "prefill node {node} handed nothing over {missed} times in a row (its connector may be off, or its daemon \
                 is away); sending whole requests to decode nodes, next probe in {} s",
                probe_in.as_secs()
            ),
            Pairing::Resumed => {
                tracing::info!("prefill node {node} hands over again; sending requests to pairs");
            }
            Pairing::Same if is_first => tracing::warn!(
                once = true,
                "prefill node {node} handed nothing over (its connector may be off, or its daemon is away); the decode node \
                 computes the prompt again"
            ),
            Pairing::Same => {}
        }
    }
}
