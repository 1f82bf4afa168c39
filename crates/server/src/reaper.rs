//! The reaper: a thread that notices when processes exit, and frees their claims and leases. Also those of processes that
//! ended without a Bye.

use std::{io, sync::Arc, thread::JoinHandle, time::Instant};

use kvlane_store::WriterId;

use crate::{engines::SessionId, shared::Shared};

/// Frees the claims of a session whose process can no longer touch the pool, and the leases of its engine if it was the last.
pub(crate) fn settle_session(shared: &Shared, id: SessionId, engine_id: &str) {
    shared.store.writer_gone(WriterId(id), Instant::now());
    if let Some(owner) = shared.engines.leave(engine_id, id) {
        shared.store.release_owner(owner);
    }
}

/// Starts the thread that notices the exit of processes.
pub(crate) fn start(shared: Arc<Shared>) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("kvlane-reaper".into()).spawn(move || {
        while !shared.is_stopping() {
            for id in shared.sessions.wait_for_exits() {
                if let Some(info) = shared.sessions.process_exited(id) {
                    // Log: a process ended without closing its session; nothing of it stays in the pool's way.
                    // Do: look at the engine's log if it should be running.
                    tracing::info!(
                        session = id,
                        engine = info.engine_id,
                        pid = info.pid,
                        "process exited; its claims and leases are freed"
                    );
                    settle_session(&shared, id, &info.engine_id);
                }
            }
            shared.store.expire(Instant::now());
        }
    })
}
