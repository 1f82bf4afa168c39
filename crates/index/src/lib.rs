//! The global block index: which daemons have which blocks, as they announce it. Pure: no I/O, no clock, no threads.
//!
//! An *owner* is a daemon. An *epoch* is one run of it. An *entry* says that one owner has one key.
//!
//! ```text
//!   owner --- join, heartbeat, bye ----> owners: epoch, address, age ---.
//!         --- deltas, in any order ----> order ---> entries ------------+--> find: keys -> runs of positions per owner
//!         <-- request of a snapshot ---  gap or other digest            |
//!         --- parts of a snapshot -----> mark, then sweep --------------'
//! ```
//! The owners hold the truth. The index is soft state: it starts empty, asks each owner that joins for a snapshot, and
//! asks again when it has lost track. An answer may be stale, so a reader asks the owner for a lease. A wrong entry costs
//! a miss, never wrong bytes.
//!
//! - `messages`: what owners send. `index`: owners come and go. `announce`: deltas and snapshots. `question`: lookups.
//! - `owner`, `owners`, `deltas`, `snapshot`: the state behind them. `keys`: the digest that both sides compare.
//! - `bench`: measures the others, and alone reads a clock.
//! - `entries`, `tables`, `table`, `slots`, `fingerprint`: 8 bytes an entry in hash tables.
#![forbid(unsafe_code)]

mod announce;
pub mod bench;
mod counters;
mod deltas;
mod entries;
mod fingerprint;
mod index;
mod keys;
mod limits;
mod messages;
mod owner;
mod owners;
mod question;
mod refused;
mod slots;
mod snapshot;
mod status;
mod table;
mod tables;

pub use counters::Counters;
pub use index::{Index, Progress, SnapshotRequest};
pub use keys::{KeySet, SpaceDigests};
pub use limits::{Limits, Timing};
pub use messages::{Changes, Delta, Heartbeat, Part};
pub use question::{OWNERS_A_POSITION, OwnerRuns, Question};
pub use refused::Refused;
pub use status::{OwnerStatus, State};
