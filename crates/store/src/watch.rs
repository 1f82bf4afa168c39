//! Watches: a lookup that awaits another engine's saves is notified of each step in the life of its blocks. It need not
//! poll.
//!
//! ```text
//!   requested, claimed --> committed, shard by shard --> visible       each step: Progress; the last block's: Complete
//!        |                      |                           |
//!        '-- refused            '--------- died ------------'          Lost, if its saver had requested the save, because
//!                                                                      the saver has no reason to request it again
//! ```

use std::collections::HashMap;

use kvlane_block::BlockHash;

use crate::api::{ClaimOutcome, OwnerId, SpaceId};

/// Watched blocks over all watches, some 100 bytes each.
const BLOCKS_MAX: usize = 1 << 18;

/// A step of a watched block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// A block was claimed, one of its shards was written, or it became visible.
    Progress,
    /// All blocks are visible.
    Complete,
    /// A block will not come: its saver was refused room for it, or it died after its saver had requested to save it. Also
    /// if that happened within some seconds before the watch began.
    Lost,
}

/// The callback of a watch. Called under the store's lock: it must be quick, and must not call the store.
pub type OnWatchEvent = Box<dyn Fn(WatchEvent) + Send>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WatchId(u64);

/// A block's space and hash.
pub(crate) type Key = (SpaceId, BlockHash);

/// The state of a block when it is added to a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InitialState {
    pub(crate) is_visible: bool,
    /// The watch's saver has requested to save it.
    pub(crate) is_requested: bool,
    /// That save has failed.
    pub(crate) is_lost: bool,
}

struct Watched {
    saver: OwnerId,
    blocks: Vec<Key>,
    /// How many of `blocks` are not visible.
    missing: usize,
    /// All blocks were added.
    is_whole: bool,
    on_event: OnWatchEvent,
}

/// A watch, as one of its blocks lists it.
#[derive(Clone, Copy)]
struct Watcher {
    watch: WatchId,
    /// The watch's saver has requested to save the block.
    is_requested: bool,
}

/// All watches, by id and by block.
#[derive(Default)]
pub(crate) struct Watches {
    all: HashMap<WatchId, Watched>,
    /// Each list ascends by watch id.
    by_block: HashMap<Key, Vec<Watcher>>,
    /// Sum over all watches.
    blocks: usize,
    last: u64,
}

impl Watches {
    /// Starts a watch without blocks, for saves that are expected of `saver`.
    pub(crate) fn begin(&mut self, saver: OwnerId, on_event: OnWatchEvent) -> WatchId {
        self.last += 1;
        let id = WatchId(self.last);
        self.all.insert(id, Watched { saver, blocks: Vec::new(), missing: 0, is_whole: false, on_event });
        id
    }

    pub(crate) fn saver(&self, watch: WatchId) -> Option<OwnerId> {
        self.all.get(&watch).map(|watched| watched.saver)
    }

    /// Adds a block, unless the watch has it. Reports a lost one at once. False if no more blocks can be watched.
    pub(crate) fn add(&mut self, watch: WatchId, key: Key, initial: InitialState) -> bool {
        let Some(watched) = self.all.get_mut(&watch) else { return false };
        if self.blocks >= BLOCKS_MAX {
            return false;
        }
        let watchers = self.by_block.entry(key).or_default();
        let Err(position) = watchers.binary_search_by_key(&watch, |watcher| watcher.watch) else {
            return true;
        };
        watchers.insert(position, Watcher { watch, is_requested: initial.is_requested });
        watched.blocks.push(key);
        watched.missing += usize::from(!initial.is_visible);
        self.blocks += 1;
        if initial.is_lost {
            (watched.on_event)(WatchEvent::Lost);
        }
        true
    }

    /// Call it after the last `add`. True if no block is missing; `Complete` is not reported then.
    pub(crate) fn finish(&mut self, watch: WatchId) -> bool {
        self.all.get_mut(&watch).is_some_and(|watched| {
            watched.is_whole = true;
            watched.missing == 0
        })
    }

    /// Removes up to `most` blocks of a watch, and with the last one the watch itself. True when it is gone.
    pub(crate) fn forget(&mut self, watch: WatchId, most: usize) -> bool {
        let Some(watched) = self.all.get_mut(&watch) else { return true };
        let rest = watched.blocks.len().saturating_sub(most);
        for key in watched.blocks.drain(rest..) {
            self.blocks -= 1;
            let Some(watchers) = self.by_block.get_mut(&key) else { continue };
            if let Ok(position) = watchers.binary_search_by_key(&watch, |watcher| watcher.watch) {
                watchers.remove(position);
            }
            if watchers.is_empty() {
                self.by_block.remove(&key);
            }
        }
        if rest == 0 {
            self.all.remove(&watch);
        }
        rest == 0
    }

    /// An engine has requested to save a shard of a block.
    pub(crate) fn save_requested(&mut self, owner: OwnerId, key: Key, outcome: &ClaimOutcome) {
        self.for_each(key, |watcher, watched| {
            let is_saver = watched.saver == owner;
            watcher.is_requested |= is_saver;
            match outcome {
                ClaimOutcome::Claimed(_) => (watched.on_event)(WatchEvent::Progress),
                ClaimOutcome::NoRoom if is_saver => (watched.on_event)(WatchEvent::Lost),
                ClaimOutcome::Present | ClaimOutcome::InFlight | ClaimOutcome::NoRoom => {}
            }
        });
    }

    /// A shard of a block was written.
    pub(crate) fn committed(&mut self, key: Key) {
        self.for_each(key, |_, watched| (watched.on_event)(WatchEvent::Progress));
    }

    /// A block became visible.
    pub(crate) fn sealed(&mut self, key: Key) {
        self.for_each(key, |_, watched| {
            watched.missing = watched.missing.saturating_sub(1);
            let is_complete = watched.is_whole && watched.missing == 0;
            (watched.on_event)(if is_complete { WatchEvent::Complete } else { WatchEvent::Progress });
        });
    }

    /// A block has died. `claimed_by`: the engine that was saving it, if it was still claimed.
    pub(crate) fn died(&mut self, key: Key, was_visible: bool, claimed_by: Option<OwnerId>) {
        self.for_each(key, |watcher, watched| {
            watched.missing += usize::from(was_visible);
            if watcher.is_requested || claimed_by == Some(watched.saver) {
                (watched.on_event)(WatchEvent::Lost);
            }
        });
    }

    /// Watched blocks; one that two lookups await counts twice.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    fn for_each(&mut self, key: Key, mut notify: impl FnMut(&mut Watcher, &mut Watched)) {
        // The usual case: no lookup awaits a save.
        if self.by_block.is_empty() {
            return;
        }
        for watcher in self.by_block.get_mut(&key).into_iter().flatten() {
            if let Some(watched) = self.all.get_mut(&watcher.watch) {
                notify(watcher, watched);
            }
        }
    }
}
