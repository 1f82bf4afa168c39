//! Replacement policies, and the length of a prompt's hit. Pure functions over numbers: no I/O, no clock, no locks.
//!
//! A *slot* is the store's number for a block. A *key* is a fingerprint of a block's content. A *reference* is one
//! block of one request; policies count time in references.
//!
//! - [`ReplacementPolicy`] and its kinds decide what a store evicts and what it admits. Most are built of [`PrefixLru`]
//!   lists.
//! - [`Cleaner`] decides which segment an SSD tier empties, and which of its records it writes again.
//! - [`longest_hit`] says how many tokens of a prompt can be reused.
//! - [`CacheModel`], [`SsdModel`] and [`TieredModel`] are caches without bytes. [Replays](replay) of a [`Trace`] and the
//!   shadow caches of [`Auto`] run them.
//! - [`Ceilings`] count what an unlimited cache could have hit. [`clairvoyant`] is the optimum of a limited one.
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

pub use ceiling::{BadWindow, Ceiling, Ceilings, Window, WindowCount};
pub use clairvoyant::clairvoyant;
pub use cleaning::{Cleaner, Worth};
pub use ghost::KeyMap;
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
pub use trace::{Trace, TraceRequest};
