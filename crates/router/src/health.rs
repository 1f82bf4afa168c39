//! Whether the router serves.

use axum::http::StatusCode;

use crate::{schedule::NodeState, shared::Shared};

/// How many nodes get requests.
pub(crate) fn ready_nodes(shared: &Shared) -> usize {
    shared.with_scheduler(|scheduler| {
        scheduler.nodes().filter(|(_, node)| node.state == NodeState::Ready).count()
    })
}

/// Whether the router serves, in a few words.
pub(crate) fn state(shared: &Shared) -> (StatusCode, &'static str) {
    if shared.is_stopping() {
        (StatusCode::SERVICE_UNAVAILABLE, "the router stops")
    } else if ready_nodes(shared) > 0 {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no node is ready")
    }
}
