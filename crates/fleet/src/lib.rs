//! Replays a recorded trace against a simulated fleet: the router's own scheduler in front of engines in virtual time.
//!
//! No I/O, no clock, and random numbers from a seed only, so the same arguments give the same results. No bytes move; the
//! times of engines' steps come from measurements of a real engine ([`Costs`]).
//!
//! ```text
//!  trace --> arrivals --> Scheduler --> engine: waiting -> prefill in parts -> decode --> outcome of each request
//!                            ^              |  steps, one after the other; prefixes in a cache
//!                            '-- /metrics --'  transfer: from a prefill node's last token to the decode node's first
//! ```
#![forbid(unsafe_code)]

mod costs;
mod engine;
mod lab;
mod live;
mod outcome;
mod pool;
mod replay;
mod trace;

pub use self::{
    costs::{Costs, CostsError},
    engine::Class,
    lab::{Chooser, Lab, NoChooser},
    live::{LiveEngine, LiveOutput},
    outcome::{Limits, Served, Summary},
    pool::{Pool, PoolSetup},
    replay::{NodeSetup, Replayed, RoleChange, Setup, Signals, TransferSetup, replay, replay_in},
    trace::{Request, Trace},
};
