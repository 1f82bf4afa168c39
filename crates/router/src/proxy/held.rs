//! Bounds the memory that all requests take together.

use std::{
    cell::Cell,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hyper::StatusCode;

use super::answer::Problem;
use crate::shared::Shared;

/// Memory that one request takes, until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<Shared>,
    bytes: Cell<usize>,
}

impl Held {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), bytes: Cell::new(0) }
    }

    /// Adds bytes to this request's share.
    ///
    /// # Errors
    /// All requests together would exceed the bound: refuse this one.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Problem> {
        self.bytes.set(self.bytes.get() + bytes);
        let before = self.shared.counters.body_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let most = self.shared.settings.bodies_bytes_max;
        if before + bytes as u64 <= most as u64 {
            return Ok(());
        }
        Err(Self::full(most))
    }

    fn full(most: usize) -> Problem {
        let sentence = format!("this router holds {most} bytes of requests already; ask again");
        Problem {
            closes: true,
            retry_after: Some(Duration::from_secs(1)),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.counters.body_bytes.fetch_sub(self.bytes.get() as u64, Ordering::Relaxed);
    }
}
