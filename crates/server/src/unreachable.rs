//! Which of the daemon's sockets engines cannot reach, and why.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Sockets that engines cannot reach, each with the reason; empty while all is well.
#[derive(Debug, Default)]
pub(crate) struct Unreachable(Mutex<BTreeMap<String, String>>);

impl Unreachable {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Says so when that changes; None: it can be reached.
    pub(crate) fn set(&self, place: &str, reason: Option<String>) {
        let mut all = self.0.lock();
        let before = all.get(place);
        match reason {
            None if before.is_some() => {
                tracing::info!(place, "engines can connect again");
                all.remove(place);
            }
            Some(reason) if before != Some(&reason) => {
                tracing::error!(place, "engines cannot connect: {reason}");
                all.insert(place.to_owned(), reason);
            }
            _ => {}
        }
    }
}
