//! The proxy: takes OpenAI requests, asks the [scheduler](crate::schedule) who serves them, and brings the answers back.
//!
//! ```text
//!  client -- connection --> service: reads and scans the body
//!                              |  choose: one node or a pair                        retry elsewhere, as long as the
//!                              v                                                    client got nothing yet
//!                           attempt: prefill leg, then decode leg --> upstream: a kept or new connection
//!                              |
//!  client <-- frames, unparsed -- answer: ends the reservation with the last byte, or when the client is gone
//! ```
//! Clients' side is hyper's. Towards nodes the proxy speaks HTTP/1.1 itself ([`answers`](crate::answers) says where an answer
//! ends): so a piece of an answer wakes one task, and pieces that came together leave together.
//!
//! Each thread has a runtime, connections and upstream connections of its own; what they share is behind one lock that is held
//! for microseconds. Whatever ends a future ends its legs: a client that leaves drops the future of its request, which drops the
//! connections to the engines, which abort their work.

mod answer;
mod attempt;
mod clients;
mod departure;
mod doubted;
mod exchange;
mod first_head;
mod forward;
mod gathered;
mod hand_over;
mod head_rules;
mod head_watch;
mod held;
mod idle;
mod joined;
mod leg;
mod listen;
mod outgoing;
mod paths;
mod reading;
mod service;
mod tally;
mod turns;
mod upstream;
mod upstream_error;

pub use self::listen::{Proxy, StartError, Stop};
