//! The cache: which blocks are in the pool, who may read, write or evict them, and when they become visible.
//!
//! [`Store`] is what a daemon uses: thread-safe, over one pool arena, with a background that seals and scrubs. Under
//! its lock is an [`Index`], the pure core: no threads, no clock (time is an argument), no arena.
//!
//! A block's life: absent, `Claimed` (workers write its shards), `Committed` (all are written; the checksums are
//! being taken), `Sealed` (visible), absent again. The core keeps four invariants, for any sequence of calls:
//!
//! - **A lookup finds only sealed blocks**, and a block is sealed only after every shard was committed.
//! - **Memory that may still be read or written is not reused.** If a block dies under a lease, a check or a
//!   writer, its extents stay in limbo. Each is freed when its last reader or its writer is done.
//! - **A child is evicted before its parent.** A chained block is stored only under a parent that is stored or
//!   being stored. Eviction takes only blocks without children. A parent may also die because its claim is
//!   aborted or a scrub finds it damaged. If it then has children, its entry stays as a *gap*: no memory, not
//!   visible. Lookups stop at a gap, so its descendants are never served. They age out, or a later save of the
//!   parent fills the gap.
//! - **One claim a key.** The engine that claims first copies; other engines get the answer "in flight".
//!
//! index.rs says which blocks may be evicted while a save is in flight.
#![deny(unsafe_code)]

mod api;
mod auto;
mod background;
mod below;
mod changes;
mod claim;
mod claiming;
mod consistency;
mod copies;
mod copying;
mod described;
mod done;
mod entries;
mod evict;
mod fetch;
mod fetches;
mod find;
mod index;
mod journal;
mod lease;
mod leasing;
mod lending;
mod limbo;
mod lookup;
mod needs;
mod not_saved;
mod observing;
mod refusals;
mod replacement;
mod residence;
mod rows;
mod seal;
mod shares;
mod source;
mod space;
mod spill;
mod stalls;
mod stats;
mod store;
mod watch;
mod watching;
mod worth;

pub use api::{
    Caller, Chain, ClaimOutcome, Hit, HitGroup, LeaseId, LookupGroup, Origin, OwnerId, ShardClaim,
    ShardNumber, SpaceId, StoreOptions, StoredBlock, WriterId,
};
pub use auto::PolicyReport;
pub use background::Background;
pub use below::{Below, Dropped, Judge, NotForGood, WriteDone};
pub use changes::{Changes, SnapshotPosition};
pub use described::SpaceDescription;
pub use done::Done;
pub use find::{FetchPlan, Finding, PlannedRun};
pub use index::Index;
pub use journal::{Change, Journal, JournalEntry, JournalRead};
pub use lending::Loan;
pub use residence::{RESIDENCE_BOUNDS_S, Residence};
pub use seal::{Check, Damaged};
pub use source::{BlockRead, FindDone, Found, HolderId, Question, ReadDone, Source};
pub use spill::Spill;
pub use stats::{Counters, SpaceStats, StoreStats};
pub use store::Store;
pub use watch::{OnWatchEvent, WatchEvent};
pub use watching::{Watch, Watching};
