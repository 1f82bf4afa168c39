//! Bounds the clients' connections, and chooses which one to close when a further client connects.
//!
//! ```text
//!   a slot is free                                   --> the new connection gets it
//!   else a connection has not sent its first head    --> it gets the oldest one's slot, once that has had HEAD_GRACE
//!   else one is idle, or in the middle of a head     --> each thread closes the one that has been idle longest
//!   all are being served                             --> the new connection waits
//! ```
//! A client shows its key in its first head, and the router disconnects strangers after theirs. So strangers are all in the
//! second row, and clients that have shown a key are closed last.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvlane_door::HeadlessConnections;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::timeout,
};

/// Time for a new client to send its head. Without it, a crowd of clients would close each other's connections.
const HEAD_GRACE: Duration = Duration::from_millis(100);
/// Period at which a connection that waits for a slot tries to have another one closed.
const CROWDED_RETRY: Duration = Duration::from_millis(100);

/// Strangers' requests that are answered at a time. Each is answered at once, and then its connection is closed.
const STRANGERS_AT_ONCE: usize = 64;

/// Slots for clients' connections, over all threads and listeners.
#[derive(Debug)]
pub(crate) struct ConnectionSlots {
    slots: Arc<Semaphore>,
    /// Connections whose first head has not come, by age.
    pub(crate) headless: HeadlessConnections<OwnedSemaphorePermit>,
    /// Permits to answer strangers' requests. Thousands at once would take memory that the allocator keeps.
    pub(crate) strangers: Semaphore,
    /// Notified while a connection waits for a slot and all holders have sent a head.
    crowded: Notify,
    /// Connections that were closed because another one needed their slot.
    displaced: AtomicU64,
}

impl ConnectionSlots {
    pub(crate) fn new(most: usize) -> Self {
        let slots = Arc::new(Semaphore::new(most));
        Self {
            slots,
            headless: HeadlessConnections::default(),
            strangers: Semaphore::new(STRANGERS_AT_ONCE),
            crowded: Notify::new(),
            displaced: AtomicU64::new(0),
        }
    }

    /// Waits for a slot for a new connection, and closes others for it by the rules above.
    pub(crate) async fn take(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
                return Some(slot);
            }
            // The newest connections may have sent their heads already.
            yield_now().await;
            let grace = self.headless.oldest().map(|since| HEAD_GRACE.saturating_sub(since.elapsed()));
            if let Some(grace) = grace.filter(|grace| !grace.is_zero()) {
                if let Ok(slot) = timeout(grace, Arc::clone(&self.slots).acquire_owned()).await {
                    return slot.ok();
                }
                continue;
            }
            if let Some(slot) = self.headless.close_oldest() {
                self.count();
                return Some(slot);
            }
            self.crowded.notify_waiters();
            if let Ok(slot) = timeout(CROWDED_RETRY, Arc::clone(&self.slots).acquire_owned()).await {
                return slot.ok();
            }
        }
    }

    /// Closes one of a thread's idle connections whenever slots are needed, by `close`, which returns whether there was one.
    /// Runs for ever.
    pub(crate) async fn close_idle(&self, close: impl Fn() -> bool) {
        loop {
            self.crowded.notified().await;
            if close() {
                self.count();
            }
        }
    }

    /// Connections that were closed because another one needed their slot.
    pub(crate) fn displaced(&self) -> u64 {
        self.displaced.load(Ordering::Relaxed)
    }

    fn count(&self) {
        if self.displaced.fetch_add(1, Ordering::Relaxed) == 0 {
            // Log: more connections than `--max-connections`; clients that send requests are served. Do: raise it
            // and the limit of open files, or keep strangers away.
            tracing::warn!(
                once = true,
                "connection limit reached: each new connection closes the oldest one without a request; further cases are only counted"
            );
        }
    }
}
