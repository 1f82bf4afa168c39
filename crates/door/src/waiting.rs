//! HTTP connections whose request has not come completely. Where all places are taken the oldest of these gives up its own:
//! whoever has something to ask does so at once.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::slots::Slot;

/// Those that wait, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    waiting: BTreeMap<u64, (Arc<Place>, AbortHandle)>,
}

/// Where a connection is counted, until this is dropped or the place is taken away.
#[derive(Debug)]
pub(crate) struct Place(Mutex<Option<Slot>>);

impl Place {
    pub(crate) fn new(slot: Slot) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(slot))))
    }
}

impl Waiting {
    /// The number of a connection that is about to begin.
    pub(crate) fn number(&self) -> u64 {
        let mut inner = self.0.lock();
        inner.next += 1;
        inner.next
    }

    /// A connection that has begun waits for its request from now on.
    pub(crate) fn add(&self, number: u64, place: Arc<Place>, task: AbortHandle) {
        self.0.lock().waiting.insert(number, (place, task));
    }

    /// Its request has come, or it has ended.
    pub(crate) fn remove(&self, number: u64) {
        self.0.lock().waiting.remove(&number);
    }

    /// Closes the oldest, and answers the place that it had. None where none waits.
    pub(crate) fn close_oldest(&self) -> Option<Slot> {
        let (_, (place, task)) = self.0.lock().waiting.pop_first()?;
        task.abort();
        place.0.lock().take()
    }
}
