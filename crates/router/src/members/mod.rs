//! Membership: which nodes exist. Flags and the file name some; DNS, beats and operators add others; silence and operators
//! remove them.
//!
//! ```text
//!   flags, --config ---.
//!   DNS answers -------+
//!   beats, pings ------+--> Members: (event, time) -> changes --> scheduler: nodes join, leave, change their state
//!   control socket ----+       ^   pure
//!   probes ------------'       '-- the clock, every 200 ms
//! ```
//! [`Members`] decides and does no I/O. [`Membership`] runs the sources of events, and carries the changes out at the
//! scheduler.

mod allow;
mod beats;
mod configured;
mod control;
mod dns;
mod event;
mod limits;
mod member;
mod probes;
mod registry;
mod serve_control;
mod service;
mod sources;
mod state;
pub use self::{
    allow::{AllowList, AllowListError, Block},
    beats::{BeatError, BeatTo, beat},
    configured::Reconfigured,
    control::{ANSWER_BYTES_MAX, Answer, AskError, CALL_BYTES_MAX, Call, CallError, Listed, ask, read_call},
    dns::{DnsName, Resolve, Resolving, SystemResolver},
    event::{ConnectorAddress, Event, NodeChange, Refusal, Spec},
    limits::{BEAT_MISSED, FORGET_AFTER, NODES_MAX},
    service::{Membership, MembershipOptions, PingOptions},
    state::Members,
};
