//! Encodes and decodes the values that the control connection and all carriers send. All numbers are little-endian.
//!
//! ```text
//!  run:      | region u32 | generation u32 | offset u64 | len u64 |
//!  outcome:  | token u64  | fate u32: 0 placed, 1 refused, 2 the driver of a GPU failed | 0 u32 |
//! ```

use thiserror::Error;

use crate::transfers::Completion;

/// Bytes of a run on the wire.
pub(crate) const RUN_BYTES: usize = 24;
/// Bytes of an outcome on the wire.
pub(crate) const OUTCOME_BYTES: usize = 16;

/// Purpose of a carrier's message to its counterpart at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WordsKind {
    /// The connecting side's part of the handshake.
    Offer,
    /// The listening side accepts the offer.
    Accepted,
    /// The listening side refuses the offer; the bytes say why, for people.
    Refused,
    /// Anything after the handshake.
    Other,
}

/// Contiguous bytes in a region, or a window, of the listening side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WireRun {
    pub(crate) region: u32,
    pub(crate) generation: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The listening side's answer to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) token: u64,
    pub(crate) fate: Fate,
}

/// Where the listening side finds the segment of shared memory that the connecting side has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingsOffer {
    /// The connecting process.
    pub(crate) pid: u32,
    /// The segment's file descriptor in that process.
    pub(crate) descriptor: u32,
    /// Device and inode of the segment, which the listening side compares, so that it maps nothing else.
    pub(crate) file: (u64, u64),
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Placed,
    Refused,
    /// The driver of a GPU at the listening side could not copy the bytes.
    GpuFailed,
}

impl Fate {
    pub(crate) fn of(is_refused: bool) -> Fate {
        if is_refused { Fate::Refused } else { Fate::Placed }
    }
}

impl From<Fate> for Completion {
    fn from(fate: Fate) -> Completion {
        match fate {
            Fate::Placed => Completion::Placed,
            Fate::Refused => Completion::Refused,
            Fate::GpuFailed => Completion::GpuFailed,
        }
    }
}

/// The peer violates the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the peer does not speak this protocol: {0}")]
pub(crate) struct BadFrame(pub(crate) &'static str);

impl WireRun {
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        to.extend(self.region.to_le_bytes());
        to.extend(self.generation.to_le_bytes());
        to.extend(self.offset.to_le_bytes());
        to.extend(self.len.to_le_bytes());
    }

    /// Decodes all runs of a frame. Refuses an empty run, and runs whose lengths do not add up to `bytes`.
    pub(crate) fn decode_all(entries: &[u8], bytes: u64) -> Result<Vec<WireRun>, BadFrame> {
        let mut left = bytes;
        let decode = |entry: &[u8]| {
            let run = WireRun {
                region: word(entry, 0) as u32,
                generation: (word(entry, 0) >> 32) as u32,
                offset: word(entry, 8),
                len: word(entry, 16),
            };
            left =
                left.checked_sub(run.len).filter(|_| run.len > 0).ok_or(BadFrame("runs of other bytes"))?;
            Ok(run)
        };
        let runs: Result<Vec<WireRun>, BadFrame> = entries.chunks_exact(RUN_BYTES).map(decode).collect();
        runs.and_then(|runs| if left == 0 { Ok(runs) } else { Err(BadFrame("runs of other bytes")) })
    }
}

impl Outcome {
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        to.extend(self.token.to_le_bytes());
        let fate: u64 = match self.fate {
            Fate::Placed => 0,
            Fate::Refused => 1,
            Fate::GpuFailed => 2,
        };
        to.extend(fate.to_le_bytes());
    }

    pub(crate) fn decode_all(entries: &[u8]) -> impl Iterator<Item = Outcome> {
        let fate = |number| match number {
            0 => Fate::Placed,
            2 => Fate::GpuFailed,
            _ => Fate::Refused,
        };
        entries
            .chunks_exact(OUTCOME_BYTES)
            .map(move |entry| Outcome { token: word(entry, 0), fate: fate(word(entry, 8)) })
    }
}

/// The u64 at this offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn fate() -> impl Strategy<Value = Fate> {
        prop_oneof![Just(Fate::Placed), Just(Fate::Refused), Just(Fate::GpuFailed)]
    }

    proptest! {
        #[test]
        fn runs_are_read_as_they_were_written_and_fit_their_frame(
            runs in vec((any::<u32>(), any::<u32>(), any::<u64>(), 1..1000u64), 1..20), off in -1..=1i64,
        ) {
            let runs: Vec<WireRun> = runs
                .into_iter()
                .map(|(region, generation, offset, len)| WireRun { region, generation, offset, len })
                .collect();
            let mut entries = Vec::new();
            runs.iter().for_each(|run| run.encode(&mut entries));
            let bytes: u64 = runs.iter().map(|run| run.len).sum();
            let read = WireRun::decode_all(&entries, bytes.wrapping_add_signed(off));
            if off == 0 {
                prop_assert_eq!(read, Ok(runs));
            } else {
                prop_assert!(read.is_err());
            }
        }

        #[test]
        fn outcomes_are_read_as_they_were_written(outcomes in vec((any::<u64>(), fate()), 1..20)) {
            let outcomes: Vec<Outcome> =
                outcomes.into_iter().map(|(token, fate)| Outcome { token, fate }).collect();
            let mut entries = Vec::new();
            outcomes.iter().for_each(|outcome| outcome.encode(&mut entries));
            prop_assert_eq!(Outcome::decode_all(&entries).collect::<Vec<_>>(), outcomes);
        }
    }
}
