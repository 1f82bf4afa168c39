//! Engines that are simulated in virtual time, behind the router's own scheduler: what a cluster would do with a recorded
//! trace.
//!
//! No I/O, no clock, no chance but from a seed: the same arguments give the same answers. Nothing here moves a byte; what an
//! engine's steps take comes from measurements of a real one ([`Costs`]).
//!
//! ```text
//!  trace --> arrivals --> Scheduler --> engine: waiting -> prefill in parts -> decode --> outcome of each request
//!                            ^              |  steps, one after the other; prefixes in a cache
//!                            '-- /metrics --'  hand-over: from a prefill node's last token to the decode node's first
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
    live::{Brought, LiveEngine},
    outcome::{Limits, Served, Summary},
    pool::{Pool, PoolSetup},
    replay::{HandOver, NodeSetup, Replayed, Setup, Signals, Turn, replay, replay_in},
    trace::{Request, Trace},
};
