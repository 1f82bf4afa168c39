//! Control connections: what two processes say to each other beside bytes.
//!
//! [`crate::hub::Hub`] says frames and hears frames; [`Control`] carries them. [`sockets::ControlSockets`] does so over TCP or
//! TLS, and between processes of one host through rings; the simulation has another one.

pub(crate) mod greeting;
pub(crate) mod sockets;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::fences::{Broken, Question, Whom};
use crate::frames::Frame;
use crate::greeted::Greeted;
use crate::identity::Identity;
use crate::lease::Lease;
use crate::served::Served;
use crate::transfers::PathId;

/// A number of a control connection of either side, not used twice.
pub(crate) type ChannelId = u64;

/// Carries frames to peers, in order, until a connection breaks.
pub(crate) trait Control: fmt::Debug {
    /// Connects a peer. [`ControlEvent::Up`] or [`ControlEvent::Broke`] follows.
    fn connect(&mut self, now: Duration, path: PathId, number: u32, whom: &Whom);

    /// Ends the connection of this number, if that has not happened yet. [`ControlEvent::Broke`] follows.
    fn close(&mut self, now: Duration, path: PathId, number: u32);

    /// Says something over a connection, of whichever side made it. One that is over is passed over.
    fn send(&mut self, channel: ChannelId, frame: Frame<Arc<[u8]>>);

    /// Ends a connection whose other side does not keep to the protocol.
    fn end(&mut self, now: Duration, channel: ChannelId, why: &'static str);

    /// Asks for a fence over a connection of its own. [`ControlEvent::FenceAnswered`] follows.
    fn ask_fence(&mut self, now: Duration, question: Question, whom: &Whom);

    /// Answers [`ControlEvent::FenceAsked`].
    fn answer_fence(&mut self, now: Duration, channel: ChannelId, is_over: bool);

    /// A path's peer is removed: nothing more is asked of it.
    fn forget(&mut self, path: PathId);

    /// What happened next, in the order in which it did.
    fn next_event(&mut self) -> Option<ControlEvent>;
}

/// What a [`Control`] tells.
#[derive(Debug)]
pub(crate) enum ControlEvent {
    /// A connection of ours is there.
    Up {
        path: PathId,
        number: u32,
        channel: ChannelId,
        from: Identity,
    },
    /// It broke, or could not be made.
    Broke {
        path: PathId,
        number: u32,
        channel: Option<ChannelId>,
    },
    /// A peer has connected.
    Session {
        channel: ChannelId,
        served: Served,
    },
    /// And is gone.
    SessionEnded {
        channel: ChannelId,
    },
    /// Something was said. Of a session: while `lease` holds, what is said to be placed may be.
    Heard {
        channel: ChannelId,
        frame: Frame<Vec<u8>>,
        lease: Option<Lease>,
    },
    /// A peer has made a connection for bytes of a carrier.
    Greeted {
        code: u8,
        greeted: Greeted,
    },
    /// Over a connection of its own.
    FenceAsked {
        channel: ChannelId,
        from: Identity,
        broken: Broken,
    },
    FenceAnswered {
        broken: Broken,
        is_over: bool,
    },
}
