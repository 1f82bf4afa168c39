//! Blocks that somebody waits for: what becomes of them is told as it happens, so that nobody has to look again and again.
//!
//! ```text
//!   asked for, claimed --> committed, shard by shard --> visible       each is progress; with the last block: complete
//!        |                      |                           |
//!        '-- refused            '--------- died ------------'          lost, if its saver had asked for it: it has no reason
//!                                                                      to do so again
//! ```

use std::collections::HashMap;

use kvlane_block::BlockHash;

use crate::api::{ClaimOutcome, OwnerId, SpaceId};

/// Blocks that are watched, over all watches: some 100 bytes each.
const BLOCKS_MAX: usize = 1 << 18;

/// What became of watched blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stir {
    /// One was claimed, a shard of it was written, or it became visible.
    Progress,
    /// All are visible.
    Complete,
    /// One will not come: its saver was refused room for it, or it died after its saver had asked to save it. Also where that
    /// was a short while before the watch began.
    Lost,
}

/// Hears of it. Called under the store's lock: it must be quick, and must not call the store.
pub type Stirred = Box<dyn Fn(Stir) + Send>;

/// Names a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WatchId(u64);

/// A block's space and hash.
pub(crate) type Key = (SpaceId, BlockHash);

/// How far a block is when it begins to be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) is_visible: bool,
    /// The watch's saver has asked to save it.
    pub(crate) is_asked: bool,
    /// And nothing came of it.
    pub(crate) is_lost: bool,
}

struct Watched {
    saver: OwnerId,
    blocks: Vec<Key>,
    /// Of these, how many are not visible.
    missing: usize,
    /// All blocks were added.
    is_whole: bool,
    stirred: Stirred,
}

/// One of those who watch a block.
#[derive(Clone, Copy)]
struct Watcher {
    watch: WatchId,
    is_asked: bool,
}

/// All that is watched.
#[derive(Default)]
pub(crate) struct Watches {
    all: HashMap<WatchId, Watched>,
    /// Ascending by watch: that is how they come.
    by_block: HashMap<Key, Vec<Watcher>>,
    blocks: usize,
    last: u64,
}

impl Watches {
    /// A watch without blocks yet, for what `saver` is expected to save.
    pub(crate) fn begin(&mut self, saver: OwnerId, stirred: Stirred) -> WatchId {
        self.last += 1;
        let id = WatchId(self.last);
        self.all.insert(id, Watched { saver, blocks: Vec::new(), missing: 0, is_whole: false, stirred });
        id
    }

    pub(crate) fn saver(&self, watch: WatchId) -> Option<OwnerId> {
        self.all.get(&watch).map(|watched| watched.saver)
    }

    /// Adds a block; one that the watch has already changes nothing. One that is lost is told. False if no more can be watched.
    pub(crate) fn add(&mut self, watch: WatchId, key: Key, standing: Standing) -> bool {
        let Some(watched) = self.all.get_mut(&watch) else { return false };
        if self.blocks >= BLOCKS_MAX {
            return false;
        }
        let watchers = self.by_block.entry(key).or_default();
        let Err(place) = watchers.binary_search_by_key(&watch, |watcher| watcher.watch) else { return true };
        watchers.insert(place, Watcher { watch, is_asked: standing.is_asked });
        watched.blocks.push(key);
        watched.missing += usize::from(!standing.is_visible);
        self.blocks += 1;
        if standing.is_lost {
            (watched.stirred)(Stir::Lost);
        }
        true
    }

    /// All blocks were added. True if none is missing: that is not told any more.
    pub(crate) fn finish(&mut self, watch: WatchId) -> bool {
        self.all.get_mut(&watch).is_some_and(|watched| {
            watched.is_whole = true;
            watched.missing == 0
        })
    }

    /// Forgets up to so many blocks of a watch, and the watch with the last one; true then.
    pub(crate) fn forget(&mut self, watch: WatchId, most: usize) -> bool {
        let Some(watched) = self.all.get_mut(&watch) else { return true };
        let rest = watched.blocks.len().saturating_sub(most);
        for key in watched.blocks.drain(rest..) {
            self.blocks -= 1;
            let Some(watchers) = self.by_block.get_mut(&key) else { continue };
            if let Ok(place) = watchers.binary_search_by_key(&watch, |watcher| watcher.watch) {
                watchers.remove(place);
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

    /// An engine has asked to save a block.
    pub(crate) fn asked(&mut self, owner: OwnerId, key: Key, outcome: &ClaimOutcome) {
        self.for_each(key, |watcher, watched| {
            let is_saver = watched.saver == owner;
            watcher.is_asked |= is_saver;
            match outcome {
                ClaimOutcome::Claimed(_) => (watched.stirred)(Stir::Progress),
                ClaimOutcome::NoRoom if is_saver => (watched.stirred)(Stir::Lost),
                ClaimOutcome::Present | ClaimOutcome::InFlight | ClaimOutcome::NoRoom => {}
            }
        });
    }

    /// A shard of a block was written.
    pub(crate) fn committed(&mut self, key: Key) {
        self.for_each(key, |_, watched| (watched.stirred)(Stir::Progress));
    }

    /// A block became visible.
    pub(crate) fn sealed(&mut self, key: Key) {
        self.for_each(key, |_, watched| {
            watched.missing = watched.missing.saturating_sub(1);
            let is_complete = watched.is_whole && watched.missing == 0;
            (watched.stirred)(if is_complete { Stir::Complete } else { Stir::Progress });
        });
    }

    /// A block is not there any more, nor on its way. `claimed_by` says who was saving it, if it was still claimed.
    pub(crate) fn died(&mut self, key: Key, was_visible: bool, claimed_by: Option<OwnerId>) {
        self.for_each(key, |watcher, watched| {
            watched.missing += usize::from(was_visible);
            if watcher.is_asked || claimed_by == Some(watched.saver) {
                (watched.stirred)(Stir::Lost);
            }
        });
    }

    /// Blocks that are watched, each as often as it is.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Mostly nobody watches any.
    fn for_each(&mut self, key: Key, mut tell: impl FnMut(&mut Watcher, &mut Watched)) {
        if self.by_block.is_empty() {
            return;
        }
        for watcher in self.by_block.get_mut(&key).into_iter().flatten() {
            if let Some(watched) = self.all.get_mut(&watcher.watch) {
                tell(watcher, watched);
            }
        }
    }
}
