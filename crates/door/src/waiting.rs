//! HTTP connections whose request has not come completely. If all slots are taken, the oldest of them gives up its own,
//! because a client with a request sends it at once.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::slots::Slot;

/// HeadlessConnections connections, oldest first. `S` is the slot by which a connection is counted.
#[derive(Debug)]
pub struct HeadlessConnections<S = Slot>(Mutex<Inner<S>>);

#[derive(Debug)]
struct Inner<S> {
    next: u64,
    waiting: BTreeMap<u64, Entry<S>>,
}

#[derive(Debug)]
struct Entry<S> {
    since: Instant,
    slot: Arc<HeldSlot<S>>,
    task: AbortHandle,
}

/// Holds the slot of a connection until it is dropped, or [`close_oldest`](HeadlessConnections::close_oldest) takes the slot away.
#[derive(Debug)]
pub struct HeldSlot<S = Slot>(Mutex<Option<S>>);

impl<S> HeldSlot<S> {
    /// Shared by the connection's task and its entry in [`HeadlessConnections`].
    pub fn new(slot: S) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(slot))))
    }
}

impl<S> Default for HeadlessConnections<S> {
    fn default() -> Self {
        Self(Mutex::new(Inner { next: 0, waiting: BTreeMap::new() }))
    }
}

impl<S> HeadlessConnections<S> {
    /// Numbers a connection that is about to begin.
    pub fn number(&self) -> u64 {
        let mut inner = self.0.lock();
        inner.next += 1;
        inner.next
    }

    /// Adds a connection whose task has begun. Its wait for the request counts from now on.
    pub fn add(&self, number: u64, slot: Arc<HeldSlot<S>>, task: AbortHandle) {
        self.0.lock().waiting.insert(number, Entry { since: Instant::now(), slot, task });
    }

    /// Removes a connection whose request has come, or that has ended.
    pub fn remove(&self, number: u64) {
        self.0.lock().waiting.remove(&number);
    }

    /// Time at which the oldest connection began to wait; None if none waits.
    pub fn oldest(&self) -> Option<Instant> {
        self.0.lock().waiting.values().next().map(|entry| entry.since)
    }

    /// Closes the oldest connection, and returns its slot. None if no connection waits.
    pub fn close_oldest(&self) -> Option<S> {
        let (_, Entry { slot, task, .. }) = self.0.lock().waiting.pop_first()?;
        task.abort();
        slot.0.lock().take()
    }
}
