//! Direct hand-off of a prompt's KV blocks: from the cache of the engine that prefills the prompt (P) straight into the
//! cache of the engine that decodes it (D), with no store between.
//!
//! ```text
//!   P's scheduler (Lendings)  <--- Want, Queued, Landed --->  D's scheduler (Landings)
//!        | Serve, Close                                            | Room, Stop
//!   P's rank (Offering)   ------------ Offer ------------>    D's rank (Reading)
//!        windows over blocks  <=== READ through the fabric ===     blocks of D's own pool
//! ```
//! A block's number is its place in the hand-off, which both engines derive from the prompt. For models with one KV cache
//! group it is the block's number in the prompt; for others, windows and states follow (connector/direct_order.py).
//!
//! The four state machines decide without I/O, clock or threads. [`SchedulerAgent`] and [`RankAgent`] carry their actions
//! out, each with one fabric engine and one thread.
//!
//! Invariants:
//! - D reads; P never writes into D's memory, nor D into P's.
//! - P's blocks stay pinned until every rank of P has closed its windows.
//! - D's blocks may be written until the landing is over; D's scheduler uses none of them before that.
//! - A hand-off has one reader, and its id is used once ([`Landings`]).
#![forbid(unsafe_code)]

mod geometry;
mod landings;
mod layers;
mod lendings;
mod message;
mod offering;
mod progress;
mod rank_agent;
mod reading;
mod remembered;
mod scheduler_agent;
mod short_timer;
mod talk;
mod wire;

pub use geometry::{Geometry, GeometryError};
pub use landings::{LandingAction, LandingOptions, LandingStatus, Landings, Outcome, Wanted};
pub use layers::LayerOrder;
pub use lendings::{LendingAction, LendingOptions, Lendings};
pub use message::{
    BLOCKS_MAX, BadMessage, Endpoint, HASHES_MAX, HandoffId, Message, Offer, Queued, RANKS_MAX, Reason,
    VERSION, Want, engine_of,
};
pub use offering::{Computed, Offering, OfferingAction};
pub use rank_agent::{Area, Filled, RankAgent, RankOptions, ReadCounts};
pub use reading::{Reading, ReadingAction};
pub use scheduler_agent::{RankAddress, SchedulerAgent, SchedulerOptions};
pub use talk::AgentError;
