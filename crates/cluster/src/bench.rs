//! Parts of a cluster for `kvlane bench index` and tests: owners whose blocks take no memory, and lookups that are timed.
//!
//! ```text
//!   NamedOwner, several ----announcements----> replicas of an index <----questions---- Lookups, of a daemon with no blocks
//!                                              Echo, answers at once <-----pings-----'
//! ```

mod echo;
mod lookups;
mod loopback;
mod named_blocks;
mod named_owner;

pub use echo::Echo;
pub use lookups::{Asked, Lookups, LookupsError, Prompts};
pub use named_blocks::NamedBlocks;
pub use named_owner::NamedOwner;
