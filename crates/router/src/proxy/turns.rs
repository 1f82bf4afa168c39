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
            // Log: the node failed requests in a row; the router leaves it alone for so long, then tries one
            // request. Do: look at the engine's log.
            Turn::Ejected { pause, failures } => tracing::warn!(
                %node,
                "node ejected for {} s: {failures} failures in a row; last: {}",
                pause.as_secs_f64(),
                failure.as_deref().unwrap_or("unknown")
            ),
            Turn::Returned { after } => {
                // Log: an ejected node works again, and gets requests as before.
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
            // Log: decode engines compute whole prompts until the prefill engine hands over again; the router
            // tries. Do: look at the prefill engine's log and its daemon.
            Pairing::Stopped { missed, probe_in } => tracing::warn!(
                "prefill node {node} handed nothing over {missed} times in a row (its connector may be off, or its daemon \
                 is away); sending whole requests to decode nodes, next probe in {} s",
                probe_in.as_secs()
            ),
            Pairing::Resumed => {
                // Log: the prefill engine works again; prompts are split as before.
                tracing::info!("prefill node {node} hands over again; sending requests to pairs");
            }
            // Log: one prompt was computed twice; the answer is right, and later. Do: look at the prefill
            // engine's log and its daemon if it repeats.
            Pairing::Same if is_first => tracing::warn!(
                once = true,
                "prefill node {node} handed nothing over (its connector may be off, or its daemon is away); the decode node \
                 computes the prompt again"
            ),
            Pairing::Same => {}
        }
    }
}
