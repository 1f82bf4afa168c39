//! The proxy: accepts OpenAI requests, asks the [scheduler](crate::schedule) for their nodes, and streams the answers back.
//!
//! ```text
//!  client -- connection --> service: checks the request, reads and scans its body
//!                              |
//!                              v
//!                           attempt: chooses a node or a pair <--------.  a leg failed, and the client
//!                              |                                       |  has received nothing yet
//!                              v                                       |
//!                           a leg to each node --> upstream: a kept or a new connection
//!                              |
//!  client <-- frames, unparsed -- answer: ends the reservation with the last byte, or when the client leaves
//! ```
//! - hyper serves clients' connections. Towards nodes the proxy speaks HTTP/1.1 itself: [`answers`](crate::answers) finds where
//!   an answer ends. So a piece of an answer wakes one task, and pieces that arrive together leave together.
//! - Each thread has its own runtime, client connections and upstream connections. The threads share one lock, which they hold
//!   for microseconds.
//! - A dropped future ends its legs. A client that leaves drops the future of its request. That drops the connections to the
//!   engines, which then abort their work.
//!
//! | part | files |
//! |---|---|
//! | clients' connections | `listen`, `first_head`, `head_watch`, `head_rules`, `clients`, `departure`, `joined` |
//! | a request | `service`, `paths`, `gathered`, `held` |
//! | its legs | `attempt`, `pairing`, `leg`, `doubted`, `forward`, `outgoing`, `turns` |
//! | nodes' connections | `upstream`, `idle`, `exchange`, `reading`, `upstream_error` |
//! | its answer | `answer`, `tally` |

mod answer;
mod attempt;
mod clients;
mod departure;
mod doubted;
mod exchange;
mod first_head;
mod forward;
mod gathered;
mod head_rules;
mod head_watch;
mod held;
mod idle;
mod joined;
mod leg;
mod listen;
mod outgoing;
mod pairing;
mod paths;
mod reading;
mod service;
mod tally;
mod turns;
mod upstream;
mod upstream_error;

pub use self::listen::{Proxy, StartError, Stop};
