//! What is said over a control connection.

use std::sync::Arc;

use crate::lease;
use crate::tcp::{Head, Out};
use crate::wire::{Outcome, WordsKind};

/// One thing. `B`: how a message's bytes are held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<B> {
    /// An immediate.
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
    /// What became of immediates and messages.
    Outcomes(Vec<Outcome>),
    NoRoom {
        token: u64,
    },
    /// What a carrier says to its like.
    Words {
        code: u8,
        kind: WordsKind,
        bytes: Vec<u8>,
    },
    /// Nothing more is to be placed of this broken connection.
    Fence {
        code: u8,
        connection: u64,
    },
    Fenced {
        code: u8,
        connection: u64,
        is_over: bool,
    },
    /// Encoded news of regions.
    Regions(Vec<u8>),
}

impl Frame<Arc<[u8]>> {
    /// As it is written to a connection: head, entries, and the bytes that follow, if there are some.
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
