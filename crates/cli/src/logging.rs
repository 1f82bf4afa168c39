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
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// The crates of this program that write to the log.
const PARTS: [&str; 14] = [
    "kvlane",
    "kvlane_client",
    "kvlane_cluster",
    "kvlane_door",
    "kvlane_engine_memory",
    "kvlane_fabric",
    "kvlane_gpu",
    "kvlane_memory",
    "kvlane_otlp",
    "kvlane_router",
    "kvlane_server",
    "kvlane_ssd",
    "kvlane_store",
    "kvlane_zmtp",
];

/// Parses a filter: a level, or parts of kvlane with a level each. The error lists what is allowed, because the library would
/// take any word for the name of a part, and log nothing.
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

/// Installs the log. Lines before this call are lost.
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

    /// `--log kvlane_door=debug` was refused, although that crate logs.
    #[test]
    fn every_crate_of_this_program_that_logs_is_a_part() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut missing = Vec::new();
        let (mut seen, mut found) = (vec!["cli".to_owned()], 0);
        while found < seen.len() {
            let folder = crates.join(&seen[found]);
            let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            let needed = manifest.split("[dev-dependencies]").next().unwrap();
            for name in needed.lines().filter_map(|line| line.strip_prefix("kvlane-")) {
                let name = name.split(['.', ' ']).next().unwrap().to_owned();
                if !seen.contains(&name) {
                    seen.push(name);
                }
            }
            let part = match seen[found].as_str() {
                "cli" => "kvlane".to_owned(),
                other => format!("kvlane_{}", other.replace('-', "_")),
            };
            if logs(&folder.join("src")) && !PARTS.contains(&part.as_str()) {
                missing.push(part);
            }
            found += 1;
        }
        assert!(seen.len() > 10, "{seen:?}");
        assert_eq!(missing, Vec::<String>::new());
    }

    fn logs(folder: &std::path::Path) -> bool {
        std::fs::read_dir(folder).unwrap().flatten().any(|entry| match entry.path() {
            path if path.is_dir() => logs(&path),
            path => std::fs::read_to_string(&path).is_ok_and(|text| text.contains("tracing::")),
        })
    }
}
