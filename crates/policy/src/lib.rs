//! Decides what to keep and what a prompt can reuse: replacement policies and hit length, over plain numbers.
//!
//! Pure: no I/O, no clock, no locks. A *slot* is the store's number for a block, a *key* a fingerprint of its content.
//!
//! - [`ReplacementPolicy`] and its kinds: what a store evicts, and what it takes in. [`PrefixLru`] is the list that they are
//!   made of.
//! - [`Cleaner`]: what a tier on SSDs below the store gives up, and what it writes again.
//! - [`longest_hit`]: how many tokens of a prompt can be reused.
//! - [`CacheModel`], [`SsdModel`], and both as a [`TieredModel`]: caches without bytes, for [replays](replay) of a [`Trace`] and for the shadow caches of [`Auto`].
//! - [`Ceilings`]: what a cache without limit could have hit; [`clairvoyant`]: one that knows the future.
#![forbid(unsafe_code)]

mod ceiling;
mod clairvoyant;
mod cleaning;
mod factory;
mod ghost;
mod hit;
mod hyperloglog;
mod key;
mod kind;
mod learning;
mod lru;
mod memo;
mod model;
pub mod policies;
mod replacement;
mod replay;
mod shadow;
mod sketch;
mod ssd_model;
mod tiers;
mod trace;

pub use ceiling::{Ceiling, Ceilings, Window, WindowCount};
pub use clairvoyant::clairvoyant;
pub use cleaning::{Cleaner, Worth};
pub use hit::{PrefixGroup, longest_hit};
pub use hyperloglog::{BadSketch, HyperLogLog};
pub use key::spread;
pub use kind::{Choice, PolicyKind, UnknownPolicy};
pub use learning::{Learning, LearntClass};
pub use lru::PrefixLru;
pub use memo::Memo;
pub use model::{CacheModel, Evicted, Outcome};
pub use replacement::{Blocks, ReplacementPolicy};
pub use replay::{EstimatedCeiling, Replayed, Setup, estimate_ceiling, replay};
pub use shadow::{Auto, Switch};
pub use ssd_model::SsdModel;
pub use tiers::{TieredModel, TieredOutcome};
pub use trace::Trace;
