//! Bounds the clients that are connected at a time, and chooses the connection to close when a further one comes.
//!
//! ```text
//!   a slot is free                                    --> it gets that
//!   none is, but a connection has sent no whole head  --> the oldest of these gives up its own, once it has had HEAD_GRACE
//!   none is, but one is idle or amid a head           --> each thread closes the one that asks nothing for longest
//!   all are being served                              --> it waits
//! ```
//! Strangers show no key before their first head is there, and are disconnected after it. So they are all in the second row, and
//! clients that have shown a key are closed last.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvlane_door::Waiting;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::timeout,
};

/// Time for a new client to send its head. Without it a crowd of clients would close each other's connections.
const HEAD_GRACE: Duration = Duration::from_millis(100);
/// Period at which a connection that waits for a slot tries to have another one closed.
const CROWDED_RETRY: Duration = Duration::from_millis(100);

/// Strangers' requests that are answered at a time. Each is answered at once, and then its connection is closed.
const STRANGERS_AT_ONCE: usize = 64;

/// Slots for clients' connections, over all threads and listeners.
#[derive(Debug)]
pub(crate) struct Places {
    slots: Arc<Semaphore>,
    /// Connections whose first head has not come, by age.
    pub(crate) headless: Waiting<OwnedSemaphorePermit>,
    /// Permits for strangers' requests. Thousands at once would take memory that the allocator keeps.
    pub(crate) strangers: Semaphore,
    /// A connection waits for a slot, and all connections that hold one have sent a head.
    crowded: Notify,
    /// Connections that were closed because another one needed their slot.
    displaced: AtomicU64,
}

impl Places {
    pub(crate) fn new(most: usize) -> Self {
        let slots = Arc::new(Semaphore::new(most));
        Self {
            slots,
            headless: Waiting::default(),
            strangers: Semaphore::new(STRANGERS_AT_ONCE),
            crowded: Notify::new(),
            displaced: AtomicU64::new(0),
        }
    }

    /// Takes a slot for a new connection.
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

    /// Has a thread close one of its idle connections when slots are needed; `close` tells whether it had one. Runs forever.
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
            tracing::warn!(
                "all connections are taken: closing the oldest without a request for each new one. Further cases are only counted"
            );
        }
    }
}
