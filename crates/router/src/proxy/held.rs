//! Bounds the memory that all requests take together.

use std::{
    cell::Cell,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use hyper::StatusCode;

use super::answer::Problem;
use crate::shared::Shared;

/// Memory that a request or an answer takes, until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    shared: Arc<Shared>,
    bytes: Cell<usize>,
}

impl Held {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), bytes: Cell::new(0) }
    }

    /// Adds bytes to this share.
    ///
    /// # Errors
    /// All requests together would exceed the bound: refuse this one.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Problem> {
        let most = self.shared.settings.bodies_bytes_max;
        if self.add(bytes) <= most as u64 { Ok(()) } else { Err(Self::full(most)) }
    }

    /// Adds bytes that are there already, whatever the bound. The result is the same bytes; they count until its last clone is
    /// dropped.
    pub(super) fn counting(self, bytes: Bytes) -> Bytes {
        self.add(bytes.len());
        Bytes::from_owner(Counted { bytes, _held: self })
    }

    /// Bytes of all shares, with these.
    fn add(&self, bytes: usize) -> u64 {
        self.bytes.set(self.bytes.get() + bytes);
        self.shared.counters.body_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64
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

/// Bytes with what they count as.
struct Counted {
    bytes: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.counters.body_bytes.fetch_sub(self.bytes.get() as u64, Ordering::Relaxed);
    }
}
