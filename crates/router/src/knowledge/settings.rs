//! The settings of exact knowledge, and the parser of `--kv-events`.

use std::{fmt, path::PathBuf, str::FromStr};

use thiserror::Error;

/// Prefix of a ZeroMQ socket's address.
const SCHEME: &str = "tcp://";
/// Separates a node's address from that of its events.
const SEPARATOR: &str = "=tcp://";
const REPLAY: &str = ",replay=tcp://";

/// Set by flags and the file. If both lists are empty, nothing is known exactly.
#[derive(Debug, Clone)]
pub struct KnowledgeSettings {
    /// Models, each with the folder or file of its tokenizer.
    pub tokenizers: Vec<(String, PathBuf)>,
    /// Sockets at which nodes publish their KV events.
    pub events: Vec<EventSource>,
    /// Room for different blocks: on each medium for each 64 nodes, and for engines' own hashes in all.
    pub blocks_max: usize,
}

impl Default for KnowledgeSettings {
    fn default() -> Self {
        Self { tokenizers: Vec::new(), events: Vec::new(), blocks_max: 1 << 21 }
    }
}

/// Where a node's engine publishes its KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSource {
    /// The node's name, which is its address.
    pub node: String,
    /// The engine's PUB socket.
    pub events: Endpoint,
    /// The engine's ROUTER socket, which replays missed messages.
    pub replay: Option<Endpoint>,
}

/// The TCP address of a ZeroMQ socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or IP address.
    pub host: String,
    /// From 1 to 65535.
    pub port: u16,
}

/// A text that is no event source.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text}: {why}; write it as http://HOST:PORT=tcp://HOST:PORT, or with ,replay=tcp://HOST:PORT behind it"
)]
pub struct EventSourceError {
    text: String,
    why: &'static str,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}:{}", self.host, self.port)
    }
}

impl FromStr for Endpoint {
    type Err = &'static str;

    /// Parses `HOST:PORT`, with or without `tcp://`. IPv6 addresses stand in brackets.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_prefix(SCHEME).unwrap_or(text);
        let (host, port) = text.rsplit_once(':').ok_or("an address has no port")?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = port.parse().ok().filter(|&port| port > 0).ok_or("a port is no number from 1 to 65535")?;
        if host.is_empty() || host == "*" {
            return Err("an address names no host to connect to");
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl FromStr for EventSource {
    type Err = EventSourceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |why| EventSourceError { text: text.to_owned(), why };
        let (node, addresses) =
            text.split_once(SEPARATOR).ok_or_else(|| wrong("it has no tcp:// address behind a node's"))?;
        if node.is_empty() {
            return Err(wrong("it names no node"));
        }
        let (events, replay) = match addresses.split_once(REPLAY) {
            Some((events, replay)) => (events, Some(replay)),
            None => (addresses, None),
        };
        Ok(Self {
            node: node.trim_end_matches('/').to_owned(),
            events: events.parse().map_err(wrong)?,
            replay: replay.map(str::parse).transpose().map_err(wrong)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_wrong_ones_are_named() {
        let read = |text: &str| text.parse::<EventSource>();
        let endpoint = |host: &str, port| Endpoint { host: host.into(), port };
        let source = EventSource {
            node: "http://a:8100".into(),
            events: endpoint("a", 5557),
            replay: Some(endpoint("::1", 5558)),
        };
        assert_eq!(read("http://a:8100/=tcp://a:5557,replay=tcp://[::1]:5558"), Ok(source.clone()));
        assert_eq!(read("http://a:8100=tcp://a:5557"), Ok(EventSource { replay: None, ..source }));
        for wrong in [
            "",
            "tcp://a:1",
            "=tcp://a:1",
            "n=tcp://a",
            "n=tcp://a:0",
            "n=tcp://*:1",
            "n=tcp://a:1,replay=tcp://b",
        ] {
            let error = read(wrong).map_err(|error| error.to_string());
            assert!(error.as_ref().is_err_and(|error| error.starts_with(wrong)), "{wrong}: {error:?}");
        }
    }
}
