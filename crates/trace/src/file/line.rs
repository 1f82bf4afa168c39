//! The line of a request.

use std::time::Duration;

use serde::{
    Serialize, Serializer,
    ser::{SerializeSeq, SerializeTuple},
};

use crate::{
    recorder::{Leg, Recorded},
    runs::Run,
};

/// The line of a recorded request.
#[derive(Debug, Serialize)]
pub struct RequestLine<'a> {
    timestamp: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_length: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_length: Option<u64>,
    hash_ids: Ids<'a>,
    #[serde(skip_serializing_if = "Ids::is_empty")]
    saved_ids: Ids<'a>,
    #[serde(skip_serializing_if = "is_zero")]
    ram_blocks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    ssd_blocks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    peer_blocks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    engine_tokens: u64,
    engine: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_name: Option<&'a str>,
    model: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    leg: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<u64>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl<'a> RequestLine<'a> {
    /// A request of a recording that began at `since` on the recorder's clock. `first_id` is added to each number: the
    /// numbers of a recorder that was started again begin at 0 again.
    pub fn new(request: &'a Recorded, since: Duration, (engine, model): (u32, u32), first_id: u64) -> Self {
        let Recorded { at, blocks, saved, hit, engine_tokens, lengths, leg, first_token, .. } = request;
        Self {
            timestamp: at.saturating_sub(since).as_millis() as u64,
            input_length: lengths.map(|lengths| lengths.prompt),
            output_length: lengths.map(|lengths| lengths.output),
            hash_ids: Ids { runs: blocks, first_id },
            saved_ids: Ids { runs: saved, first_id },
            ram_blocks: hit.ram,
            ssd_blocks: hit.ssd,
            peer_blocks: hit.peers,
            engine_tokens: *engine_tokens,
            engine,
            engine_name: None,
            model,
            leg: match leg {
                Leg::Whole => None,
                Leg::Prefill => Some("prefill"),
                Leg::Decode => Some("decode"),
            },
            ttft_ms: first_token.map(|time| time.as_millis() as u64),
        }
    }

    /// The line, with the engine's name too.
    pub fn with_name(self, engine: &'a str) -> Self {
        Self { engine_name: Some(engine), ..self }
    }

    /// The line, with its end.
    pub fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// Numbers, or `[first, last]` where more than two follow each other.
#[derive(Debug)]
struct Ids<'a> {
    runs: &'a [Run],
    first_id: u64,
}

impl Ids<'_> {
    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

struct Range(u64, u64);

impl Serialize for Range {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut pair = serializer.serialize_tuple(2)?;
        pair.serialize_element(&self.0)?;
        pair.serialize_element(&self.1)?;
        pair.end()
    }
}

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut ids = serializer.serialize_seq(None)?;
        for run in self.runs {
            let first = run.first.saturating_add(self.first_id);
            match run.count {
                1 => ids.serialize_element(&first)?,
                count => ids.serialize_element(&Range(first, first.saturating_add(count - 1)))?,
            }
        }
        ids.end()
    }
}
