//! [`Frame`]: the frames of a control connection, as the hub handles them.

use std::sync::Arc;

use crate::lease;
use crate::tcp::{Head, Out};
use crate::wire::{Outcome, WordsKind};

/// `B` holds a message's bytes: `Arc<[u8]>` in frames to send, `Vec<u8>` in frames that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<B> {
    /// Counts at a counter of the listening side.
    Immediate {
        token: u64,
        number: u64,
        counter: u32,
        generation: u32,
    },
    Message {
        token: u64,
        number: u64,
        bytes: B,
    },
    /// The outcomes of immediates and messages.
    Outcomes(Vec<Outcome>),
    /// The inbox has no room for a message now.
    NoRoom {
        token: u64,
    },
    /// A carrier's words for the carrier with the same code at the other end.
    Words {
        code: u8,
        kind: WordsKind,
        bytes: Vec<u8>,
    },
    /// Asks the listening side to place nothing more of this broken connection.
    Fence {
        code: u8,
        connection: u64,
    },
    /// Answers a fence. `is_over`: nothing more is placed. Else some bytes may still be, and the fence is to be asked again.
    Fenced {
        code: u8,
        connection: u64,
        is_over: bool,
    },
    /// Announcements of regions and windows, encoded. Empty: the first list is complete.
    Regions(Vec<u8>),
}

impl Frame<Arc<[u8]>> {
    /// The parts that go over the wire: the head, the entries, and the body if there is one.
    pub(crate) fn write(self) -> (Head, Vec<u8>, Option<Out>) {
        let whole = |head: Head| (head, Vec::new(), None);
        let with = |head: Head, bytes: Arc<[u8]>| {
            let body = (!bytes.is_empty()).then_some(Out::Shared(bytes, 0));
            (head, Vec::new(), body)
        };
        match self {
            Frame::Immediate { token, number, counter, generation } => {
                whole(Head::Immediate { token, number, counter, generation })
            }
            Frame::Message { token, number, bytes } => {
                with(Head::Message { token, number, bytes: bytes.len() as u64 }, bytes)
            }
            Frame::Outcomes(outcomes) => {
                let mut bytes = Vec::new();
                outcomes.iter().for_each(|outcome| outcome.encode(&mut bytes));
                (Head::Ack { outcomes: outcomes.len(), stamp: lease::stamp() }, bytes, None)
            }
            Frame::NoRoom { token } => whole(Head::NoRoom { token }),
            Frame::Words { code, kind, bytes } => {
                with(Head::Words { code, kind, bytes: bytes.len() as u64 }, bytes.into())
            }
            Frame::Fence { code, connection } => whole(Head::Fence { code, connection }),
            Frame::Fenced { code, connection, is_over } => whole(Head::Fenced { code, connection, is_over }),
            Frame::Regions(bytes) => with(Head::Regions { bytes: bytes.len() as u64 }, bytes.into()),
        }
    }
}
