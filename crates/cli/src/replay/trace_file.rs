//! Trace files, line by line.

use std::{
    fmt,
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_fleet::Request;
use kvlane_policy::{Trace, spread};
use serde::{Deserialize, Deserializer, de};

/// The format of a trace, by its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Milliseconds; blocks of 512 tokens in the published traces.
    Mooncake,
    /// Has `chat_id`; seconds; blocks of 16 tokens in the published traces. An id names the tokens of its block alone, not
    /// those before it, so ids are chained here.
    QwenBailian,
}

impl Format {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::QwenBailian => "qwen-bailian",
        }
    }

    /// Tokens of a block in the published traces.
    pub(super) fn block_tokens(self) -> u64 {
        match self {
            Self::Mooncake => 512,
            Self::QwenBailian => 16,
        }
    }
}

/// The fields of a line that a replay needs. A line may have others.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    hash_ids: Vec<Id>,
    chat_id: Option<de::IgnoredAny>,
    input_length: Option<u64>,
    output_length: Option<u64>,
}

/// Any 64-bit number, signed or not.
struct Id(u64);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl de::Visitor<'_> for Number {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number as a block's id")
            }

            fn visit_u64<E>(self, id: u64) -> Result<Id, E> {
                Ok(Id(id))
            }

            fn visit_i64<E>(self, id: i64) -> Result<Id, E> {
                Ok(Id(id as u64))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// A trace, with its format.
pub(super) struct TraceFile {
    pub(super) trace: Trace,
    pub(super) format: Format,
    /// The same requests with their lengths. An error names the first line without them.
    pub(super) requests: Result<Vec<Request>, String>,
}

/// Reads a whole trace. An error names the line of the mistake.
pub(super) fn read(path: &Path) -> Result<TraceFile> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let bar = ProgressBar::new(file.metadata().map_or(0, |facts| facts.len())).with_message("reading");
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {binary_bytes} of {binary_total_bytes}") {
        bar.set_style(style);
    }
    let read = parse(BufReader::with_capacity(1 << 20, file), |bytes| bar.inc(bytes as u64));
    bar.finish_and_clear();
    read.with_context(|| path.display().to_string())
}

fn parse(mut lines: impl BufRead, progress: impl Fn(usize)) -> Result<TraceFile> {
    let mut trace = Trace::new();
    let mut format = None;
    let mut ids = Vec::new();
    let mut requests = Ok(Vec::new());
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let bytes = lines.read_line(&mut line).with_context(|| format!("line {number}"))?;
        if bytes == 0 {
            break;
        }
        progress(bytes);
        if line.trim().is_empty() {
            continue;
        }
        let request: Line = serde_json::from_str(&line).map_err(|error| {
            // serde_json counts lines within this one, so its number is always 1.
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default().to_owned();
            anyhow!("line {number}, column {}: {text}", error.column())
        })?;
        let this = if request.chat_id.is_some() { Format::QwenBailian } else { Format::Mooncake };
        let format = *format.get_or_insert(this);
        if this != format {
            bail!("line {number}: a line of {}'s format in a trace of {}'s", this.name(), format.name());
        }
        let seconds = match format {
            Format::Mooncake => request.timestamp / 1e3,
            Format::QwenBailian => request.timestamp,
        };
        let at = Duration::try_from_secs_f64(seconds)
            .map_err(|error| anyhow!("line {number}: timestamp {}: {error}", request.timestamp))?;
        ids.clear();
        ids.extend(request.hash_ids.iter().map(|id| id.0));
        if format == Format::QwenBailian {
            let mut before = 0;
            for id in &mut ids {
                before = spread(before ^ spread(*id));
                *id = before;
            }
        }
        trace.push(at, &ids);
        let lengths = request.input_length.zip(request.output_length);
        match (&mut requests, lengths) {
            (Ok(all), Some((prompt_tokens, output_tokens))) => {
                all.push(Request { at, prompt_tokens, output_tokens, blocks: ids.clone() });
            }
            (Ok(_), None) => {
                requests = Err(format!("line {number}: it has no input_length and output_length"));
            }
            _ => {}
        }
    }
    match format {
        Some(format) if trace.references() > 0 => Ok(TraceFile { trace, format, requests }),
        _ => bail!("no request with blocks in it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<TraceFile> {
        parse(text.as_bytes(), |_| ())
    }

    #[test]
    fn both_formats_are_known() {
        let mooncake = parsed(
            r#"{"timestamp": 27, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}

            {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 18446744073709551615]}"#,
        )
        .unwrap();
        assert_eq!((mooncake.format, mooncake.trace.len()), (Format::Mooncake, 2));
        assert_eq!((mooncake.trace.references(), mooncake.trace.distinct()), (4, 3));
        assert_eq!(mooncake.trace.end(), Duration::from_secs(3));
        let bailian = parsed(
            r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 41, "output_length": 7,
                "type": "text", "turn": 1, "hash_ids": [-5, 8, 9]}"#
                .replace('\n', " ")
                .as_str(),
        )
        .unwrap();
        assert_eq!(
            (bailian.format, bailian.trace.end()),
            (Format::QwenBailian, Duration::from_millis(61_114))
        );
    }

    #[test]
    fn the_same_tokens_after_others_are_another_block_in_bailian() {
        let lines = |chat: &str| {
            [[1, 2, 3], [1, 2, 4], [9, 2, 3]]
                .map(|ids| format!("{{{chat}\"timestamp\": 0, \"hash_ids\": {ids:?}}}\n"))
                .concat()
        };
        assert_eq!(parsed(&lines("\"chat_id\": 1, ")).unwrap().trace.distinct(), 7);
        assert_eq!(parsed(&lines("")).unwrap().trace.distinct(), 5);
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        let good = r#"{"timestamp": 0, "hash_ids": [1]}"#;
        for (text, wanted) in [
            (format!("{good}\n{{\"timestamp\": 0}}"), "line 2, column 16: missing field `hash_ids`"),
            (format!("{good}\n\n{{\"timestamp\""), "line 3, column 12: EOF"),
            (format!("{good}\n{{\"timestamp\": -1, \"hash_ids\": []}}"), "line 2: timestamp -1"),
            (format!("{good}\n{{\"timestamp\": 0, \"hash_ids\": [1.5]}}"), "line 2, column"),
            (format!("{good}\n{{\"chat_id\": 1, \"timestamp\": 0, \"hash_ids\": [1]}}"), "qwen-bailian"),
            (String::new(), "no request"),
        ] {
            let error = format!("{:#}", parsed(&text).err().unwrap());
            assert!(error.contains(wanted), "{error}");
        }
    }
}
