//! The ping of a P2P NCCL engine, which tells a router where the engine is.

use thiserror::Error;

use crate::DecodeError;
use crate::reader::Reader;

/// The most bytes of a ping.
pub const MOST_PING_BYTES: usize = 1000;

const MOST_DEPTH: usize = 4;
const MOST_SHOWN: usize = 32;

/// What an engine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// It computes prompts: type "P".
    Prefill,
    /// It computes answers: type "D".
    Decode,
}

/// Where an engine is, by its own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ping {
    /// What the engine does.
    pub role: Role,
    /// Where it serves HTTP, `host:port`.
    pub http_address: String,
    /// Where other engines reach it for KV, `host:port`.
    pub zmq_address: String,
}

/// Why a message is no ping.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PingError {
    /// The message is too long.
    #[error("a ping has {bytes} bytes, more than the {MOST_PING_BYTES} that are allowed")]
    TooLong {
        /// The message's bytes.
        bytes: usize,
    },
    /// The message is no MessagePack map of texts.
    #[error("a ping cannot be read: {0}")]
    Malformed(#[from] DecodeError),
    /// A key is not there.
    #[error("a ping has no {key}")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A key is there twice.
    #[error("a ping has {key} twice")]
    Twice {
        /// The key.
        key: &'static str,
    },
    /// The type is neither "P" nor "D".
    #[error("a ping has the type {found:?}, neither \"P\" nor \"D\"")]
    Role {
        /// The type, at most 32 characters of it.
        found: String,
    },
    /// An address is not `host:port`.
    #[error("a ping has the {key} {found:?}, which is no host:port")]
    Address {
        /// The address's key.
        key: &'static str,
        /// The address, at most 32 characters of it.
        found: String,
    },
}

/// Reads `{"type": "P" or "D", "http_address": "host:port", "zmq_address": "host:port"}`. Other keys are passed over.
///
/// # Errors
/// [`PingError`].
pub fn decode_ping(message: &[u8]) -> Result<Ping, PingError> {
    if message.len() > MOST_PING_BYTES {
        return Err(PingError::TooLong { bytes: message.len() });
    }
    let mut reader = Reader::new(message);
    let (mut role, mut http, mut zmq) = (None, None, None);
    for _ in 0..reader.map("a ping")? {
        let (key, place) = match reader.text("a ping's key")? {
            "type" => ("type", &mut role),
            "http_address" => ("http_address", &mut http),
            "zmq_address" => ("zmq_address", &mut zmq),
            _ => {
                reader.skip(MOST_DEPTH)?;
                continue;
            }
        };
        if place.replace(reader.text(key)?).is_some() {
            return Err(PingError::Twice { key });
        }
    }
    reader.end()?;
    let role = match role.ok_or(PingError::Missing { key: "type" })? {
        "P" => Role::Prefill,
        "D" => Role::Decode,
        other => return Err(PingError::Role { found: shown(other) }),
    };
    let http_address = address("http_address", http)?;
    Ok(Ping { role, http_address, zmq_address: address("zmq_address", zmq)? })
}

fn shown(text: &str) -> String {
    text.chars().take(MOST_SHOWN).collect()
}

fn address(key: &'static str, found: Option<&str>) -> Result<String, PingError> {
    let address = found.ok_or(PingError::Missing { key })?;
    if is_host_and_port(address) {
        Ok(address.to_owned())
    } else {
        Err(PingError::Address { key, found: shown(address) })
    }
}

/// A name, an IPv4 address or an IPv6 address in brackets, then a port from 1 on.
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

    const HTTP: (&str, &str) = ("http_address", "10.0.0.1:8100");
    const ZMQ: (&str, &str) = ("zmq_address", "[fe80::1]:21001");

    #[test]
    fn a_ping_says_what_an_engine_does_and_where() {
        let found = ping(&[("type", "P"), HTTP, ("model", "any"), ZMQ]).unwrap();
        let (http_address, zmq_address) = (HTTP.1.to_owned(), ZMQ.1.to_owned());
        assert_eq!(found, Ping { role: Role::Prefill, http_address, zmq_address });
        assert_eq!(ping(&[ZMQ, HTTP, ("type", "D")]).unwrap().role, Role::Decode);
    }

    #[test]
    fn each_wrong_thing_is_named() {
        assert_eq!(ping(&[("type", "X"), HTTP, ZMQ]), Err(PingError::Role { found: "X".into() }));
        assert_eq!(ping(&[HTTP, ZMQ]), Err(PingError::Missing { key: "type" }));
        assert_eq!(ping(&[("type", "P"), HTTP]), Err(PingError::Missing { key: "zmq_address" }));
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
                assert!(is_host_and_port(&ping.http_address) && is_host_and_port(&ping.zmq_address));
            }
            assert!(decode_ping(&bytes[..at]).is_err());
        }
    }
}
