//! [`Parser`]: reads a trace line by line.

use std::{fmt, time::Duration};

use kvlane_policy::spread;
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess},
};
use thiserror::Error;

use super::header::{Header, ModelLine, VERSION};
use crate::recorder::{Leg, TierBlocks};

/// Most blocks of one request, so that a range of a damaged line does not take all memory.
pub const BLOCKS_MAX: usize = 1 << 20;
/// Most models of a trace.
const MODELS_MAX: usize = 1 << 16;

/// The format of a trace, by its first line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Begins with a [`Header`]; milliseconds.
    Kvlane,
    /// Milliseconds; blocks of 512 tokens in the published traces.
    Mooncake,
    /// Has `chat_id`; seconds; blocks of 16 tokens in the published traces. An id names the tokens of its block alone, not
    /// those before it, so ids are chained here.
    QwenBailian,
}

impl Format {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvlane => "kvlane",
            Self::Mooncake => "mooncake",
            Self::QwenBailian => "qwen-bailian",
        }
    }
}

/// A line that cannot be read.
#[derive(Debug, Error, PartialEq)]
pub enum ParseError {
    /// It is not JSON, or a field has another type.
    #[error("column {column}: {what}")]
    Json {
        /// The column, from 1 on.
        column: usize,
        /// serde's sentence.
        what: String,
    },
    /// A header of another version.
    #[error(
        "a trace of version {0}, and this kvlane reads version {VERSION}: use the kvlane that recorded it"
    )]
    Version(u32),
    /// A header in which a block has no tokens.
    #[error("0 tokens a block: this is no recorded trace, record it again")]
    NoTokens,
    /// A second header.
    #[error("a second header: these are several traces, replay each alone")]
    SecondHeader,
    /// A line of one format in a trace of another.
    #[error("a line of {}'s format in a trace of {}'s", .0.name(), .1.name())]
    Mixed(Format, Format),
    /// A time before the start of the trace, or beyond all limits.
    #[error("timestamp {0}: {1}")]
    Time(f64, String),
    /// A request with more than [`BLOCKS_MAX`] blocks.
    #[error("a request of more than {BLOCKS_MAX} blocks")]
    Blocks,
    /// More models than can be.
    #[error("more than {MODELS_MAX} models")]
    Models,
}

/// A request of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceRequest {
    /// When it came, from the start of the trace.
    pub at: Duration,
    /// The looked-up blocks, from the prompt's first one on.
    pub ids: Vec<u64>,
    /// The blocks behind them that were saved.
    pub saved: Vec<u64>,
    /// Tokens of prompt and answer.
    pub lengths: Option<(u64, u64)>,
    /// Which of `ids` were found.
    pub hit: TierBlocks,
    /// The engine's part in serving it.
    pub leg: Leg,
    /// Number of its model.
    pub model: u32,
}

/// The fields of a line that a replay needs. A line may have others.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    hash_ids: Ids,
    #[serde(default)]
    saved_ids: Ids,
    chat_id: Option<de::IgnoredAny>,
    input_length: Option<u64>,
    output_length: Option<u64>,
    #[serde(default)]
    ram_blocks: u64,
    #[serde(default)]
    ssd_blocks: u64,
    #[serde(default)]
    peer_blocks: u64,
    #[serde(default)]
    model: u32,
    leg: Option<LegName>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum LegName {
    Prefill,
    Decode,
}

/// Numbers of blocks: any 64-bit numbers, signed or not, or pairs of the first and last of a range. `Err` if there are too many.
#[derive(Default)]
struct Ids(Vec<u64>, bool);

enum Entry {
    One(u64),
    Range(u64, u64),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number as a block's id, or [first, last]")
            }

            fn visit_u64<E>(self, id: u64) -> Result<Entry, E> {
                Ok(Entry::One(id))
            }

            fn visit_i64<E>(self, id: i64) -> Result<Entry, E> {
                Ok(Entry::One(id as u64))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
                let first = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let last = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
                match seq.next_element::<de::IgnoredAny>()? {
                    None if first <= last => Ok(Entry::Range(first, last)),
                    _ => Err(de::Error::custom("a range is [first, last], with the smaller number first")),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of blocks' ids")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                let Ids(mut ids, mut is_too_long) = Ids::default();
                while let Some(entry) = seq.next_element()? {
                    let (first, last) = match entry {
                        Entry::One(id) => (id, id),
                        Entry::Range(first, last) => (first, last),
                    };
                    if is_too_long || last - first >= (BLOCKS_MAX - ids.len()) as u64 {
                        is_too_long = true;
                        continue;
                    }
                    ids.extend(first..=last);
                }
                Ok(Ids(ids, is_too_long))
            }
        }
        deserializer.deserialize_seq(Visitor)
    }
}

/// The beginning of a line says what it is.
#[derive(Deserialize)]
struct Kind {
    kvlane_trace: Option<u32>,
    timestamp: Option<de::IgnoredAny>,
    model: Option<de::IgnoredAny>,
}

/// Reads a trace line by line.
#[derive(Debug, Default)]
pub struct Parser {
    format: Option<Format>,
    header: Option<Header>,
    models: Vec<ModelLine>,
}

impl Parser {
    /// Reads a line. None if it is empty, a header or a model.
    ///
    /// # Errors
    /// [`ParseError`]; the caller adds the line's number.
    pub fn line(&mut self, line: &str) -> Result<Option<TraceRequest>, ParseError> {
        if line.trim().is_empty() {
            return Ok(None);
        }
        let is_ours = self.format == Some(Format::Kvlane);
        if self.format.is_none() || is_ours {
            let kind: Kind = parse(line)?;
            match kind {
                Kind { kvlane_trace: Some(_), .. } if is_ours => return Err(ParseError::SecondHeader),
                Kind { kvlane_trace: Some(version), .. } => return self.take_header(version, line),
                Kind { timestamp: None, model: Some(_), .. } if is_ours => {
                    if self.models.len() >= MODELS_MAX {
                        return Err(ParseError::Models);
                    }
                    self.models.push(parse(line)?);
                    return Ok(None);
                }
                _ => {}
            }
        }
        self.request(parse(line)?).map(Some)
    }

    /// The format. None before the first line.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// The header of a recorded trace, once it was read.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// The models of a recorded trace, as far as it was read.
    pub fn models(&self) -> &[ModelLine] {
        &self.models
    }

    fn take_header(&mut self, version: u32, line: &str) -> Result<Option<TraceRequest>, ParseError> {
        if version != VERSION {
            return Err(ParseError::Version(version));
        }
        let header: Header = parse(line)?;
        if header.tokens_per_block == 0 && header.requests > 0 {
            return Err(ParseError::NoTokens);
        }
        self.format = Some(Format::Kvlane);
        self.header = Some(header);
        Ok(None)
    }

    fn request(&mut self, line: Line) -> Result<TraceRequest, ParseError> {
        let this = match (self.format, &line.chat_id) {
            (Some(Format::Kvlane), _) => Format::Kvlane,
            (_, Some(_)) => Format::QwenBailian,
            (_, None) => Format::Mooncake,
        };
        let format = *self.format.get_or_insert(this);
        if this != format {
            return Err(ParseError::Mixed(this, format));
        }
        let seconds = match format {
            Format::Kvlane | Format::Mooncake => line.timestamp / 1e3,
            Format::QwenBailian => line.timestamp,
        };
        let at = Duration::try_from_secs_f64(seconds)
            .map_err(|error| ParseError::Time(line.timestamp, error.to_string()))?;
        if line.hash_ids.1 || line.saved_ids.1 {
            return Err(ParseError::Blocks);
        }
        let mut ids = line.hash_ids.0;
        if format == Format::QwenBailian {
            let mut before = 0;
            for id in &mut ids {
                before = spread(before ^ spread(*id));
                *id = before;
            }
        }
        // All of them together are no more than the blocks.
        let mut left = ids.len() as u64;
        let [ram, ssd, peers] = [line.ram_blocks, line.ssd_blocks, line.peer_blocks].map(|blocks| {
            let found = blocks.min(left);
            left -= found;
            found
        });
        let leg = match line.leg {
            None => Leg::Whole,
            Some(LegName::Prefill) => Leg::Prefill,
            Some(LegName::Decode) => Leg::Decode,
        };
        Ok(TraceRequest {
            at,
            ids,
            saved: line.saved_ids.0,
            lengths: line.input_length.zip(line.output_length),
            hit: TierBlocks { ram, ssd, peers },
            leg,
            model: line.model,
        })
    }
}

fn parse<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, ParseError> {
    serde_json::from_str(line).map_err(|error| {
        // serde_json counts lines within this one, so its number is always 1.
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or_default().to_owned();
        ParseError::Json { column: error.column(), what }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        file::RequestLine,
        recorder::{Grade, Lengths, Recorded},
        runs::{ids, runs},
    };

    fn header() -> Header {
        let text = r#"{"kvlane_trace":1,"grade":"blocks","tokens_per_block":16,"requests":1}"#;
        assert_eq!(serde_json::from_str::<Header>(text).unwrap().grade, Grade::Blocks);
        serde_json::from_str(text).unwrap()
    }

    fn read(parser: &mut Parser, line: &str) -> TraceRequest {
        parser.line(line).unwrap().unwrap()
    }

    #[test]
    fn ranges_stand_for_all_their_numbers() {
        let mut parser = Parser::default();
        assert_eq!(parser.line(&header().to_line()), Ok(None));
        assert_eq!(parser.line(r#"{"model":3,"tokens_per_block":16,"block_bytes":4096}"#), Ok(None));
        let line = r#"{"timestamp":7,"hash_ids":[[0,2],9],"saved_ids":[[10,11]],"ram_blocks":2,"model":3}"#;
        let request = read(&mut parser, line);
        assert_eq!((request.ids, request.saved), (vec![0, 1, 2, 9], vec![10, 11]));
        assert_eq!((request.hit.ram, request.lengths), (2, None));
        assert_eq!((parser.format(), parser.models().len()), (Some(Format::Kvlane), 1));
    }

    #[test]
    fn mistakes_say_what_to_do() {
        let ours = header().to_line();
        for (before, line, wanted) in [
            ("", r#"{"kvlane_trace":2,"grade":"blocks","tokens_per_block":16}"#, "version 2"),
            (
                "",
                r#"{"kvlane_trace":1,"grade":"blocks","tokens_per_block":0,"requests":9}"#,
                "0 tokens a block",
            ),
            ("", r#"{"kvlane_trace":1,"grade":"best","tokens_per_block":16}"#, "unknown variant `best`"),
            (&ours, &ours, "a second header"),
            (&ours, r#"{"timestamp":-1,"hash_ids":[]}"#, "timestamp -1"),
            (&ours, r#"{"timestamp":1,"hash_ids":[[2,1]]}"#, "the smaller number first"),
            (&ours, r#"{"timestamp":1,"hash_ids":[[2]]}"#, "[first, last]"),
            (&ours, r#"{"timestamp":1,"hash_ids":[[1,2,3]]}"#, "[first, last]"),
            (&ours, r#"{"timestamp":1,"hash_ids":[[0,18446744073709551615]]}"#, "1048576 blocks"),
            (&ours, r#"{"timestamp":1,"hash_ids":[[0,1048574],1,2]}"#, "1048576 blocks"),
            (&ours, r#"{"timestamp":1,"hash_ids":[1],"leg":"middle"}"#, "unknown variant `middle`"),
            (&ours, r#"{"timestamp":1"#, "column 14: EOF"),
        ] {
            let mut parser = Parser::default();
            parser.line(before).unwrap();
            let error = parser.line(line).unwrap_err().to_string();
            assert!(error.contains(wanted), "{line}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_was_recorded_is_read(
            blocks in prop::collection::vec(0..50_u64, 0..30),
            saved in prop::collection::vec(0..50_u64, 0..9),
            (ms, ram, first_id) in (0..1_000_000_u64, 0..30_u64, 0..9_u64),
            lengths in prop::option::of((1..9_u64, 1..9_u64)),
            leg in prop::sample::select(vec![Leg::Whole, Leg::Prefill, Leg::Decode]),
        ) {
            let hit = TierBlocks { ram: ram.min(blocks.len() as u64), ..TierBlocks::default() };
            let since = Duration::from_secs(100);
            let recorded = Recorded {
                at: since + Duration::from_millis(ms),
                engine: "engine".into(),
                model: [0; 16],
                blocks: runs(blocks.iter().copied()),
                saved: runs(saved.iter().copied()),
                hit,
                engine_tokens: 0,
                lengths: lengths.map(|(prompt, output)| Lengths { prompt, output }),
                leg,
                first_token: None,
            };
            let line = RequestLine::new(&recorded, since, (4, 5), first_id).to_line();
            let mut parser = Parser::default();
            parser.line(&header().to_line()).unwrap();
            let request = read(&mut parser, &line);
            let moved = |runs: &[crate::Run]| ids(runs).map(|id| id + first_id).collect::<Vec<_>>();
            prop_assert_eq!(request.ids, moved(&recorded.blocks));
            prop_assert_eq!(request.saved, moved(&recorded.saved));
            prop_assert_eq!((request.lengths, request.hit, request.leg), (lengths, hit, leg));
            prop_assert_eq!((request.at.as_millis() as u64, request.model), (ms, 5));
        }
    }
}
