//! Which nodes a request goes to: (state, request, time) gives a prefill node, a decode node and why.
//!
//! Pure: no I/O, no clock; chance comes from a seed. A *node* is an engine's server, or one data-parallel rank of it.
//!
//! ```text
//!   probes, beats --> nodes: role, models, state, breaker --.
//!   /metrics -------> loads: running and waiting -----------+--> choose --> reservations of one or two legs
//!   marks of a prompt --> index: who has which prefix ------+       |            | first byte, end
//!   tokens, KV events --> known: what engines tell of it --+       |            |
//!   first tokens ------> prediction: what they took -------'       |            |
//!                          ^----------------------------------------'            v
//!                            the chosen nodes will have it                     loads
//! ```

mod breaker;
mod choice;
mod choose;
mod condition;
mod doubts;
mod hand_offs;
mod hand_over;
mod index;
mod known;
mod least_squares;
mod load;
mod near;
mod nodes;
mod pick;
mod policy;
mod prediction;
mod reservation;
mod scheduler;
mod settings;

pub(crate) use self::index::{FETCHED_AT_ONCE, NODES_A_TABLE};
pub use self::{
    breaker::Breaker,
    choice::{Choice, Chosen, NoNode, Request, Why},
    condition::Condition,
    doubts::Doubt,
    hand_offs::{HandOffs, Pairing},
    index::Index,
    known::{Cached, Known},
    load::{Load, Reported},
    nodes::{Connector, KnownBy, Node, NodeId, NodeState, Role},
    policy::{Policy, UnknownPolicy},
    prediction::Prediction,
    reservation::{Leg, LegEnd, Reservation},
    scheduler::{Scheduler, Turn},
    settings::Settings,
};
