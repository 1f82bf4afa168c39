//! Trace files: recorded by `kvlane record`, or of one of the published formats.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_fleet::Request;
use kvlane_policy::Trace;
use kvlane_trace::{
    Leg, TierBlocks,
    file::{Format, Header, ParseError, Parser, TraceRequest},
};

/// A trace, with what its file says beside its requests.
pub(super) struct TraceFile {
    pub(super) trace: Trace,
    pub(super) format: Format,
    /// The same requests with their lengths. An error names the first line without them.
    pub(super) requests: Result<Vec<Request>, String>,
    /// None for a published trace.
    pub(super) recorded: Option<RecordedFacts>,
}

/// The facts about its daemon or router that a recorded trace has.
pub(super) struct RecordedFacts {
    pub(super) header: Header,
    /// Mean bytes of a looked-up block in the pool; 0 if not known.
    pub(super) block_bytes: u64,
    /// The different numbers of tokens that blocks have.
    pub(super) tokens_per_block: Vec<u32>,
    /// Blocks have different numbers of bytes.
    pub(super) has_several_sizes: bool,
    /// Blocks that were found: of all requests, and of their second half.
    pub(super) hit: TierBlocks,
    pub(super) late_hit: TierBlocks,
    /// Requests whose lengths are not known, or that have no answer.
    pub(super) without_lengths: usize,
}

impl TraceFile {
    /// Tokens of a block.
    ///
    /// # Errors
    /// The blocks of a recorded trace have different sizes.
    pub(super) fn block_tokens(&self) -> Result<u64> {
        match (self.format, &self.recorded) {
            (Format::Mooncake, _) => Ok(512),
            (Format::QwenBailian, _) => Ok(16),
            (Format::Kvlane, Some(RecordedFacts { tokens_per_block, .. })) => match tokens_per_block[..] {
                [tokens] => Ok(tokens.into()),
                _ => bail!(
                    "the blocks of this trace have {} tokens: record one model alone, with --namespace",
                    tokens_per_block.iter().map(u32::to_string).collect::<Vec<_>>().join(" and ")
                ),
            },
            (Format::Kvlane, None) => bail!("a recorded trace without a header"),
        }
    }
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
    let mut parser = Parser::default();
    let mut all: Vec<TraceRequest> = Vec::new();
    let mut first_without_lengths = None;
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let bytes = lines.read_line(&mut line).with_context(|| format!("line {number}"))?;
        if bytes == 0 {
            break;
        }
        progress(bytes);
        let read = match parser.line(&line) {
            Ok(read) => read,
            // A recording that was cut off, as by a full disk, may end within a line.
            Err(_) if !line.ends_with('\n') && parser.format() == Some(Format::Kvlane) => break,
            Err(error @ ParseError::Json { .. }) => bail!("line {number}, {error}"),
            Err(error) => bail!("line {number}: {error}"),
        };
        let Some(request) = read else { continue };
        if request.lengths.is_none() {
            first_without_lengths.get_or_insert(number);
        }
        all.push(request);
    }
    let Some(format) = parser.format().filter(|_| !all.iter().all(|request| request.ids.is_empty())) else {
        bail!("no request with blocks in it");
    };
    if format == Format::Kvlane {
        // A recording has its requests in the order in which they ended.
        all.sort_by_key(|request| request.at);
    }
    let is_unknown =
        |request: &&TraceRequest| request.lengths.is_none_or(|(prompt, output)| prompt.min(output) == 0);
    let without_lengths = all.iter().filter(is_unknown).count();
    let is_partial = format == Format::Kvlane && without_lengths < all.len();
    let requests = match first_without_lengths {
        Some(number) if !is_partial => {
            Err(format!("line {number}: it has no input_length and output_length"))
        }
        _ => Ok(all.iter().filter_map(to_serve).collect()),
    };
    let recorded = parser.header().map(|header| recorded(header, &parser, &all, without_lengths));
    let mut trace = Trace::new();
    for request in all {
        trace.push_with_saved(request.at, &request.ids, &request.saved);
    }
    Ok(TraceFile { trace, format, requests, recorded })
}

/// The request as a router sees it. None without lengths, and for an engine that computed the prompt for another one: the other
/// engine's line has the request's lengths.
fn to_serve(request: &TraceRequest) -> Option<Request> {
    let (prompt_tokens, output_tokens) = request.lengths.filter(|_| request.leg != Leg::Prefill)?;
    Some(Request { at: request.at, prompt_tokens, output_tokens, blocks: request.ids.clone() })
}

fn recorded(header: &Header, parser: &Parser, all: &[TraceRequest], without_lengths: usize) -> RecordedFacts {
    let models: HashMap<u32, (u32, u64)> = parser
        .models()
        .iter()
        .map(|model| (model.model, (model.tokens_per_block, model.block_bytes)))
        .collect();
    let (mut blocks, mut bytes) = (0, 0.0);
    let (mut hit, mut late_hit) = (TierBlocks::default(), TierBlocks::default());
    let (mut tokens_per_block, mut sizes) = (Vec::new(), HashSet::new());
    for (index, request) in all.iter().enumerate() {
        let of_header = (header.tokens_per_block, header.block_bytes);
        let (tokens, block_bytes) = models.get(&request.model).copied().unwrap_or(of_header);
        if !request.ids.is_empty() && !tokens_per_block.contains(&tokens) {
            tokens_per_block.push(tokens);
        }
        if !request.ids.is_empty() {
            sizes.insert(block_bytes);
        }
        blocks += request.ids.len();
        bytes += request.ids.len() as f64 * block_bytes as f64;
        hit += request.hit;
        if index >= all.len() / 2 {
            late_hit += request.hit;
        }
    }
    let block_bytes = (bytes / blocks.max(1) as f64) as u64;
    RecordedFacts {
        header: header.clone(),
        block_bytes,
        tokens_per_block,
        has_several_sizes: sizes.len() > 1,
        hit,
        late_hit,
        without_lengths,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
