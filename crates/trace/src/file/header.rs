//! The first line of a trace, and the lines of its models.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recorder::Grade;

/// The version of the format that this build writes and reads.
pub const VERSION: u32 = 1;
/// Bytes of the header line, so that it can be written again in place.
const LINE_BYTES: usize = 1024;
/// Longest version and policy names in a header.
const NAME_MAX: usize = 64;

/// The first line of a trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The format's version, [`VERSION`].
    pub kvlane_trace: u32,
    /// The version of kvlane that recorded it.
    #[serde(default)]
    pub kvlane: String,
    /// The meaning of the blocks' numbers.
    pub grade: Grade,
    /// Tokens of a block; of the first model, if several were recorded.
    pub tokens_per_block: u32,
    /// When the recording began, in seconds since 1970.
    #[serde(default)]
    pub started: u64,
    /// How long it took.
    #[serde(default)]
    pub seconds: f64,
    /// Requests in the file.
    #[serde(default)]
    pub requests: u64,
    /// Requests that the recorder could not keep up with: they are missing, or have no blocks or no lengths.
    #[serde(default)]
    pub dropped: u64,
    /// Blocks that were forgotten. If one of them came again, it has a new number.
    #[serde(default)]
    pub forgotten_blocks: u64,
    /// How often the recording began anew: the daemon or router was started again, or the reader was stopped for too long. Blocks
    /// got new numbers then.
    #[serde(default)]
    pub restarts: u64,
    /// The recording ended as it should.
    #[serde(default)]
    pub is_complete: bool,
    /// Bytes of the daemon's pool; 0 in a recording of a router.
    #[serde(default)]
    pub pool_bytes: u64,
    /// Bytes of the daemon's SSDs.
    #[serde(default)]
    pub ssd_bytes: u64,
    /// Bytes of a block in the pool; of the first model, if several were recorded.
    #[serde(default)]
    pub block_bytes: u64,
    /// The daemon's replacement policy.
    #[serde(default)]
    pub policy: String,
}

impl Header {
    /// The header of a recording that begins at `since` (since 1970) and has nothing yet.
    pub fn new(grade: Grade, since: Duration) -> Self {
        Self {
            kvlane_trace: VERSION,
            kvlane: env!("CARGO_PKG_VERSION").into(),
            grade,
            tokens_per_block: 0,
            started: since.as_secs(),
            seconds: 0.0,
            requests: 0,
            dropped: 0,
            forgotten_blocks: 0,
            restarts: 0,
            is_complete: false,
            pool_bytes: 0,
            ssd_bytes: 0,
            block_bytes: 0,
            policy: String::new(),
        }
    }

    /// The line, which always has the same length.
    pub fn to_line(&self) -> String {
        // Only letters that take a byte each in JSON, so that the line always has the same length.
        let is_plain = |letter: &char| letter.is_ascii_graphic() && !matches!(letter, '"' | '\\');
        let cut = |text: &str| text.chars().filter(is_plain).take(NAME_MAX).collect();
        let header = Self { kvlane: cut(&self.kvlane), policy: cut(&self.policy), ..self.clone() };
        let json = serde_json::to_string(&header).unwrap_or_default();
        format!("{json:<width$}\n", width = LINE_BYTES - 1)
    }
}

/// A model of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelLine {
    /// The model's number in this file.
    pub model: u32,
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Bytes of a block in the pool, of all workers and groups; 0 if not known.
    #[serde(default)]
    pub block_bytes: u64,
    /// Only with `--names`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_always_takes_the_same_place() {
        let small = Header::new(Grade::Blocks, Duration::ZERO);
        let large = Header {
            kvlane: "é\u{1}\"x".repeat(300),
            started: u64::MAX,
            seconds: f64::MIN,
            requests: u64::MAX,
            dropped: u64::MAX,
            forgotten_blocks: u64::MAX,
            restarts: u64::MAX,
            pool_bytes: u64::MAX,
            ssd_bytes: u64::MAX,
            block_bytes: u64::MAX,
            policy: "learned".repeat(100),
            ..small.clone()
        };
        for header in [small, large] {
            let line = header.to_line();
            assert_eq!(line.len(), LINE_BYTES);
            let read: Header = serde_json::from_str(&line).unwrap();
            assert_eq!((read.requests, read.seconds), (header.requests, header.seconds));
        }
    }
}
