//! Which nodes there are: what flags and files name, what DNS, beats and operators add, and when one is gone.
//!
//! ```text
//!   flags, --config ---.
//!   DNS answers -------+
//!   beats, pings ------+--> Members: (event, time) -> changes --> scheduler: nodes join, go, change their state
//!   control socket ----+       ^   pure
//!   probes ------------'       '-- the clock, each second
//! ```
//! [`Members`] decides and does no I/O; [`Membership`] carries its changes out, and runs what tells it of events.

mod allow;
mod beats;
mod configured;
mod control;
mod dns;
mod event;
mod inner;
mod limits;
mod member;
mod probes;
mod serve_control;
mod service;
mod state;
mod whose;
pub use self::{
    allow::{AllowList, AllowListError, Block},
    beats::{BeatError, BeatTo, beat},
    configured::Reconfigured,
    control::{ANSWER_BYTES_MAX, Answer, AskError, CALL_BYTES_MAX, Call, CallError, Listed, ask, read_call},
    dns::{DnsName, Resolve, Resolving, SystemResolver},
    event::{Change, ConnectorAddress, Event, Refusal, Spec},
    limits::{BEAT_MISSED, FORGOTTEN, NODES_MAX},
    service::{Membership, MembershipOptions, PingOptions},
    state::Members,
};
