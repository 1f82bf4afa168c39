//! [`Command`]: encodes and decodes commands, which are frames with a name and data.

use bytes::{BufMut, Bytes};

use crate::ProtocolError;
use crate::error::printable;
use crate::frame::Head;

const PING_TTL_BYTES: usize = 2;
const CONTEXT_BYTES_MAX: usize = 16;
const SOCKET_TYPE: &str = "Socket-Type";
const IDENTITY: &str = "Identity";

/// A command of the peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// READY, with the properties of its metadata that we use; a missing one is empty.
    Ready { socket_type: Bytes, identity: Bytes },
    /// ERROR, with its reason as printable text.
    Error(String),
    /// SUBSCRIBE, with the topic's prefix.
    Subscribe(Bytes),
    /// CANCEL, with the topic's prefix.
    Cancel(Bytes),
    /// PING, with the context that the PONG repeats.
    Ping(Bytes),
    /// PONG, or a command of other kinds of sockets.
    Other,
}

impl Command {
    /// Decodes the body of a command frame.
    pub(crate) fn decode(mut body: Bytes) -> Result<Self, ProtocolError> {
        let name = short_string(&mut body, "without a name", "it ends within its name")?;
        Ok(match &name[..] {
            b"READY" => ready(body)?,
            b"ERROR" => {
                Self::Error(printable(&short_string(&mut body, "ERROR", "it ends within its reason")?))
            }
            b"SUBSCRIBE" => Self::Subscribe(body),
            b"CANCEL" => Self::Cancel(body),
            b"PING" if body.len() < PING_TTL_BYTES => {
                return Err(malformed("PING", "it has no time to live"));
            }
            b"PING" if body.len() > PING_TTL_BYTES + CONTEXT_BYTES_MAX => {
                return Err(malformed("PING", "its context has more than 16 bytes"));
            }
            b"PING" => Self::Ping(body.slice(PING_TTL_BYTES..)),
            _ => Self::Other,
        })
    }
}

fn ready(mut body: Bytes) -> Result<Command, ProtocolError> {
    let (mut socket_type, mut identity) = (Bytes::new(), Bytes::new());
    while !body.is_empty() {
        let name = short_string(&mut body, "READY", "it ends within a property's name")?;
        if name.is_empty() {
            return Err(malformed("READY", "a property has no name"));
        }
        let Some((length, _)) = body.split_first_chunk::<4>() else {
            return Err(malformed("READY", "it ends within a property's length"));
        };
        let length = u32::from_be_bytes(*length) as usize;
        drop(body.split_to(4));
        if length > body.len() {
            return Err(malformed("READY", "a property is longer than the command"));
        }
        let value = body.split_to(length);
        if name.eq_ignore_ascii_case(SOCKET_TYPE.as_bytes()) {
            socket_type = value;
        } else if name.eq_ignore_ascii_case(IDENTITY.as_bytes()) {
            identity = value;
        }
    }
    Ok(Command::Ready { socket_type, identity })
}

/// Splits a string with a one-byte length off the front of `body`.
fn short_string(
    body: &mut Bytes,
    command: &'static str,
    reason: &'static str,
) -> Result<Bytes, ProtocolError> {
    let Some(&length) = body.first() else { return Err(malformed(command, reason)) };
    let end = 1 + usize::from(length);
    if end > body.len() {
        return Err(malformed(command, reason));
    }
    Ok(body.split_to(end).slice(1..))
}

fn malformed(command: &'static str, reason: &'static str) -> ProtocolError {
    ProtocolError::MalformedCommand { command, reason }
}

/// Appends a READY command with our socket type and identity.
pub(crate) fn encode_ready(socket_type: &str, identity: &[u8], into: &mut impl BufMut) {
    let mut metadata = Vec::new();
    for (name, value) in [(SOCKET_TYPE, socket_type.as_bytes()), (IDENTITY, identity)] {
        metadata.push(name.len() as u8);
        metadata.extend(name.as_bytes());
        metadata.extend((value.len() as u32).to_be_bytes());
        metadata.extend(value);
    }
    encode("READY", &metadata, into);
}

/// Appends a command frame.
pub(crate) fn encode(name: &str, data: &[u8], into: &mut impl BufMut) {
    let length = (1 + name.len() + data.len()) as u64;
    Head { more: false, command: true, length }.encode(into);
    into.put_u8(name.len() as u8);
    into.put_slice(name.as_bytes());
    into.put_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(body: &'static [u8]) -> Result<Command, ProtocolError> {
        Command::decode(Bytes::from_static(body))
    }

    #[test]
    fn names_of_properties_may_be_in_any_case_and_unknown_ones_are_left_alone() {
        let body = b"\x05READY\x0bsocket-TYPE\0\0\0\x03SUB\x01x\0\0\0\0";
        let expected = Command::Ready { socket_type: Bytes::from_static(b"SUB"), identity: Bytes::new() };
        assert_eq!(decode(body), Ok(expected));
    }

    #[test]
    fn what_ends_too_early_is_malformed() {
        let bodies: [&[u8]; 6] = [
            b"",
            b"\x05REA",
            b"\x05READY\x0bSocket",
            b"\x05READY\x01x\0\0",
            b"\x05READY\x01x\xff\xff\xff\xff",
            b"\x05READY\0\0\0\0\0",
        ];
        for body in bodies {
            assert!(matches!(decode(body), Err(ProtocolError::MalformedCommand { .. })), "{body:?}");
        }
    }

    #[test]
    fn the_context_of_a_ping_has_at_most_16_bytes() {
        assert_eq!(
            decode(b"\x04PING\0\x320123456789abcdef"),
            Ok(Command::Ping(b"0123456789abcdef"[..].into()))
        );
        assert!(decode(b"\x04PING\0\x320123456789abcdefg").is_err());
        assert!(decode(b"\x04PING\0").is_err());
    }
}
