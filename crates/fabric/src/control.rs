//! Control connections: everything between two processes except bytes of transfers.
//!
//! [`crate::hub::Hub`] sends and receives frames; a [`Control`] carries them and reports [`ControlEvent`]s.
//! [`sockets::ControlSockets`] does so over TCP or TLS, and through shared-memory rings between processes of one host. The
//! simulation has a [`Control`] of its own.

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

/// Names a control connection of either side. Never reused.
pub(crate) type ChannelId = u64;

/// Carries frames to peers, in order, until a connection breaks.
pub(crate) trait Control: fmt::Debug {
    /// Connects to a peer. [`ControlEvent::Up`] or [`ControlEvent::Broke`] follows.
    fn connect(&mut self, now: Duration, path: PathId, number: u32, whom: &Whom);

    /// Ends this connection of a path, if it has not ended yet. [`ControlEvent::Broke`] follows.
    fn close(&mut self, now: Duration, path: PathId, number: u32);

    /// Sends a frame over a connection of either side. If that has ended, the frame is dropped.
    fn send(&mut self, channel: ChannelId, frame: Frame<Arc<[u8]>>);

    /// Ends a connection whose peer violates the protocol.
    fn end(&mut self, now: Duration, channel: ChannelId, why: &'static str);

    /// Asks a peer for a fence, over a connection made for it. [`ControlEvent::FenceAnswered`] follows.
    fn ask_fence(&mut self, now: Duration, question: Question, whom: &Whom);

    /// Answers [`ControlEvent::FenceAsked`].
    fn answer_fence(&mut self, now: Duration, channel: ChannelId, is_over: bool);

    /// Forgets a path, because its peer is removed.
    fn forget(&mut self, path: PathId);

    /// The next event, in the order in which they happened.
    fn next_event(&mut self) -> Option<ControlEvent>;
}

/// Reported by a [`Control`] to its hub.
#[derive(Debug)]
pub(crate) enum ControlEvent {
    /// A connection of this process is up.
    Up {
        path: PathId,
        number: u32,
        channel: ChannelId,
        from: Identity,
    },
    /// A connection of this process broke, or could not be made.
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
    /// The peer's connection has ended.
    SessionEnded {
        channel: ChannelId,
    },
    /// A frame arrived. `lease`: of a session; bytes in the frame may be placed only while it holds.
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
    /// A peer asks for a fence, over a connection made for it.
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
