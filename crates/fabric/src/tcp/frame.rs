//! The wire format of a connection over TCP: after the greeting, frames of one head each.
//!
//! The side that connected sends requests, and the listening side serves them. A process has one control connection to
//! each peer; every other connection carries bytes for a carrier over sockets. Each begins with the greeting
//! ([`super::greeting`]):
//!
//! ```text
//!  connecting side                              listening side
//!      |  <--- Challenge: KVFT, version, nonce -----  |
//!      |  --- Proof: nonce, proof ----------------->  |
//!      |  <--- Verdict: proof, or a refusal --------  |
//!      |  --- Hello: itself, the wanted one ------->  |
//!      |  <--- Welcome: its identity --------------  |
//! ```
//! Then frames follow. The head has 32 bytes, little-endian:
//!
//! ```text
//!  0      1      2        4          8            16           24           32
//!  +------+------+--------+----------+------------+------------+------------+---------------+-----------+-------------+
//!  | kind | 0    | count  | sum      | token      | bytes      | more       | count entries | the bytes | their sum 4 |
//!  +------+------+--------+----------+------------+------------+------------+---------------+-----------+-------------+
//!  sum:       crc32c of the head, with 0 in its place, and of the entries
//!  their sum: crc32c of the bytes, if there are any and the greeting said that both sides want it
//!
//!  on either kind of connection
//!  Ack        count outcomes; more: a stamp
//!  Ping       more: the latest stamp                                                   -> Pong
//!  Pong       more: a stamp
//!  on a carrier's connection
//!  Write      count runs; the bytes follow and go into the runs in order;              -> Ack
//!             more: the latest stamp
//!  Read       count runs; bytes: of all of them           -> Data, in one or several frames, or Ack (refused, failed)
//!  Data       the next bytes of the answer to the Read of that token follow
//!  on a control connection
//!  Immediate  bytes: its number; more: counter, generation << 32                       -> Ack
//!  Message    the message follows; more: its number, counted with the immediates       -> Ack, or NoRoom
//!  NoRoom     the inbox is full: send the Message of that token again later
//!  Words      a carrier's words follow, for the same carrier of the peer; token: the carrier's code;
//!             more: 0 an offer, 1 accepted, 2 refused, 3 anything else
//!  Fence      token: a broken connection of the connecting side; more: its carrier's code   -> Fenced
//!  Fenced     token, more: as asked; bytes: 1 nothing of it is placed any more, 0 something may be: ask again
//!  Regions    what the listening side has registered or unregistered follows ([`super::regions`]);
//!             without any bytes: that was all that it had when the connection came up
//! ```
//! [`crate::wire`] draws the entries: runs and outcomes.
//!
//! A stamp is the listening side's clock. The connecting side echoes the latest one, or 0 before the first
//! ([`crate::lease`]).

use super::sum::Sum;
use crate::wire::{BadFrame, OUTCOME_BYTES, RUN_BYTES, WordsKind, word};

/// Bytes of a head.
pub(crate) const HEAD_BYTES: usize = 32;
/// The head's checksum.
const SUM_AT: std::ops::Range<usize> = 4..8;
/// Most entries of one frame.
pub(crate) const ENTRIES_MAX: usize = 512;
/// Most bytes that one frame moves; a longer transfer takes several.
pub(crate) const BYTES_MAX: u64 = 64 << 20;
/// Most bytes of one message between engines.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Most bytes of a carrier's words in one frame, and of one frame of regions.
pub(crate) const WORDS_BYTES_MAX: usize = 64 << 10;

/// One frame's head, parsed. Every number of it is within the limits above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    Write { token: u64, runs: usize, bytes: u64, stamp: u64 },
    Read { token: u64, runs: usize, bytes: u64 },
    Immediate { token: u64, number: u64, counter: u32, generation: u32 },
    Data { token: u64, bytes: u64 },
    Ack { outcomes: usize, stamp: u64 },
    Ping { stamp: u64 },
    Pong { stamp: u64 },
    Message { token: u64, number: u64, bytes: u64 },
    NoRoom { token: u64 },
    Words { code: u8, kind: WordsKind, bytes: u64 },
    Fence { connection: u64, code: u8 },
    Fenced { connection: u64, code: u8, is_over: bool },
    Regions { bytes: u64 },
}

impl Head {
    /// The head with its checksum, and the entries behind it.
    pub(crate) fn frame(&self, entries: &[u8]) -> Vec<u8> {
        debug_assert_eq!(entries.len(), self.entry_bytes());
        let mut frame = [&self.encode()[..], entries].concat();
        let sum = sum_of(&frame);
        frame[SUM_AT].copy_from_slice(&sum);
        frame
    }

    /// The head with 0 as its checksum.
    pub(crate) fn encode(&self) -> [u8; HEAD_BYTES] {
        let (kind, count, token, bytes, more) = match *self {
            Head::Write { token, runs, bytes, stamp } => (1, runs, token, bytes, stamp),
            Head::Read { token, runs, bytes } => (2, runs, token, bytes, 0),
            Head::Immediate { token, number, counter, generation } => {
                (3, 0, token, number, u64::from(counter) | u64::from(generation) << 32)
            }
            Head::Data { token, bytes } => (4, 0, token, bytes, 0),
            Head::Ack { outcomes, stamp } => (5, outcomes, 0, 0, stamp),
            Head::Ping { stamp } => (6, 0, 0, 0, stamp),
            Head::Pong { stamp } => (7, 0, 0, 0, stamp),
            Head::Message { token, number, bytes } => (9, 0, token, bytes, number),
            Head::NoRoom { token } => (10, 0, token, 0, 0),
            Head::Words { code, kind, bytes } => (11, 0, code.into(), bytes, kind as u64),
            Head::Fence { connection, code } => (12, 0, connection, 0, code.into()),
            Head::Fenced { connection, code, is_over } => (13, 0, connection, is_over.into(), code.into()),
            Head::Regions { bytes } => (14, 0, 0, bytes, 0),
        };
        debug_assert!(count <= ENTRIES_MAX);
        let mut head = [0; HEAD_BYTES];
        head[0] = kind;
        head[2..4].copy_from_slice(&(count as u16).to_le_bytes());
        head[8..16].copy_from_slice(&token.to_le_bytes());
        head[16..24].copy_from_slice(&bytes.to_le_bytes());
        head[24..].copy_from_slice(&more.to_le_bytes());
        head
    }

    pub(crate) fn decode(head: &[u8; HEAD_BYTES]) -> Result<Head, BadFrame> {
        let count = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let [token, bytes, more] = [word(head, 8), word(head, 16), word(head, 24)];
        if count > ENTRIES_MAX {
            return Err(BadFrame("a frame with too many entries"));
        }
        let moved = |head: Head| match bytes {
            1..=BYTES_MAX => Ok(head),
            _ => Err(BadFrame("a frame of no or too many bytes")),
        };
        match (head[0], count) {
            (1, 1..) => moved(Head::Write { token, runs: count, bytes, stamp: more }),
            (2, 1..) => moved(Head::Read { token, runs: count, bytes }),
            (3, 0) => Ok(Head::Immediate {
                token,
                number: bytes,
                counter: more as u32,
                generation: (more >> 32) as u32,
            }),
            (4, 0) => moved(Head::Data { token, bytes }),
            (5, 1..) => Ok(Head::Ack { outcomes: count, stamp: more }),
            (6, 0) => Ok(Head::Ping { stamp: more }),
            (7, 0) => Ok(Head::Pong { stamp: more }),
            (9, 0) if bytes > MESSAGE_BYTES_MAX as u64 => Err(BadFrame("a message that is too long")),
            (9, 0) => Ok(Head::Message { token, number: more, bytes }),
            (10, 0) => Ok(Head::NoRoom { token }),
            (11 | 14, 0) if bytes > WORDS_BYTES_MAX as u64 => Err(BadFrame("words that are too long")),
            (11, 0) => {
                let kind = match more {
                    0 => WordsKind::Offer,
                    1 => WordsKind::Accepted,
                    2 => WordsKind::Refused,
                    3 => WordsKind::Other,
                    _ => return Err(BadFrame("words of no known kind")),
                };
                Ok(Head::Words { code: code(token)?, kind, bytes })
            }
            (12, 0) => Ok(Head::Fence { connection: token, code: code(more)? }),
            (13, 0) if bytes > 1 => Err(BadFrame("a fence that is neither over nor not")),
            (13, 0) => Ok(Head::Fenced { connection: token, code: code(more)?, is_over: bytes == 1 }),
            (14, 0) => Ok(Head::Regions { bytes }),
            _ => Err(BadFrame("a frame of no known kind")),
        }
    }

    /// Bytes of the entries behind the head.
    pub(crate) fn entry_bytes(&self) -> usize {
        match self {
            Head::Write { runs, .. } | Head::Read { runs, .. } => runs * RUN_BYTES,
            Head::Ack { outcomes, .. } => outcomes * OUTCOME_BYTES,
            _ => 0,
        }
    }
}

impl Head {
    /// Bytes of the body behind the entries; may be 0. None: a frame of this kind has no body.
    pub(crate) fn body_bytes(&self) -> Option<u64> {
        match *self {
            Head::Write { bytes, .. }
            | Head::Data { bytes, .. }
            | Head::Message { bytes, .. }
            | Head::Words { bytes, .. }
            | Head::Regions { bytes } => Some(bytes),
            _ => None,
        }
    }
}

impl Head {
    /// Bytes of a body that belongs to the frame itself, as on control connections; may be 0. None: no body, or its
    /// bytes go into registered memory.
    pub(crate) fn own_bytes(&self) -> Option<u64> {
        match self {
            Head::Message { .. } | Head::Words { .. } | Head::Regions { .. } => self.body_bytes(),
            _ => None,
        }
    }
}

/// Whether a head and its entries arrived as they were sent.
pub(crate) fn is_undamaged(frame: &[u8]) -> bool {
    frame.get(SUM_AT).is_some_and(|sum| *sum == sum_of(frame))
}

/// The checksum of a head and its entries.
fn sum_of(frame: &[u8]) -> [u8; 4] {
    let mut sum = Sum::new();
    sum.add(&frame[..SUM_AT.start]);
    sum.add(&[0; 4]);
    sum.add(&frame[SUM_AT.end..]);
    sum.bytes()
}

/// A carrier's code, which has one byte.
fn code(number: u64) -> Result<u8, BadFrame> {
    u8::try_from(number).map_err(|_| BadFrame("a carrier of no known code"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words_kind() -> impl Strategy<Value = WordsKind> {
        prop_oneof![
            Just(WordsKind::Offer),
            Just(WordsKind::Accepted),
            Just(WordsKind::Refused),
            Just(WordsKind::Other)
        ]
    }

    fn head() -> impl Strategy<Value = Head> {
        let (token, count, bytes) = (any::<u64>(), 1..=ENTRIES_MAX, 1..=BYTES_MAX);
        prop_oneof![
            (token, count.clone(), bytes.clone(), any::<u64>())
                .prop_map(|(token, runs, bytes, stamp)| Head::Write { token, runs, bytes, stamp }),
            (token, count.clone(), bytes.clone()).prop_map(|(token, runs, bytes)| Head::Read {
                token,
                runs,
                bytes
            }),
            (token, any::<u64>(), any::<u32>(), any::<u32>()).prop_map(
                |(token, number, counter, generation)| Head::Immediate { token, number, counter, generation }
            ),
            (token, bytes.clone()).prop_map(|(token, bytes)| Head::Data { token, bytes }),
            (count.clone(), any::<u64>()).prop_map(|(outcomes, stamp)| Head::Ack { outcomes, stamp }),
            any::<u64>().prop_map(|stamp| Head::Ping { stamp }),
            any::<u64>().prop_map(|stamp| Head::Pong { stamp }),
            (token, any::<u64>(), 0..=MESSAGE_BYTES_MAX as u64)
                .prop_map(|(token, number, bytes)| Head::Message { token, number, bytes }),
            token.prop_map(|token| Head::NoRoom { token }),
            (any::<u8>(), words_kind(), 0..=WORDS_BYTES_MAX as u64)
                .prop_map(|(code, kind, bytes)| Head::Words { code, kind, bytes }),
            (token, any::<u8>()).prop_map(|(connection, code)| Head::Fence { connection, code }),
            (token, any::<u8>(), any::<bool>()).prop_map(|(connection, code, is_over)| Head::Fenced {
                connection,
                code,
                is_over
            }),
            (0..=WORDS_BYTES_MAX as u64).prop_map(|bytes| Head::Regions { bytes }),
        ]
    }

    proptest! {
        #[test]
        fn a_head_is_read_as_it_was_written(head in head()) {
            prop_assert_eq!(Head::decode(&head.encode()), Ok(head));
        }

        #[test]
        fn any_bytes_are_a_head_within_the_limits_or_none(bytes in any::<[u8; HEAD_BYTES]>(), kind in 0..16u8) {
            let mut bytes = bytes;
            bytes[0] = kind;
            if let Ok(Head::Message { bytes, .. }) = Head::decode(&bytes) {
                prop_assert!(bytes <= MESSAGE_BYTES_MAX as u64);
            }
            if let Ok(Head::Write { runs, bytes, .. } | Head::Read { runs, bytes, .. }) = Head::decode(&bytes) {
                prop_assert!((1..=ENTRIES_MAX).contains(&runs) && (1..=BYTES_MAX).contains(&bytes));
            }
        }
    }
}
