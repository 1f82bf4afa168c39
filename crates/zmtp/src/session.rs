//! [`Session`]: the state of one connection, without its I/O.
//!
//! ```text
//!  Greeting --the peer's greeting is whole--> Handshake --the peer's READY--> Open: messages, commands
//!     '--> we send ours at once                  '--> we send our READY
//! ```

use bytes::{Buf, Bytes, BytesMut};

use crate::command::{self, Command};
use crate::error::printable;
use crate::frame::{HEAD_BYTES_MAX, Head, head_bytes};
use crate::{GREETING_BYTES, Greeting, Limits, ProtocolError, SocketType};

const IDENTITY_BYTES_MAX: usize = 255;
const SHOWN_NAME_BYTES_MAX: usize = 16;
/// A PING gets no PONG while this many bytes are unsent, because a peer that reads nothing needs none.
const PONG_UNSENT_BYTES_MAX: usize = 1 << 10;

/// An event that the peer's bytes caused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The handshake is complete. Comes once, before all others.
    Ready {
        /// The peer's type, one that ours talks to.
        socket_type: SocketType,
        /// The peer's identity, at most 255 bytes. Empty if it gave none.
        identity: Bytes,
    },
    /// The frames of a whole message.
    Message(Vec<Bytes>),
    /// The peer, of ZMTP 3.1, subscribes to messages that begin with this topic. Peers of 3.0 send the message
    /// `[1, topic...]`.
    Subscribe(Bytes),
    /// The peer, of ZMTP 3.1, cancels its subscription to this topic. Peers of 3.0 send the message `[0, topic...]`.
    Cancel(Bytes),
    /// A sign of life: a PING, whose PONG is ready to be sent, a PONG, or a command that does not concern us.
    Alive,
}

#[derive(Debug)]
enum State {
    /// The peer's greeting is not whole.
    Greeting,
    /// The greeting is whole; the peer's READY is awaited.
    Handshake,
    /// Both sides may send messages.
    Open,
}

/// One side of a connection. It takes received bytes, returns events, and collects the bytes to be sent.
///
/// A session holds at most one unfinished message and one unfinished command, and returns each event before it reads
/// on. After an error the caller has to close the connection.
#[derive(Debug)]
pub struct Session {
    ours: SocketType,
    identity: Bytes,
    limits: Limits,
    state: State,
    /// Received bytes of the peer's greeting, or, after it, of the next frame's head.
    start: Vec<u8>,
    /// Head of the frame whose body is being received.
    head: Option<Head>,
    body: Vec<u8>,
    message: Vec<Bytes>,
    message_bytes: usize,
    peer_minor: u8,
    unsent: BytesMut,
}

impl Session {
    /// A session for a new connection. A ROUTER at the other end addresses us by `identity`; if that is empty, it
    /// generates one.
    ///
    /// # Errors
    /// [`ProtocolError::Identity`] if the identity has more than 255 bytes or begins with a zero.
    pub fn new(ours: SocketType, identity: Bytes, limits: Limits) -> Result<Self, ProtocolError> {
        check_identity(&identity)?;
        Ok(Self {
            ours,
            identity,
            limits,
            state: State::Greeting,
            start: Vec::with_capacity(GREETING_BYTES),
            head: None,
            body: Vec::new(),
            message: Vec::new(),
            message_bytes: 0,
            peer_minor: 0,
            unsent: BytesMut::from(&Greeting::OURS.encode()[..]),
        })
    }

    /// Takes bytes from the front of `received` until an event is complete. Returns `None` once all bytes are taken.
    /// Call it until then, and send [`Session::unsent`] before reading on.
    ///
    /// # Errors
    /// [`ProtocolError`], after which the connection must be closed.
    pub fn receive(&mut self, received: &mut &[u8]) -> Result<Option<Event>, ProtocolError> {
        loop {
            if matches!(self.state, State::Greeting) {
                if !self.take_greeting(received)? {
                    return Ok(None);
                }
                continue;
            }
            let Some(head) = self.take_head(received)? else { return Ok(None) };
            if !self.take_body(head.length as usize, received) {
                return Ok(None);
            }
            self.head = None;
            let body = Bytes::from(std::mem::take(&mut self.body));
            if head.command {
                return self.command(Command::decode(body)?).map(Some);
            }
            self.message_bytes += body.len();
            self.message.push(body);
            if !head.more {
                self.message_bytes = 0;
                return Ok(Some(Event::Message(std::mem::take(&mut self.message))));
            }
        }
    }

    /// Takes bytes of the greeting; returns whether it is whole.
    fn take_greeting(&mut self, received: &mut &[u8]) -> Result<bool, ProtocolError> {
        move_bytes(GREETING_BYTES, received, &mut self.start);
        let Some(greeting) = Greeting::decode(&self.start)? else { return Ok(false) };
        self.start.clear();
        self.peer_minor = greeting.minor;
        self.state = State::Handshake;
        command::encode_ready(self.ours.name(), &self.identity, &mut self.unsent);
        Ok(true)
    }

    fn take_head(&mut self, received: &mut &[u8]) -> Result<Option<Head>, ProtocolError> {
        if let Some(head) = self.head {
            return Ok(Some(head));
        }
        move_bytes(1, received, &mut self.start);
        let Some(&flags) = self.start.first() else { return Ok(None) };
        move_bytes(head_bytes(flags)?.min(HEAD_BYTES_MAX), received, &mut self.start);
        let Some(head) = Head::decode(&self.start)? else { return Ok(None) };
        self.check(head)?;
        self.start.clear();
        self.head = Some(head);
        Ok(Some(head))
    }

    /// Checks a frame against the limits by its announced length, before any memory is taken.
    fn check(&self, head: Head) -> Result<(), ProtocolError> {
        let Head { length: announced, command, .. } = head;
        let limits = &self.limits;
        if command {
            let most = limits.command_bytes;
            return if announced > most as u64 {
                Err(ProtocolError::CommandTooLong { announced, most })
            } else {
                Ok(())
            };
        }
        if !matches!(self.state, State::Open) {
            return Err(ProtocolError::OutOfTurn { what: "a message" });
        }
        if announced > limits.frame_bytes as u64 {
            return Err(ProtocolError::FrameTooLong { announced, most: limits.frame_bytes });
        }
        let together = announced.saturating_add(self.message_bytes as u64);
        if together > limits.message_bytes as u64 {
            return Err(ProtocolError::MessageTooLong { announced: together, most: limits.message_bytes });
        }
        let frames = self.message.len() + 1 + usize::from(head.more);
        if frames > limits.message_frames {
            return Err(ProtocolError::TooManyFrames { frames, most: limits.message_frames });
        }
        Ok(())
    }

    /// Takes bytes of the body; returns whether it is whole. The buffer doubles as bytes are received, up to the
    /// announced length.
    fn take_body(&mut self, length: usize, received: &mut &[u8]) -> bool {
        let wanted = length.min(self.body.len().saturating_add(received.len()));
        if wanted > self.body.capacity() {
            let room = self.body.capacity().saturating_mul(2).clamp(wanted, length);
            self.body.reserve_exact(room - self.body.len());
        }
        move_bytes(length, received, &mut self.body);
        self.body.len() == length
    }

    fn command(&mut self, command: Command) -> Result<Event, ProtocolError> {
        match (&self.state, command) {
            (_, Command::Error(reason)) => Err(ProtocolError::Peer { reason }),
            (State::Open, Command::Ready { .. }) => Err(ProtocolError::OutOfTurn { what: "a second READY" }),
            (_, Command::Ready { socket_type, identity }) => {
                let peer_type = SocketType::of_name(&socket_type).filter(|&peer| self.ours.talks_to(peer));
                let Some(peer) = peer_type else {
                    let shown = &socket_type[..socket_type.len().min(SHOWN_NAME_BYTES_MAX)];
                    let ours = self.ours.name();
                    return Err(ProtocolError::SocketType { peer: printable(shown), ours });
                };
                check_identity(&identity)?;
                self.state = State::Open;
                Ok(Event::Ready { socket_type: peer, identity })
            }
            (State::Open, Command::Subscribe(topic)) => Ok(Event::Subscribe(topic)),
            (State::Open, Command::Cancel(topic)) => Ok(Event::Cancel(topic)),
            (State::Open, Command::Ping(context)) => {
                if self.unsent().len() < PONG_UNSENT_BYTES_MAX {
                    command::encode("PONG", &context, &mut self.unsent);
                }
                Ok(Event::Alive)
            }
            (State::Open, Command::Other) => Ok(Event::Alive),
            _ => Err(ProtocolError::OutOfTurn { what: "a command other than READY" }),
        }
    }

    /// Appends a message to the unsent bytes, which the caller has to bound.
    ///
    /// # Errors
    /// [`ProtocolError::OutOfTurn`] before [`Event::Ready`].
    pub fn send<Frame: AsRef<[u8]>>(&mut self, frames: &[Frame]) -> Result<(), ProtocolError> {
        self.check_open()?;
        for (index, frame) in frames.iter().enumerate() {
            let frame = frame.as_ref();
            let more = index + 1 < frames.len();
            Head { more, command: false, length: frame.len() as u64 }.encode(&mut self.unsent);
            self.unsent.extend_from_slice(frame);
        }
        Ok(())
    }

    /// Subscribes to all messages whose first frame begins with `topic`: by a command, or by a message if the peer
    /// speaks 3.0.
    ///
    /// # Errors
    /// [`ProtocolError::OutOfTurn`] before [`Event::Ready`].
    pub fn subscribe(&mut self, topic: &[u8]) -> Result<(), ProtocolError> {
        self.send_topic(1, "SUBSCRIBE", topic)
    }

    /// Cancels a subscription.
    ///
    /// # Errors
    /// [`ProtocolError::OutOfTurn`] before [`Event::Ready`].
    pub fn cancel(&mut self, topic: &[u8]) -> Result<(), ProtocolError> {
        self.send_topic(0, "CANCEL", topic)
    }

    fn send_topic(&mut self, mark: u8, name: &str, topic: &[u8]) -> Result<(), ProtocolError> {
        if self.peer_minor == 0 {
            return self.send(&[[&[mark], topic].concat()]);
        }
        self.check_open()?;
        command::encode(name, topic, &mut self.unsent);
        Ok(())
    }

    fn check_open(&self) -> Result<(), ProtocolError> {
        match self.state {
            State::Open => Ok(()),
            _ => Err(ProtocolError::OutOfTurn { what: "a message of our own" }),
        }
    }

    /// Bytes to be sent, in order.
    pub fn unsent(&self) -> &[u8] {
        &self.unsent
    }

    /// Removes the first `bytes` of [`Session::unsent`], which were sent.
    ///
    /// # Panics
    /// If fewer bytes were unsent, which is a bug of the caller.
    pub fn mark_sent(&mut self, bytes: usize) {
        self.unsent.advance(bytes);
    }

    /// Bytes of the peer that the session holds, spare capacity included: at most [`Limits::most_buffered`].
    pub fn buffered(&self) -> usize {
        self.message_bytes + self.body.capacity()
    }
}

/// Moves bytes from one end to the other until `into` has `length`.
fn move_bytes(length: usize, from: &mut &[u8], into: &mut Vec<u8>) {
    let taken = length.saturating_sub(into.len()).min(from.len());
    let (front, rest) = from.split_at(taken);
    into.extend_from_slice(front);
    *from = rest;
}

fn check_identity(identity: &[u8]) -> Result<(), ProtocolError> {
    if identity.len() > IDENTITY_BYTES_MAX || identity.first() == Some(&0) {
        return Err(ProtocolError::Identity { bytes: identity.len() });
    }
    Ok(())
}
