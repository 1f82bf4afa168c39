//! Direct hand-off of a prompt's KV blocks: from the engine that computes it (P) into the own cache of the engine that goes on
//! with it (D), with no store between.
//!
//! ```text
//!   P's scheduler (Legs)  <------- Want, Queued, Landed ------->  D's scheduler (Landings)
//!        | Serve, Close                                               | Room, Stop
//!   P's rank (Offering)   -------- Offer --------------------->   D's rank (Reading)
//!        windows over blocks  <=== READ through the fabric =====      blocks of D's own pool
//! ```
//! The four machines decide, without I/O, clock or threads. [`SchedulerAgent`] and [`RankAgent`] carry out what they decide,
//! each with an engine of the fabric and a thread.
#![forbid(unsafe_code)]

mod geometry;
mod landings;
mod layers;
mod legs;
mod message;
mod offering;
mod progress;
mod rank_agent;
mod reading;
mod remembered;
mod scheduler_agent;
mod talk;
mod wire;

pub use geometry::{Geometry, GeometryError};
pub use landings::{LandingAction, LandingOptions, Landings, Outcome, Standing, Wanted};
pub use layers::LayerOrder;
pub use legs::{LegAction, LegOptions, Legs};
pub use message::{
    BLOCKS_MAX, BadMessage, Endpoint, HASHES_MAX, HandoffId, Message, Offer, Queued, RANKS_MAX, Reason,
    VERSION, Want, whose,
};
pub use offering::{Computed, Offering, OfferingAction};
pub use rank_agent::{Area, Filled, RankAgent, RankOptions, ReadCounts};
pub use reading::{Reading, ReadingAction};
pub use scheduler_agent::{RankAddress, SchedulerAgent, SchedulerOptions};
pub use talk::AgentError;
