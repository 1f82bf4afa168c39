//! Scans clients' bodies: short ones on the request's thread, long ones on threads of their own.
//!
//! ```text
//!   up to 128 KiB    on the request's thread, within half a millisecond
//!   up to 4 MiB      on one of two other threads, within some tens of milliseconds
//!   longer           on one other thread
//! ```
//! A long body waits only for bodies of its own class, and never keeps a thread that serves clients busy.

use std::sync::Arc;

use bytes::Bytes;
use thiserror::Error;
use tokio::{sync::Semaphore, task::spawn_blocking};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::body::{BodyError, Mark, Outline, Scan, marks, outline};

/// Longest body that is scanned on the request's thread.
pub(crate) const INLINE_BYTES_MAX: usize = 128 << 10;
/// Longest body of the middle class, which does not wait for longer ones.
const MEDIUM_BYTES_MAX: usize = 4 << 20;
/// Bodies of a class that are scanned at a time.
const MEDIUM_AT_ONCE: usize = 2;
const LONG_AT_ONCE: usize = 1;

/// The result of scanning a body.
#[derive(Debug)]
pub(crate) struct Outlined {
    pub(crate) outline: Outline,
    pub(crate) marks: Vec<Mark>,
}

impl Outlined {
    /// Memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.outline.bytes() + self.marks.capacity() * size_of::<Mark>()
    }
}

/// A body that could not be scanned.
#[derive(Debug, Error)]
pub(crate) enum OutlineError {
    /// No engine would accept it.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The scanning thread has ended.
    #[error("the body could not be read")]
    Ended,
}

/// Scans bodies, and bounds how many long ones at a time.
#[derive(Debug)]
pub(crate) struct BodyScanner {
    medium: Arc<Semaphore>,
    long: Arc<Semaphore>,
}

impl Default for BodyScanner {
    fn default() -> Self {
        let of = |permits| Arc::new(Semaphore::new(permits));
        Self { medium: of(MEDIUM_AT_ONCE), long: of(LONG_AT_ONCE) }
    }
}

impl BodyScanner {
    /// Finds the members of a body, and the marks of its prompt.
    ///
    /// # Errors
    /// See [`OutlineError`].
    pub(crate) async fn outline(&self, body: &Bytes) -> Result<Outlined, OutlineError> {
        if body.len() <= INLINE_BYTES_MAX {
            return Ok(outlined(body)?);
        }
        let class = if body.len() <= MEDIUM_BYTES_MAX { &self.medium } else { &self.long };
        let permit = Arc::clone(class).acquire_owned().await.map_err(|_| OutlineError::Ended)?;
        let body = body.clone();
        // The scan continues if its client leaves, and keeps its permit until it ends.
        let scan = move || {
            let _permit = permit;
            outlined(&body)
        };
        Ok(spawn_blocking(scan).await.map_err(|_| OutlineError::Ended)??)
    }
}

fn outlined(body: &[u8]) -> Result<Outlined, BodyError> {
    let scan = Scan::new(body, outline(body)?);
    let marks = marks(&scan, seed(&scan));
    Ok(Outlined { outline: scan.into_outline(), marks })
}

/// Hashes the other inputs that decide which blocks a prompt has.
fn seed(scan: &Scan<'_>) -> u64 {
    ["model", "cache_salt", "tools"]
        .into_iter()
        .fold(0, |seed, name| xxh3_64_with_seed(scan.raw(name).unwrap_or_default(), seed))
}
