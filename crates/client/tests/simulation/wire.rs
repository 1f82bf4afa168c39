//! A connection: two streams of bytes, which arrive late, in pieces, and not at all behind a cut.

use std::collections::VecDeque;

use kvlane_proto::{FrameReader, Message, encode_frame};

use crate::dice::Dice;

/// What is under way in one direction.
enum Piece {
    Bytes(Vec<u8>),
    End,
}

/// One direction of a connection.
#[derive(Default)]
pub(crate) struct Pipe {
    /// With the time at which each arrives. They keep their order.
    flight: VecDeque<(u64, Piece)>,
    last_at: u64,
    reader: FrameReader,
    /// Nothing more is taken.
    ended: bool,
}

/// What has arrived.
pub(crate) enum Arrived<M> {
    Message(M),
    /// The stream is over, or makes no sense any more.
    End,
    Nothing,
}

impl Pipe {
    /// Sends a message that takes so long; the time at which it will be there. None if this direction has ended.
    pub(crate) fn send(&mut self, message: &impl Message, at: u64, dice: &mut Dice) -> Option<u64> {
        if self.ended {
            return None;
        }
        let mut bytes = encode_frame(message);
        if dice.one_in(8) {
            let rest = bytes.split_off(dice.below(bytes.len() as u64) as usize);
            self.push(at, Piece::Bytes(bytes));
            bytes = rest;
        }
        Some(self.push(at + dice.below(200), Piece::Bytes(bytes)))
    }

    /// A length that no frame has.
    pub(crate) fn send_nonsense(&mut self, at: u64) -> u64 {
        self.push(at, Piece::Bytes((1u32 << 31).to_le_bytes().to_vec()))
    }

    /// Whoever writes has closed it: what was written still arrives.
    pub(crate) fn end(&mut self, at: u64) -> u64 {
        let at = if self.ended { self.last_at } else { self.push(at, Piece::End) };
        self.ended = true;
        at
    }

    /// What is under way is lost from any byte on.
    pub(crate) fn cut(&mut self, at: u64, dice: &mut Dice) -> u64 {
        let keep = dice.below(self.flight.len() as u64 + 1) as usize;
        self.flight.truncate(keep + 1);
        if self.flight.len() > keep
            && let Some((_, Piece::Bytes(bytes))) = self.flight.back_mut()
        {
            bytes.truncate(dice.below(bytes.len() as u64 + 1) as usize);
        }
        self.flight.retain(|(_, piece)| matches!(piece, Piece::Bytes(_)));
        self.ended = false;
        self.end(at)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }

    fn push(&mut self, at: u64, piece: Piece) -> u64 {
        self.last_at = self.last_at.max(at);
        self.flight.push_back((self.last_at, piece));
        self.last_at
    }

    /// The next message that is there by now.
    pub(crate) fn receive<M: Message + Default>(&mut self, now: u64) -> Arrived<M> {
        loop {
            match self.reader.next_message() {
                Ok(Some(message)) => return Arrived::Message(message),
                Ok(None) => {}
                Err(_) => return Arrived::End,
            }
            if self.flight.front().is_none_or(|(at, _)| *at > now) {
                return Arrived::Nothing;
            }
            match self.flight.pop_front() {
                Some((_, Piece::Bytes(bytes))) => self.reader.push(&bytes),
                _ => return Arrived::End,
            }
        }
    }
}

/// Both directions.
#[derive(Default)]
pub(crate) struct Wire {
    pub(crate) to_daemon: Pipe,
    pub(crate) to_engine: Pipe,
}
