//! The words of the two sides, as bytes. [`super`] draws them.

#![allow(unsafe_code, reason = "registered memory is read")]

use crate::carrier::{BadWords, PostedRun, WORDS_BYTES_MAX};
use crate::wire::{OUTCOME_BYTES, Outcome, RUN_BYTES, WireRun};

const HEAD_BYTES: usize = 8;
const MOVE_BYTES: usize = HEAD_BYTES + 16;
const ADDRESS_BYTES: usize = 8;
const PULL: u8 = 1;
const INLINE: u8 = 2;
const DONE: u8 = 3;
const CUT: BadWords = BadWords("words that are cut off");

/// How another process finds this process's card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Invitation {
    pub(super) card: u64,
    pub(super) pid: u32,
}

/// The offer, and the answer that accepts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) connection: u64,
    pub(super) at: Invitation,
}

/// Everything that is sent once the path is up.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Words<'a> {
    /// One address for each run, in the memory of the side that asks.
    Pull {
        token: u64,
        runs: Vec<WireRun>,
        addresses: Vec<u64>,
    },
    Inline {
        token: u64,
        runs: Vec<WireRun>,
        bytes: &'a [u8],
    },
    Done(Vec<Outcome>),
}

impl Invitation {
    pub(super) fn encode(self) -> Vec<u8> {
        [&self.card.to_le_bytes()[..], &self.pid.to_le_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Invitation, BadWords> {
        let (card, pid) = bytes.split_first_chunk().ok_or(CUT)?;
        let pid = pid.try_into().map_err(|_| CUT)?;
        Ok(Invitation { card: u64::from_le_bytes(*card), pid: u32::from_le_bytes(pid) })
    }
}

impl Offer {
    pub(super) fn encode(self) -> Vec<u8> {
        [&self.connection.to_le_bytes()[..], &self.at.encode()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Offer, BadWords> {
        let (connection, at) = bytes.split_first_chunk().ok_or(CUT)?;
        Ok(Offer { connection: u64::from_le_bytes(*connection), at: Invitation::decode(at)? })
    }
}

impl<'a> Words<'a> {
    /// Asks the peer to read these runs from this process's memory.
    pub(super) fn pull(
        token: u64,
        bytes: u64,
        runs: impl ExactSizeIterator<Item = WireRun>,
        posted: &[PostedRun],
    ) -> Vec<u8> {
        let room = MOVE_BYTES + runs.len() * (RUN_BYTES + ADDRESS_BYTES);
        let mut words = begin_move(PULL, token, bytes, runs, room);
        posted.iter().for_each(|run| words.extend((run.local.piece.address as u64).to_le_bytes()));
        words
    }

    /// Asks the peer to place these few bytes, which travel with the request.
    ///
    /// # Safety
    /// The runs are valid for reads in this process's memory.
    pub(super) unsafe fn inline(
        token: u64,
        runs: impl ExactSizeIterator<Item = WireRun>,
        posted: &[PostedRun],
    ) -> Vec<u8> {
        let bytes: usize = posted.iter().map(|run| run.local.piece.len).sum();
        let room = MOVE_BYTES + runs.len() * RUN_BYTES + bytes;
        debug_assert!(room <= WORDS_BYTES_MAX);
        let mut words = begin_move(INLINE, token, bytes as u64, runs, room);
        crate::audit::copies_few(bytes);
        for run in posted {
            let (from, len, at) = (run.local.piece.pointer(), run.local.piece.len, words.len());
            words.resize(at + len, 0);
            // SAFETY: valid by the caller's promise, and the words are our own. A thread that writes the memory
            // meanwhile only mixes the bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, words[at..].as_mut_ptr(), len) };
        }
        words
    }

    pub(super) fn done(outcomes: &[Outcome]) -> Vec<u8> {
        let mut words = vec![DONE, 0, 0, 0];
        words.extend((outcomes.len() as u32).to_le_bytes());
        outcomes.iter().for_each(|outcome| outcome.encode(&mut words));
        words
    }

    /// The sender has proved the secret, but may still send any bytes.
    pub(super) fn decode(words: &'a [u8]) -> Result<Words<'a>, BadWords> {
        let (head, rest) = words.split_first_chunk::<HEAD_BYTES>().ok_or(CUT)?;
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if head[0] == DONE {
            let (outcomes, []) = rest.split_at_checked(count.saturating_mul(OUTCOME_BYTES)).ok_or(CUT)?
            else {
                return Err(BadWords("outcomes and more"));
            };
            return Ok(Words::Done(Outcome::decode_all(outcomes).collect()));
        }
        let (numbers, rest) = rest.split_first_chunk::<16>().ok_or(CUT)?;
        let (token, bytes) = (crate::wire::word(numbers, 0), crate::wire::word(numbers, 8));
        let (runs, rest) = rest.split_at_checked(count.saturating_mul(RUN_BYTES)).ok_or(CUT)?;
        let runs = WireRun::decode_all(runs, bytes).map_err(|bad| BadWords(bad.0))?;
        match head[0] {
            PULL if rest.len() == count * ADDRESS_BYTES => {
                let addresses = rest.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
                Ok(Words::Pull { token, runs, addresses })
            }
            INLINE if rest.len() as u64 == bytes => Ok(Words::Inline { token, runs, bytes: rest }),
            PULL | INLINE => Err(BadWords("a write of other bytes")),
            _ => Err(BadWords("words of no known kind")),
        }
    }
}

fn begin_move(
    kind: u8,
    token: u64,
    bytes: u64,
    runs: impl ExactSizeIterator<Item = WireRun>,
    room: usize,
) -> Vec<u8> {
    let mut words = Vec::with_capacity(room);
    words.extend([kind, 0, 0, 0]);
    words.extend((runs.len() as u32).to_le_bytes());
    words.extend(token.to_le_bytes());
    words.extend(bytes.to_le_bytes());
    runs.for_each(|run| run.encode(&mut words));
    words
}

/// Invariants of the parsers, for the fuzz targets: any input may come.
#[cfg(any(feature = "fuzzing", test))]
pub(crate) fn check_words(bytes: &[u8]) {
    if let Ok(offer) = Offer::decode(bytes) {
        assert_eq!(offer.encode(), bytes);
    }
    if let Ok(invitation) = Invitation::decode(bytes) {
        assert_eq!(invitation.encode(), bytes);
    }
    match Words::decode(bytes) {
        Ok(Words::Pull { runs, addresses, .. }) => assert_eq!(runs.len(), addresses.len()),
        Ok(Words::Inline { runs, bytes, .. }) => {
            assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), bytes.len() as u64);
        }
        Ok(Words::Done(_)) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::ranges::{Piece, Spot};
    use crate::wire::Fate;

    proptest! {
        #[test]
        fn words_are_read_as_they_were_said(
            lens in vec(1..200usize, 1..20), token: u64, connection: u64, card: u64, pid: u32,
        ) {
            let mut memory: Vec<u8> = (0..lens.iter().sum::<usize>()).map(|at| at as u8).collect();
            let mut address = memory.as_mut_ptr().expose_provenance();
            let posted: Vec<PostedRun> = lens.iter().map(|len| {
                let local = Spot { piece: Piece { address, len: *len }, gpu: None };
                address += len;
                PostedRun { local, region: 3, generation: 4, offset: address as u64, len: *len as u64 }
            }).collect();
            let runs: Vec<WireRun> = posted.iter().map(|run| WireRun {
                region: run.region, generation: run.generation, offset: run.offset, len: run.len,
            }).collect();
            let said = Words::pull(token, memory.len() as u64, runs.iter().copied(), &posted);
            let addresses = posted.iter().map(|run| run.local.piece.address as u64).collect();
            prop_assert_eq!(Words::decode(&said), Ok(Words::Pull { token, runs: runs.clone(), addresses }));
            for end in 0..said.len() {
                prop_assert!(Words::decode(&said[..end]).is_err());
            }
            // SAFETY: the memory is alive.
            let said = unsafe { Words::inline(token, runs.iter().copied(), &posted) };
            prop_assert_eq!(Words::decode(&said), Ok(Words::Inline { token, runs, bytes: &memory }));
            let outcomes = vec![Outcome { token, fate: Fate::Placed }, Outcome { token: 1, fate: Fate::Refused }];
            let said = Words::done(&outcomes);
            prop_assert_eq!(Words::decode(&said), Ok(Words::Done(outcomes)));
            let offer = Offer { connection, at: Invitation { card, pid } };
            prop_assert_eq!(Offer::decode(&offer.encode()), Ok(offer));
        }

        #[test]
        fn any_bytes_are_words_or_none(bytes in vec(prop_oneof![0..4u8, any::<u8>()], 0..200)) {
            let _ = (Words::decode(&bytes), Offer::decode(&bytes), Invitation::decode(&bytes));
        }
    }
}
