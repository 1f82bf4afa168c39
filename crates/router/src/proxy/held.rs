//! Bounds the memory of all requests together: bodies, ranges and hashes of their contents, and answers that the router has read.

use std::{
    cell::Cell,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use hyper::StatusCode;

use super::answer::Problem;
use crate::shared::Shared;

/// The share of one request or answer, until this is dropped.
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
    /// All shares together exceed the bound, so this request is refused.
    pub(super) fn take(&self, bytes: usize) -> Result<(), Problem> {
        let most = self.shared.settings.bodies_bytes_max;
        if self.add(bytes) <= most as u64 { Ok(()) } else { Err(Self::full(most)) }
    }

    /// Adds bytes that are in memory already, whatever the bound. The result has the same bytes, which count until its last clone
    /// is dropped.
    pub(super) fn counting(self, bytes: Bytes) -> Bytes {
        self.add(bytes.len());
        Bytes::from_owner(CountedBytes { bytes, _held: self })
    }

    /// Adds bytes to this share. Returns the bytes of all shares.
    fn add(&self, bytes: usize) -> u64 {
        self.bytes.set(self.bytes.get() + bytes);
        self.shared.counters.body_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64
    }

    fn full(most: usize) -> Problem {
        let sentence = format!("this router holds {most} bytes of requests already; retry later");
        Problem {
            closes: true,
            retry_after: Some(Duration::from_secs(1)),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
        }
    }
}

/// Bytes with their share.
struct CountedBytes {
    bytes: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.counters.body_bytes.fetch_sub(self.bytes.get() as u64, Ordering::Relaxed);
    }
}
