//! Whether the daemon serves, and which run of it.

use axum::http::StatusCode;

use crate::shared::Shared;

/// Whether the daemon serves, in a word.
pub(crate) fn state(shared: &Shared) -> (StatusCode, &'static str) {
    if shared.is_stopping() {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping")
    } else if !shared.unreachable.is_empty() {
        (StatusCode::SERVICE_UNAVAILABLE, "engines cannot connect")
    } else {
        (StatusCode::OK, "ok")
    }
}

/// Bytes as digits, such as those of a run.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
