//! The daemon's log, on stderr.

use std::io;

use clap::ValueEnum;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use crate::terminal;

/// How a line of the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// The crates that write to the log.
const PARTS: [&str; 7] =
    ["kvlane", "kvlane_gpu", "kvlane_memory", "kvlane_router", "kvlane_server", "kvlane_ssd", "kvlane_store"];

/// What to log: a level, or parts of kvlane with a level each. The error says what is allowed. The library would take any
/// word for the name of a part, and log nothing.
pub(crate) fn parse_filter(text: &str) -> Result<EnvFilter, String> {
    let directives: Vec<&str> = text.split(',').map(str::trim).collect();
    let wrong = directives.iter().find(|directive| !is_directive(directive));
    if wrong.is_none()
        && let Ok(filter) = EnvFilter::try_new(directives.join(","))
    {
        return Ok(filter);
    }
    let which = wrong.filter(|wrong| **wrong != text).map(|wrong| format!(": '{wrong}'"));
    Err(format!(
        "--log '{text}' is not understood{}; write {}, or a part of kvlane and one of these, such as \
         info,kvlane_server=debug. The parts are {}",
        which.unwrap_or_default(),
        LEVELS.join(", "),
        PARTS.join(", ")
    ))
}

fn is_directive(text: &str) -> bool {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_part = |path: &str| {
        let (part, below) = path.split_once("::").unwrap_or((path, ""));
        PARTS.contains(&part) && below.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    };
    match text.split_once('=') {
        Some((part, level)) => is_part(part) && is_level(level),
        None => is_level(text) || is_part(text),
    }
}

/// From here on the log is written.
pub(crate) fn start(filter: EnvFilter, format: LogFormat) {
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(terminal::has_colours(&io::stderr())).init(),
        LogFormat::Json => log.json().init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_parts_with_levels_are_understood() {
        for text in
            ["info", "WARN", "off", "kvlane_server=debug", "info,kvlane_ssd=trace", "warn, kvlane_gpu=info"]
        {
            assert!(parse_filter(text).is_ok(), "{text}");
        }
        assert!(parse_filter("kvlane_server::session=debug").is_ok());
        assert!(parse_filter("kvlane_store").is_ok());
    }

    /// `--log verbose` was taken for a part of that name: the daemon logged nothing at all, and said nothing of it.
    #[test]
    fn a_word_that_would_log_nothing_is_refused_with_what_is_allowed() {
        for text in [
            "infoo",
            "verbose",
            "server=debug",
            "kvlane_serve=debug",
            "kvlane_server=lots",
            "",
            "info,",
            "=,=;",
        ] {
            let error = parse_filter(text).unwrap_err();
            assert!(error.starts_with(&format!("--log '{text}'")), "{error}");
            assert!(error.contains("error, warn, info") && error.contains("kvlane_server"), "{error}");
        }
        assert!(parse_filter("info,verbose").unwrap_err().contains("understood: 'verbose'"));
    }
}
