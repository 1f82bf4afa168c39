//! The ping of a P2P NCCL engine, which tells a router the engine's addresses. kvlane's own heartbeat is a ping with more
//! fields, for engines that send none.

use thiserror::Error;

use crate::DecodeError;
use crate::reader::Reader;

/// Longest ping, in bytes.
pub const MOST_PING_BYTES: usize = 1000;

/// Deepest nesting in values that are skipped.
const MOST_DEPTH: usize = 4;
/// Characters of a faulty text that an error quotes.
const MOST_SHOWN: usize = 32;
/// Longest name of a group or a connector, in bytes.
const MOST_WORD_BYTES: usize = 64;

/// The work that an engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Type "P": the engine computes prompts.
    Prefill,
    /// Type "D": the engine computes answers.
    Decode,
    /// Type "W": the engine serves whole requests. Only in kvlane's heartbeats.
    Worker,
}

impl Role {
    fn letter(self) -> &'static str {
        match self {
            Self::Prefill => "P",
            Self::Decode => "D",
            Self::Worker => "W",
        }
    }
}

/// An engine's role and addresses, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ping {
    /// vLLM's key for it is "type".
    pub role: Role,
    /// The address at which it serves HTTP, `host:port`.
    pub http_address: String,
    /// The address at which other engines reach it for KV, `host:port`. vLLM's pings always have it.
    pub zmq_address: Option<String>,
    /// In kvlane's heartbeats: it can hand over to engines of the same group.
    pub group: Option<String>,
    /// In kvlane's heartbeats: the connector with which it hands over.
    pub connector: Option<String>,
    /// In kvlane's heartbeats: the engine goes, and this is its last one.
    pub bye: bool,
}

/// Why a message is no ping.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PingError {
    /// The message is too long.
    #[error("a ping has {bytes} bytes, more than the {MOST_PING_BYTES} that are allowed")]
    TooLong {
        /// Bytes of the whole message.
        bytes: usize,
    },
    /// The message is no MessagePack map of texts.
    #[error("a ping cannot be read: {0}")]
    Malformed(#[from] DecodeError),
    /// A key is missing.
    #[error("a ping has no {key}")]
    Missing {
        /// Its name in a ping.
        key: &'static str,
    },
    /// A key is there twice.
    #[error("a ping has {key} twice")]
    Twice {
        /// Its name in a ping.
        key: &'static str,
    },
    /// The type is unknown.
    #[error("a ping has the type {found:?}, none of \"P\", \"D\" and \"W\"")]
    Role {
        /// The type, at most 32 characters of it.
        found: String,
    },
    /// A text is too long.
    #[error("a ping's {key} has more than {MOST_WORD_BYTES} bytes")]
    LongWord {
        /// The key of the text.
        key: &'static str,
    },
    /// An address is not `host:port`.
    #[error("a ping has the {key} {found:?}, which is no host:port")]
    Address {
        /// The key of the address.
        key: &'static str,
        /// The address, at most 32 characters of it.
        found: String,
    },
}

/// Decodes `{"type": "P" or "D", "http_address": "host:port", "zmq_address": "host:port"}`. A heartbeat of kvlane may also have
/// the type "W", no `zmq_address`, and the texts `group`, `connector` and `bye`. Other keys are skipped.
///
/// # Errors
/// [`PingError`].
pub fn decode_ping(message: &[u8]) -> Result<Ping, PingError> {
    if message.len() > MOST_PING_BYTES {
        return Err(PingError::TooLong { bytes: message.len() });
    }
    let mut reader = Reader::new(message);
    let (mut role, mut http, mut zmq) = (None, None, None);
    let (mut group, mut connector, mut bye) = (None, None, None);
    for _ in 0..reader.map("a ping")? {
        let (key, field) = match reader.text("a ping's key")? {
            "type" => ("type", &mut role),
            "http_address" => ("http_address", &mut http),
            "zmq_address" => ("zmq_address", &mut zmq),
            "group" => ("group", &mut group),
            "connector" => ("connector", &mut connector),
            "bye" => ("bye", &mut bye),
            _ => {
                reader.skip(MOST_DEPTH)?;
                continue;
            }
        };
        if field.replace(reader.text(key)?).is_some() {
            return Err(PingError::Twice { key });
        }
    }
    reader.end()?;
    let role = match role.ok_or(PingError::Missing { key: "type" })? {
        "P" => Role::Prefill,
        "D" => Role::Decode,
        "W" => Role::Worker,
        other => return Err(PingError::Role { found: shown(other) }),
    };
    Ok(Ping {
        role,
        http_address: address("http_address", http.ok_or(PingError::Missing { key: "http_address" })?)?,
        zmq_address: zmq.map(|zmq| address("zmq_address", zmq)).transpose()?,
        group: group.map(|group| word("group", group)).transpose()?,
        connector: connector.map(|connector| word("connector", connector)).transpose()?,
        bye: bye.is_some(),
    })
}

/// Encodes a ping for [`decode_ping`]. Texts of more than 255 bytes are cut, and the ping is then refused there.
pub fn encode_ping(ping: &Ping) -> Vec<u8> {
    let bye = ping.bye.then_some("1");
    let given = [
        ("type", Some(ping.role.letter())),
        ("http_address", Some(ping.http_address.as_str())),
        ("zmq_address", ping.zmq_address.as_deref()),
        ("group", ping.group.as_deref()),
        ("connector", ping.connector.as_deref()),
        ("bye", bye),
    ];
    let given: Vec<_> = given.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    // MessagePack's fixmap, for fewer than 16 members, then its str 8, for texts of fewer than 256 bytes.
    let mut message = vec![0x80 | given.len() as u8];
    for text in given.into_iter().flat_map(|(key, value)| [key, value]) {
        let bytes = &text.as_bytes()[..text.len().min(255)];
        message.extend([0xd9, bytes.len() as u8]);
        message.extend(bytes);
    }
    message
}

fn word(key: &'static str, found: &str) -> Result<String, PingError> {
    if found.len() > MOST_WORD_BYTES { Err(PingError::LongWord { key }) } else { Ok(found.to_owned()) }
}

fn shown(text: &str) -> String {
    text.chars().take(MOST_SHOWN).collect()
}

fn address(key: &'static str, address: &str) -> Result<String, PingError> {
    if is_host_and_port(address) {
        Ok(address.to_owned())
    } else {
        Err(PingError::Address { key, found: shown(address) })
    }
}

/// Whether a text is a name, an IPv4 address or an IPv6 address in brackets, and a port from 1 on.
fn is_host_and_port(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = digits && port.parse::<u16>().is_ok_and(|port| port > 0);
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
            (1..=253).contains(&host.len()) && host.bytes().all(fits)
        }
    };
    host && port
}

#[cfg(test)]
mod tests {
    use rmpv::Value;

    use super::*;

    fn ping(pairs: &[(&str, &str)]) -> Result<Ping, PingError> {
        let pairs = pairs.iter().map(|&(key, value)| (key.into(), value.into())).collect();
        decode(&Value::Map(pairs))
    }

    fn decode(value: &Value) -> Result<Ping, PingError> {
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, value).unwrap();
        decode_ping(&bytes)
    }

    fn vllm(role: Role) -> Ping {
        let (http_address, zmq_address) = (HTTP.1.to_owned(), Some(ZMQ.1.to_owned()));
        Ping { role, http_address, zmq_address, group: None, connector: None, bye: false }
    }

    #[test]
    fn a_heartbeat_of_ours_says_more_and_is_read_back() {
        for role in [Role::Prefill, Role::Decode, Role::Worker] {
            let plain = Ping { zmq_address: None, ..vllm(role) };
            let full =
                Ping { group: Some("a".into()), connector: Some("nixl".into()), bye: true, ..vllm(role) };
            for ping in [plain, vllm(role), full] {
                assert_eq!(decode_ping(&encode_ping(&ping)), Ok(ping));
            }
        }
        let long = Ping { group: Some("a".repeat(65)), ..vllm(Role::Worker) };
        assert_eq!(decode_ping(&encode_ping(&long)), Err(PingError::LongWord { key: "group" }));
        let longer = Ping { http_address: "a".repeat(300), ..vllm(Role::Worker) };
        assert!(matches!(decode_ping(&encode_ping(&longer)), Err(PingError::Address { .. })));
    }

    const HTTP: (&str, &str) = ("http_address", "10.0.0.1:8100");
    const ZMQ: (&str, &str) = ("zmq_address", "[fe80::1]:21001");

    #[test]
    fn a_ping_says_what_an_engine_does_and_where() {
        let found = ping(&[("type", "P"), HTTP, ("model", "any"), ZMQ]).unwrap();
        assert_eq!(found, vllm(Role::Prefill));
        assert_eq!(ping(&[ZMQ, HTTP, ("type", "D")]).unwrap().role, Role::Decode);
    }

    #[test]
    fn each_wrong_thing_is_named() {
        assert_eq!(ping(&[("type", "X"), HTTP, ZMQ]), Err(PingError::Role { found: "X".into() }));
        assert_eq!(ping(&[HTTP, ZMQ]), Err(PingError::Missing { key: "type" }));
        assert_eq!(ping(&[("type", "P"), ZMQ]), Err(PingError::Missing { key: "http_address" }));
        assert_eq!(ping(&[("type", "P"), HTTP, HTTP]), Err(PingError::Twice { key: "http_address" }));
        assert_eq!(decode_ping(&[0; 1001]), Err(PingError::TooLong { bytes: 1001 }));
        assert!(matches!(decode(&Value::from("ping")), Err(PingError::Malformed(_))));
        let number = Value::Map(vec![("type".into(), 7.into())]);
        assert!(matches!(decode(&number), Err(PingError::Malformed(_))));
    }

    #[test]
    fn addresses_are_a_host_and_a_port() {
        let wrong = [
            "",
            ":",
            "host",
            "host:",
            ":80",
            "host:0",
            "host:65536",
            "host:+80",
            "a b:80",
            "fe80::1:80",
            "[x]:80",
        ];
        for address in
            wrong.into_iter().chain(["http://host:80", "host:80/path", "host\n:80", "user@host:80"])
        {
            let found = ping(&[("type", "P"), ("http_address", address), ZMQ]);
            let expected = PingError::Address { key: "http_address", found: address.to_owned() };
            assert_eq!(found, Err(expected), "{address}");
        }
        for address in ["localhost:80", "node-1.rack_2.example:65535", "[::1]:1"] {
            assert!(is_host_and_port(address), "{address}");
        }
    }

    proptest::proptest! {
        #[test]
        fn a_changed_byte_is_an_error_or_another_ping(at: proptest::sample::Index, to: u8) {
            let pairs = [("type", "P"), HTTP, ("model", "any"), ZMQ];
            let pairs = pairs.iter().map(|&(key, value)| (key.into(), value.into())).collect();
            let mut bytes = Vec::new();
            rmpv::encode::write_value(&mut bytes, &Value::Map(pairs)).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = to;
            if let Ok(ping) = decode_ping(&bytes) {
                assert!(is_host_and_port(&ping.http_address));
                assert!(ping.zmq_address.is_none_or(|address| is_host_and_port(&address)));
            }
            assert!(decode_ping(&bytes[..at]).is_err());
        }
    }
}
