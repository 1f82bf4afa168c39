//! [`Gated`]: a copier whose work waits for words, and is followed by one.
//!
//! ```text
//!  before:  wait for words | event |
//!  copier:              wait for it | copies | event |
//!  after:                                 wait for it | write a word
//! ```
//! Words are in streams of their own. CUDA does not see the order that words establish, and asks for events where work depends on
//! it (documentation of `cuStreamWaitValue32`).

use std::sync::Arc;

use crate::copier::{Copier, CopierOptions};
use crate::device::Gpu;
use crate::driver::{EventScope, Priority};
use crate::error::GpuError;
use crate::stream::{Event, Stream};

/// After this many queries of a stream in a row that returned an error, its GPU counts as lost, whatever the errors are.
const LOST_AFTER_POLLS: u32 = 100;

/// A copier between words of other streams.
#[derive(Debug)]
pub(crate) struct Gated {
    pub(crate) copier: Copier,
    before: Stream,
    after: Stream,
    opened: Event,
    done: Event,
    /// Queries in a row that returned an error.
    failures: u32,
}

impl Gated {
    pub(crate) fn new(gpu: &Gpu, priority: Priority, options: CopierOptions) -> Result<Gated, GpuError> {
        let stream = || Stream::new(gpu, priority);
        let event = || Event::new(gpu, EventScope::Process);
        Ok(Gated {
            copier: Copier::new(Arc::new(stream()?), options)?,
            before: stream()?,
            after: stream()?,
            opened: event()?,
            done: event()?,
            failures: 0,
        })
    }

    /// Later copies start once the words have reached the value, compared cyclically.
    ///
    /// # Safety
    /// The words' addresses are multiples of 4, and valid until the copier's work is done.
    pub(crate) unsafe fn wait_words(
        &self,
        words: impl IntoIterator<Item = u64>,
        value: u32,
    ) -> Result<(), GpuError> {
        for word in words {
            // SAFETY: the caller's promise.
            unsafe { self.before.wait_word(word, value)? };
        }
        self.opened.record(&self.before)?;
        self.copier.stream().wait(&self.opened)
    }

    /// Writes a word after the copies that are enqueued.
    ///
    /// # Safety
    /// The word's address is a multiple of 4, and valid until [`Gated::poll`] finds nothing in progress.
    pub(crate) unsafe fn write_word(&self, word: u64, value: u32) -> Result<(), GpuError> {
        self.done.record(self.copier.stream())?;
        self.after.wait(&self.done)?;
        // SAFETY: the caller's promise.
        unsafe { self.after.write_word(word, value) }
    }

    /// Whether nothing is in progress, which a lost GPU counts as, and the error of any of the streams.
    pub(crate) fn poll(&mut self) -> (bool, Result<(), GpuError>) {
        let streams = [&self.before, self.copier.stream(), &self.after];
        let polled: Vec<_> = streams.into_iter().map(Stream::is_idle).collect();
        let failed = polled.iter().any(Result::is_err);
        self.failures = if failed { self.failures + 1 } else { 0 };
        let lost = self.is_lost();
        let is_over = |polled: &Result<bool, GpuError>| {
            polled.as_ref().map_or_else(|error| error.is_sticky() || lost, |idle| *idle)
        };
        let over = polled.iter().all(is_over);
        (over, polled.into_iter().try_for_each(|polled| polled.map(drop)))
    }

    /// Whether the last queries all returned errors.
    pub(crate) fn is_lost(&self) -> bool {
        self.failures >= LOST_AFTER_POLLS
    }
}
