//! The scheduler: (state, request, time) gives the nodes that serve a request, the reason, and a reservation of their load.
//!
//! Pure: no I/O, no clock. Random choices come from a seed. A *node* is an engine's server, or one data-parallel rank of it.
//!
//! ```text
//!   probes, beats --> nodes: role, models, state, breaker --.
//!   /metrics -------> load: running and waiting ------------+--> choose --> one reservation a leg: one or two
//!   marks of a prompt --> index: which nodes have it -------+       |            | first byte, end
//!   tokens, KV events --> cached: what engines report ------+       |            |
//!   first tokens ------> prediction: time to a token -------+       |            |
//!               '------> pools: what nodes can load --------'       |            |
//!                          ^----------------------------------------'            v
//!                            the chosen nodes will have it                     load
//! ```
//!
//! # What a choice reserves
//! A choice adds the request to the [`Load`] of each chosen node, so that the next choice counts it. The engine's own metrics
//! show it only seconds later. A pair gets two [`Reservation`]s, one for each [`Leg`]; a node that serves the whole request gets
//! one. A reservation ends with its leg. Its tokens are released earlier: at the first byte of the answer.
//!
//! A leg ends with its own answer. The prefill leg's answer is one token, so that leg ends about when its prompt is prefilled.
//! Both legs are reserved at the choice, also in the modes in which the decode leg is sent after the prefill leg has ended.
//!
//! ```text
//!                  at the choice                           at the first byte of its answer    when the leg ends
//!  own_requests    + 1 at the leg's node                                                      - 1
//!  own_tokens      + tokens that the node has to prefill   - these tokens                     - these, if still there
//!                    (decode leg: 0)
//!  own_unseen      + the same, if the answer does not      - the same                         - the same, if still there
//!                    stream (whole leg)
//!  own_decodes     + 1: decode leg, and whole leg that     + 1: whole leg that streams        - 1, if it was added
//!                    does not stream
//!  own_awaited     prefill leg: + 1 at the decode node     - 1                                - 1, if still there
//! ```
//! `own_decodes - own_awaited` are the requests that a node decodes now: it has nothing to do yet for those whose prompts other
//! nodes prefill. `own_unseen` are tokens that may be prefilled already, because an answer in one piece does not show when. Such
//! a request counts as decoding from the choice on.
//!
//! - A reservation ends exactly once, in [`Scheduler::end`]: it cannot be copied, and `end` consumes it. The proxy's guard calls
//!   `end` when the answer has ended, the node has failed, or the client has left, at the latest when the guard is dropped. The
//!   scheduler itself has no timeout for it.
//! - If the node has left the router meanwhile, its load went with it, and `end` releases nothing there.
//! - A choice also records in the index that the node which prefills the prompt will have it, so that equal prompts meet there.
//!   The decode node follows at its first byte. A record is no reservation: it stays until the index evicts it or the node
//!   restarts.

mod breaker;
mod cached;
mod choice;
mod choose;
mod condition;
mod doubts;
mod index;
mod least_squares;
mod load;
mod near;
mod nodes;
mod pairing;
mod pick;
mod policy;
mod pools;
mod prediction;
mod reservation;
mod scheduler;
mod settings;
mod transfer_cost;

pub(crate) use self::index::{FETCHED_AT_ONCE, NODES_A_TABLE};
pub use self::{
    breaker::Breaker,
    cached::{Cached, CachedPrefixes},
    choice::{Choice, Chosen, NoNode, Request, Why},
    condition::Condition,
    doubts::Doubt,
    index::Index,
    load::{Load, Reported},
    nodes::{Connector, KnownBy, Node, NodeId, NodeState, Role},
    pairing::{Pairing, PairingBreaker},
    policy::{Policy, UnknownPolicy},
    prediction::Prediction,
    reservation::{Leg, LegEnd, Reservation},
    scheduler::{Scheduler, Turn},
    settings::SchedulerSettings,
};
