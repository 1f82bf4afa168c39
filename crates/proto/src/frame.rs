//! Encodes messages as length-prefixed frames, and cuts a byte stream into messages.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use thiserror::Error;

/// Longest message that either side accepts. A lookup of four million hashes fits.
pub const MAX_FRAME_BYTES: usize = 64 << 20;

const PREFIX_BYTES: usize = 4;

/// Received bytes are no frame. The connection cannot be used any further.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The announced length is out of bounds. Most likely the peer speaks another protocol.
    #[error(
        "a frame announces {announced} bytes, more than the {most} that are allowed: is this a kvlane peer?"
    )]
    TooLong {
        /// The announced length of the message, in bytes.
        announced: u64,
        /// Longest message that this reader accepts.
        most: usize,
    },
    /// The message does not parse.
    #[error("a frame of {bytes} bytes is no kvlane message: {reason}")]
    Malformed {
        /// Length of the message.
        bytes: usize,
        /// From the protobuf decoder.
        reason: String,
    },
}

/// Encodes one message as a frame.
///
/// # Panics
/// If the message is longer than [`MAX_FRAME_BYTES`], which is a programmer's error.
pub fn encode_frame(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    assert!(length <= MAX_FRAME_BYTES, "a message of {length} bytes was to be sent");
    let mut frame = Vec::with_capacity(PREFIX_BYTES + length);
    frame.put_u32_le(length as u32);
    message.encode_raw(&mut frame);
    frame
}

/// Cuts a byte stream into messages. Its memory grows with the bytes that arrive, not with the announced length.
#[derive(Debug)]
pub struct FrameReader {
    buffer: BytesMut,
    /// Longest message that this reader accepts.
    most: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::with_max(MAX_FRAME_BYTES)
    }
}

impl FrameReader {
    /// Accepts messages of at most `most` bytes.
    pub fn with_max(most: usize) -> Self {
        Self { buffer: BytesMut::new(), most }
    }

    /// The buffer to append received bytes to, with room for at least `room` more.
    pub fn buffer(&mut self, room: usize) -> &mut BytesMut {
        self.buffer.reserve(room);
        &mut self.buffer
    }

    /// Appends received bytes.
    pub fn push(&mut self, received: &[u8]) {
        self.buffer.extend_from_slice(received);
    }

    /// Number of bytes missing to complete the frame that has begun: 0 if a whole frame has arrived, 1 if its length is still
    /// unknown.
    pub fn missing(&self) -> usize {
        match self.announced() {
            None => 1,
            Some(length) => (PREFIX_BYTES + length).saturating_sub(self.buffer.len()),
        }
    }

    /// The next whole message, if one has arrived.
    ///
    /// # Errors
    /// [`FrameError`], after which the connection must be closed.
    pub fn next_message<M: Message + Default>(&mut self) -> Result<Option<M>, FrameError> {
        let Some(length) = self.announced() else { return Ok(None) };
        if length > self.most {
            return Err(FrameError::TooLong { announced: length as u64, most: self.most });
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        let body: Bytes = self.buffer.split_to(length).freeze();
        M::decode(body)
            .map(Some)
            .map_err(|error| FrameError::Malformed { bytes: length, reason: error.to_string() })
    }

    fn announced(&self) -> Option<usize> {
        let prefix: [u8; PREFIX_BYTES] = self.buffer.get(..PREFIX_BYTES)?.try_into().ok()?;
        Some(u32::from_le_bytes(prefix) as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::v1::{Lookup, LookupGroup, Request, request};

    fn lookup(id: u64, hashes: Vec<u8>) -> Request {
        let groups = vec![LookupGroup { group: 0, hashes: hashes.into() }];
        Request {
            id,
            body: Some(request::Body::Lookup(Lookup { groups, max_tokens: 7, ..Default::default() })),
        }
    }

    #[test]
    fn a_length_from_another_protocol_is_refused() {
        let mut reader = FrameReader::default();
        reader.push(b"GET / HTTP/1.1\r\n");
        assert!(matches!(reader.next_message::<Request>(), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn a_reader_for_those_who_have_proven_nothing_takes_short_frames_only() {
        let mut reader = FrameReader::with_max(4096);
        reader.push(&encode_frame(&lookup(1, vec![7; 4000])));
        assert!(reader.next_message::<Request>().is_ok_and(|message| message.is_some()));
        reader.push(&4097u32.to_le_bytes());
        let error = reader.next_message::<Request>().unwrap_err();
        assert_eq!(error, FrameError::TooLong { announced: 4097, most: 4096 });
        assert!(error.to_string().contains("4096"), "{error}");
    }

    proptest! {
        #[test]
        fn messages_survive_any_fragmentation(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..8),
            cut in 1usize..64,
        ) {
            let sent: Vec<Request> =
                payloads.into_iter().enumerate().map(|(i, p)| lookup(i as u64, p)).collect();
            let stream: Vec<u8> = sent.iter().flat_map(encode_frame).collect();
            let mut reader = FrameReader::default();
            let mut received = Vec::new();
            for piece in stream.chunks(cut) {
                reader.push(piece);
                while let Some(message) = reader.next_message::<Request>().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert_eq!(reader.missing(), 1);
        }

        #[test]
        fn garbage_is_refused_or_parsed_but_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut reader = FrameReader::default();
            reader.push(&(noise.len() as u32).to_le_bytes());
            reader.push(&noise);
            let _ = reader.next_message::<Request>();
            let mut raw = FrameReader::default();
            raw.push(&noise);
            while let Ok(Some(_)) = raw.next_message::<Request>() {}
        }
    }
}
