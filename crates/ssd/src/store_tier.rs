//! The SSD tier as the store sees it: [`Below`] the pool, and a [`Source`] with one holder.

use std::time::{Duration, Instant};

use kvlane_block::{BlockKey, Namespace, SealedShard};
use kvlane_policy::Memo;
use kvlane_store::{Below, BlockRead, FindDone, Found, HolderId, NotForGood, Question, Source, WriteDone};

use crate::request::{Read, ReadEnd, Record, WriteEnd};
use crate::tier::SsdTier;

impl Below for SsdTier {
    fn contains(&self, key: &BlockKey) -> bool {
        Self::contains(self, key)
    }

    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone) {
        let written =
            Self::write(self, Record { key, shards, memo }, |end| done.call(end == WriteEnd::Stored));
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

impl Source for SsdTier {
    fn find(&self, question: Question, done: FindDone) {
        let positions = self.find_runs(question.space, &question.hashes, question.only_prefix);
        let found = Found { holder: HolderId(0), positions, round_trip: Duration::ZERO };
        done.call(if found.positions.is_empty() { Vec::new() } else { vec![found] });
    }

    fn read(&self, _: HolderId, blocks: Vec<BlockRead>, deadline: Instant) {
        for BlockRead { key, extents, done } in blocks {
            let ended = |end| {
                done.call(match end {
                    ReadEnd::Found { crcs } => Some(crcs),
                    ReadEnd::Miss(_) => None,
                });
            };
            let read = Read { key, into: extents, deadline: Some(deadline) };
            if let Err(reason) = Self::read(self, read, ended) {
                tracing::debug!(%reason, hash = %key.hash, "SSD read refused");
            }
        }
    }
}
