//! The SSD tier behind the store's [`Tier`] trait.

use std::time::Instant;

use kvlane_block::{BlockKey, Namespace, PoolExtent, SealedShard};
use kvlane_policy::Memo;
use kvlane_store::{NotForGood, ReadDone, Tier, WriteDone};

use crate::request::{Read, ReadEnd, Record, WriteEnd};
use crate::tier::SsdTier;

/// Calls `done` exactly once: with the outcome, or with the default, which means failure, when it is dropped uncalled.
/// The tier drops the `done` of a call that it refuses.
struct DoneOnce<T: Default> {
    done: Option<Box<dyn FnOnce(T) + Send>>,
}

impl<T: Default> DoneOnce<T> {
    fn new(done: Box<dyn FnOnce(T) + Send>) -> Self {
        Self { done: Some(done) }
    }

    fn call(mut self, with: T) {
        if let Some(done) = self.done.take() {
            done(with);
        }
    }
}

impl<T: Default> Drop for DoneOnce<T> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(T::default());
        }
    }
}

impl Tier for SsdTier {
    fn contains(&self, key: &BlockKey) -> bool {
        Self::contains(self, key)
    }

    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone) {
        let once = DoneOnce::new(done);
        let written =
            Self::write(self, Record { key, shards, memo }, |end| once.call(end == WriteEnd::Stored));
        if let Err(reason) = written {
            tracing::debug!(%reason, hash = %key.hash, "SSD write refused");
        }
    }

    fn memo(&self, key: &BlockKey) -> Option<Memo> {
        Self::memo(self, key)
    }

    fn remember(&self, lost: &[(BlockKey, Memo)]) {
        Self::remember(self, lost.iter().copied());
    }

    fn read(&self, key: BlockKey, into: Vec<PoolExtent>, deadline: Instant, done: ReadDone) {
        let once = DoneOnce::new(done);
        let ended = |end| {
            once.call(match end {
                ReadEnd::Found { crcs } => Some(crcs),
                ReadEnd::Miss(_) => None,
            });
        };
        if let Err(reason) = Self::read(self, Read { key, into, deadline: Some(deadline) }, ended) {
            tracing::debug!(%reason, hash = %key.hash, "SSD read refused");
        }
    }

    fn forget_namespace(&self, namespace: Namespace) {
        let blocks = Self::forget_namespace(self, namespace);
        // Log: `kvlane drop` removed these blocks from the SSD's index.
        tracing::info!(%namespace, blocks, "namespace dropped from the SSD index");
    }

    fn note_forgotten(&self, namespace: Namespace) -> Result<(), NotForGood> {
        let not_noted = Self::note_forgotten(self, namespace);
        if not_noted.is_empty() {
            return Ok(());
        }
        let sentence = not_noted.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        // Log: dropped blocks are not found now, but would be after a restart; the daemon tries again until it is
        // noted. Do: mend the disk before a restart.
        tracing::error!(
            %namespace, failed_files = not_noted.len(),
            "dropped namespace not written to SSD; a restart would bring it back: {sentence}"
        );
        Err(NotForGood(sentence))
    }
}
