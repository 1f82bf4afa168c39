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

    /// Records whether an address can be reached (None), and logs a change.
    pub(crate) fn set(&self, address: &str, reason: Option<String>) {
        let mut all = self.0.lock();
        let before = all.get(address);
        match reason {
            None if before.is_some() => {
                // Log: the daemon's socket is there again.
                tracing::info!(address, "engines can connect again");
                all.remove(address);
            }
            Some(reason) if before != Some(&reason) => {
                // Log: the daemon's socket is gone and cannot be made; connected engines go on, `/health` answers
                // 503. Do: mend the folder that the reason names; the daemon tries again.
                tracing::error!(address, "engines cannot connect: {reason}");
                all.insert(address.to_owned(), reason);
            }
            _ => {}
        }
    }
}
