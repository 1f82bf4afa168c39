//! The words of the two sides, as bytes. [`super`] draws them.

use super::meeting::Meeting;
use crate::carrier::{BadWords, WORDS_BYTES_MAX};
use crate::wire::{OUTCOME_BYTES, Outcome, RUN_BYTES, WireRun, word};

const HEAD_BYTES: usize = 8;
const OFFER_BYTES: usize = 32;
const SOURCE_BYTES: usize = 16;
const REGION_BYTES: usize = 8;
const PULL: u8 = 1;
const DONE: u8 = 2;
const MAPPED: u8 = 3;
const UNMAPPED: u8 = 4;
const RETURN: u8 = 5;
const WAITING: u8 = 6;
const CUT: BadWords = BadWords("words that are cut off");

/// The offer, and the answer that accepts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) connection: u64,
    /// Where the sender gives out the handles of its memory.
    pub(super) meeting: Meeting,
}

/// Bytes of a region of the side that asks for a WRITE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PullSource {
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: u64,
}

/// Everything that is sent once the offer was accepted. Regions are (number, generation).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Words {
    /// "Read my WRITE": one source for each run.
    Pull {
        token: u64,
        runs: Vec<WireRun>,
        sources: Vec<PullSource>,
    },
    Done(Vec<Outcome>),
    /// "I have mapped these regions of yours."
    Mapped(Vec<(u32, u32)>),
    /// "I have them mapped no more."
    Unmapped(Vec<(u32, u32)>),
    /// "Unmap these regions of mine: their owner takes them back."
    Return(Vec<(u32, u32)>),
    /// "Your offer waits: no memory of a GPU is registered here."
    Waiting,
}

impl Offer {
    pub(super) fn encode(self) -> Vec<u8> {
        let Meeting { number, pass } = self.meeting;
        [&self.connection.to_le_bytes()[..], &number.to_le_bytes(), &pass.to_le_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Offer, BadWords> {
        if bytes.len() != OFFER_BYTES {
            return Err(CUT);
        }
        let pass = u128::from(word(bytes, 24)) << 64 | u128::from(word(bytes, 16));
        let meeting = Meeting { number: word(bytes, 8), pass };
        Ok(Offer { connection: word(bytes, 0), meeting })
    }
}

impl Words {
    /// The words to send. Lists of regions may need several.
    pub(super) fn encode(&self) -> Vec<Vec<u8>> {
        match self {
            Words::Pull { token, runs, sources } => {
                let bytes: u64 = runs.iter().map(|run| run.len).sum();
                let mut words = begin(PULL, runs.len());
                words.extend(token.to_le_bytes());
                words.extend(bytes.to_le_bytes());
                runs.iter().for_each(|run| run.encode(&mut words));
                for PullSource { region, generation, offset } in sources {
                    words.extend(region.to_le_bytes());
                    words.extend(generation.to_le_bytes());
                    words.extend(offset.to_le_bytes());
                }
                debug_assert!(words.len() <= WORDS_BYTES_MAX);
                vec![words]
            }
            Words::Done(outcomes) => {
                let some = |outcomes: &[Outcome]| {
                    let mut words = begin(DONE, outcomes.len());
                    outcomes.iter().for_each(|outcome| outcome.encode(&mut words));
                    words
                };
                outcomes.chunks((WORDS_BYTES_MAX - HEAD_BYTES) / OUTCOME_BYTES).map(some).collect()
            }
            Words::Mapped(regions) => list(MAPPED, regions),
            Words::Unmapped(regions) => list(UNMAPPED, regions),
            Words::Return(regions) => list(RETURN, regions),
            Words::Waiting => vec![begin(WAITING, 0)],
        }
    }

    /// The sender has proved the secret, but may still send any bytes.
    pub(super) fn decode(words: &[u8]) -> Result<Words, BadWords> {
        let (head, rest) = words.split_first_chunk::<HEAD_BYTES>().ok_or(CUT)?;
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let all = |each: usize| {
            (rest.len() == count.saturating_mul(each))
                .then_some(rest)
                .ok_or(BadWords("a list of another length"))
        };
        let regions = || {
            let region = |entry: &[u8]| (word(entry, 0) as u32, (word(entry, 0) >> 32) as u32);
            all(REGION_BYTES).map(|entries| entries.chunks_exact(REGION_BYTES).map(region).collect())
        };
        match head[0] {
            PULL => decode_pull(count, rest),
            DONE => all(OUTCOME_BYTES).map(|entries| Words::Done(Outcome::decode_all(entries).collect())),
            MAPPED => regions().map(Words::Mapped),
            UNMAPPED => regions().map(Words::Unmapped),
            RETURN => regions().map(Words::Return),
            WAITING => all(0).map(|_| Words::Waiting),
            _ => Err(BadWords("words of no known kind")),
        }
    }
}

fn decode_pull(count: usize, rest: &[u8]) -> Result<Words, BadWords> {
    let (numbers, rest) = rest.split_first_chunk::<16>().ok_or(CUT)?;
    let (token, bytes) = (word(numbers, 0), word(numbers, 8));
    let (runs, rest) = rest.split_at_checked(count.saturating_mul(RUN_BYTES)).ok_or(CUT)?;
    let runs = WireRun::decode_all(runs, bytes).map_err(|bad| BadWords(bad.0))?;
    if rest.len() != count.saturating_mul(SOURCE_BYTES) {
        return Err(BadWords("a write of other bytes"));
    }
    let source = |entry: &[u8]| PullSource {
        region: word(entry, 0) as u32,
        generation: (word(entry, 0) >> 32) as u32,
        offset: word(entry, 8),
    };
    Ok(Words::Pull { token, runs, sources: rest.chunks_exact(SOURCE_BYTES).map(source).collect() })
}

fn begin(kind: u8, count: usize) -> Vec<u8> {
    let mut words = vec![kind, 0, 0, 0];
    words.extend((count as u32).to_le_bytes());
    words
}

fn list(kind: u8, regions: &[(u32, u32)]) -> Vec<Vec<u8>> {
    let some = |regions: &[(u32, u32)]| {
        let mut words = begin(kind, regions.len());
        for (region, generation) in regions {
            words.extend(region.to_le_bytes());
            words.extend(generation.to_le_bytes());
        }
        words
    };
    regions.chunks((WORDS_BYTES_MAX - HEAD_BYTES) / REGION_BYTES).map(some).collect()
}

/// Any bytes are words or refused; words are encoded as they came.
#[cfg(any(feature = "fuzzing", test))]
pub(crate) fn check_words(bytes: &[u8]) {
    if let Ok(offer) = Offer::decode(bytes) {
        assert_eq!(offer.encode(), bytes);
    }
    if let Ok(words) = Words::decode(bytes) {
        let again: Result<Vec<Words>, BadWords> =
            words.encode().iter().map(|words| Words::decode(words)).collect();
        // Nothing is sent for an empty list, and a long one is sent in parts.
        assert!(again.is_ok_and(|again| again.len() != 1 || again[0] == words));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Fate;

    proptest! {
        #[test]
        fn any_bytes_are_words_or_refused(kind in 0..8u8, count in 0..5u8, rest in vec(any::<u8>(), 0..200)) {
            check_words(&[&[kind, 0, 0, 0, count, 0, 0, 0], &rest[..]].concat());
            check_words(&rest);
        }

        #[test]
        fn regions_of_any_number_arrive(regions in vec(any::<(u32, u32)>(), 0..20_000)) {
            let all: Vec<(u32, u32)> = Words::Mapped(regions.clone()).encode().iter().flat_map(|words| {
                assert!(words.len() <= WORDS_BYTES_MAX);
                let Words::Mapped(some) = Words::decode(words).unwrap() else { panic!("another kind") };
                some
            }).collect();
            prop_assert_eq!(all, regions);
        }
    }

    #[test]
    fn words_are_read_as_they_were_written() {
        let run = |offset| WireRun { region: 1, generation: 2, offset, len: 10 };
        let source = PullSource { region: 7, generation: 8, offset: 9 };
        let all = [
            Words::Pull { token: 5, runs: vec![run(0), run(50)], sources: vec![source; 2] },
            Words::Done(vec![Outcome { token: 5, fate: Fate::GpuFailed }]),
            Words::Unmapped(vec![(1, 2)]),
            Words::Return(vec![(3, 4), (5, 6)]),
            Words::Waiting,
        ];
        for words in all {
            let encoded = words.encode();
            assert_eq!(Words::decode(&encoded[0]).unwrap(), words);
            assert!(Words::decode(&encoded[0][..encoded[0].len() - 1]).is_err());
        }
        let offer = Offer { connection: 1, meeting: Meeting { number: 2, pass: 3 << 70 | 4 } };
        assert_eq!(Offer::decode(&offer.encode()).unwrap(), offer);
    }
}
