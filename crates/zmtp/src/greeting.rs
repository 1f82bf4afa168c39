//! [`Greeting`]: the first 64 bytes of either side, with the protocol's version and the security mechanism.

use crate::ProtocolError;
use crate::error::printable;

/// Bytes of a whole greeting.
pub const GREETING_BYTES: usize = 64;

const SIGNATURE_END: usize = 9;
const MAJOR: usize = 10;
const MINOR: usize = 11;
const MECHANISM: std::ops::Range<usize> = 12..32;
const AS_SERVER: usize = 32;
const NULL: &[u8] = b"NULL";

/// A greeting with the mechanism NULL, the only one that we support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Minor number of version 3. A peer of a later major version counts as 3.1, because it has to speak ours.
    pub minor: u8,
    /// The bit by which the sender is the server of its mechanism. With NULL it means nothing.
    pub as_server: bool,
}

impl Greeting {
    /// The greeting that we send: version 3.1.
    pub const OURS: Self = Self { minor: 1, as_server: false };

    /// The greeting's bytes on the wire.
    pub fn encode(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[0] = 0xff;
        bytes[SIGNATURE_END] = 0x7f;
        bytes[MAJOR] = 3;
        bytes[MINOR] = self.minor;
        bytes[MECHANISM.start..MECHANISM.start + NULL.len()].copy_from_slice(NULL);
        bytes[AS_SERVER] = u8::from(self.as_server);
        bytes
    }

    /// Decodes the bytes received so far; `None` while the greeting is not whole. Recognises a peer of another protocol
    /// by its first bytes, because it may never send 64.
    ///
    /// # Errors
    /// [`ProtocolError`] for other protocols, versions before 3.0, and mechanisms other than NULL.
    pub fn decode(received: &[u8]) -> Result<Option<Self>, ProtocolError> {
        if let Some(&first) = received.first()
            && first != 0xff
        {
            return Err(ProtocolError::NotZmtp { first });
        }
        // Skip the eight bytes between, a length for ZMTP 1.0: libzmq writes one there, other implementations zeros.
        if let Some(&byte) = received.get(SIGNATURE_END)
            && byte != 0x7f
        {
            return Err(ProtocolError::Signature { byte });
        }
        if let Some(&revision) = received.get(MAJOR)
            && revision < 3
        {
            return Err(ProtocolError::OldVersion { revision });
        }
        let Some(whole) = received.get(..GREETING_BYTES) else { return Ok(None) };
        let mechanism = &whole[MECHANISM];
        let (name, padding) = mechanism.split_at(NULL.len());
        if name != NULL || padding.iter().any(|&byte| byte != 0) {
            let end = mechanism.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
            return Err(ProtocolError::Mechanism { name: printable(&mechanism[..end]) });
        }
        let minor = if whole[MAJOR] > 3 { Self::OURS.minor } else { whole[MINOR] };
        Ok(Some(Self { minor, as_server: whole[AS_SERVER] & 1 == 1 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(change: impl FnOnce(&mut [u8; GREETING_BYTES])) -> Result<Option<Greeting>, ProtocolError> {
        let mut bytes = Greeting::OURS.encode();
        change(&mut bytes);
        Greeting::decode(&bytes)
    }

    #[test]
    fn a_greeting_is_read_back_once_it_is_whole() {
        let bytes = Greeting { minor: 0, as_server: true }.encode();
        for some in 0..GREETING_BYTES {
            assert_eq!(Greeting::decode(&bytes[..some]), Ok(None));
        }
        assert_eq!(Greeting::decode(&bytes), Ok(Some(Greeting { minor: 0, as_server: true })));
    }

    #[test]
    fn other_protocols_and_versions_are_told_by_their_first_bytes() {
        assert_eq!(Greeting::decode(b"GET /"), Err(ProtocolError::NotZmtp { first: b'G' }));
        assert_eq!(Greeting::decode(b"\xff\0\0\0\0\0\0\0\x05\0"), Err(ProtocolError::Signature { byte: 0 }));
        let second = b"\xff\0\0\0\0\0\0\0\x01\x7f\x01";
        assert_eq!(Greeting::decode(second), Err(ProtocolError::OldVersion { revision: 1 }));
    }

    #[test]
    fn mechanisms_other_than_null_are_named() {
        for name in ["CURVE", "PLAIN", "NULLS", "null"] {
            let found = with(|bytes| {
                bytes[MECHANISM].fill(0);
                bytes[12..12 + name.len()].copy_from_slice(name.as_bytes());
            });
            assert_eq!(found, Err(ProtocolError::Mechanism { name: name.to_owned() }));
        }
    }

    #[test]
    fn a_later_major_version_counts_as_ours() {
        let found = with(|bytes| {
            bytes[MAJOR] = 4;
            bytes[MINOR] = 0;
        });
        assert_eq!(found, Ok(Some(Greeting::OURS)));
    }
}
