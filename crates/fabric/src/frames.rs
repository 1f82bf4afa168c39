//! What is said over a control connection.

use std::sync::Arc;

use crate::lease;
use crate::tcp::{Head, Out, Outcome, WordsKind};

/// One thing. `B`: how a message's bytes are held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<B> {
    /// An immediate.
    Tell {
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
    /// As it is written to a connection.
    pub(crate) fn write(self) -> Vec<Out> {
        let whole = |head: Head| vec![Out::Bytes(head.encode().to_vec(), 0)];
        let with = |head: Head, bytes: Vec<u8>| vec![Out::Bytes([&head.encode()[..], &bytes].concat(), 0)];
        match self {
            Frame::Tell { token, number, counter, generation } => {
                whole(Head::Tell { token, number, counter, generation })
            }
            Frame::Message { token, number, bytes } => {
                let mut out = whole(Head::Message { token, number, bytes: bytes.len() as u64 });
                if !bytes.is_empty() {
                    out.push(Out::Shared(bytes, 0));
                }
                out
            }
            Frame::Outcomes(outcomes) => {
                let mut bytes = Vec::new();
                outcomes.iter().for_each(|outcome| outcome.encode(&mut bytes));
                with(Head::Ack { outcomes: outcomes.len(), stamp: lease::stamp() }, bytes)
            }
            Frame::NoRoom { token } => whole(Head::NoRoom { token }),
            Frame::Words { code, kind, bytes } => {
                with(Head::Words { code, kind, bytes: bytes.len() as u64 }, bytes)
            }
            Frame::Fence { code, connection } => whole(Head::Fence { code, connection }),
            Frame::Fenced { code, connection, is_over } => whole(Head::Fenced { code, connection, is_over }),
            Frame::Regions(bytes) => with(Head::Regions { bytes: bytes.len() as u64 }, bytes),
        }
    }
}
