//! [`Head`]: the head of a frame, which is a byte of flags and a length of one byte or eight.

use bytes::BufMut;

use crate::ProtocolError;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Bytes of the longest head: flags (1) and a long length (8).
pub(crate) const HEAD_BYTES_MAX: usize = 9;

/// The head of a frame, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The next frame belongs to the same message.
    pub(crate) more: bool,
    /// The body is a command, not a part of a message.
    pub(crate) command: bool,
    /// Announced length of the body, which may be false: check it before taking memory.
    pub(crate) length: u64,
}

/// Length of a head that begins with these flags, in bytes.
///
/// # Errors
/// [`ProtocolError::Flags`] for flags that ZMTP 3 does not have.
pub(crate) fn head_bytes(flags: u8) -> Result<usize, ProtocolError> {
    let known = flags & !(MORE | LONG | COMMAND) == 0;
    if !known || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(ProtocolError::Flags { flags });
    }
    Ok(if flags & LONG == 0 { 2 } else { HEAD_BYTES_MAX })
}

impl Head {
    /// Decodes a head; `None` while it is not whole.
    pub(crate) fn decode(received: &[u8]) -> Result<Option<Self>, ProtocolError> {
        let Some(&flags) = received.first() else { return Ok(None) };
        let Some(length) = received.get(1..head_bytes(flags)?) else { return Ok(None) };
        let length = length.iter().fold(0, |value, &byte| value << 8 | u64::from(byte));
        Ok(Some(Self { more: flags & MORE != 0, command: flags & COMMAND != 0, length }))
    }

    /// Appends the head, with a length of one byte if it fits.
    pub(crate) fn encode(self, into: &mut impl BufMut) {
        let flags = if self.more { MORE } else { 0 } | if self.command { COMMAND } else { 0 };
        if let Ok(short) = u8::try_from(self.length) {
            into.put_slice(&[flags, short]);
        } else {
            into.put_u8(flags | LONG);
            into.put_u64(self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_back_and_wait_until_they_are_whole() {
        for length in [0, 1, 255, 256, 1 << 40] {
            for (more, command) in [(false, false), (true, false), (false, true)] {
                let head = Head { more, command, length };
                let mut bytes = Vec::new();
                head.encode(&mut bytes);
                assert_eq!(bytes.len(), if length > 255 { 9 } else { 2 });
                assert_eq!(Head::decode(&bytes), Ok(Some(head)));
                assert_eq!(Head::decode(&bytes[..bytes.len() - 1]), Ok(None));
            }
        }
    }

    #[test]
    fn flags_that_do_not_exist_are_refused_before_a_length_came() {
        for flags in [0x05, 0x07, 0x08, 0x80, 0xff] {
            assert_eq!(Head::decode(&[flags]), Err(ProtocolError::Flags { flags }));
        }
    }
}
