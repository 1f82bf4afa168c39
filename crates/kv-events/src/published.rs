//! The frames of a message with events, and the request for messages that were published before.

use thiserror::Error;

/// A message of an engine's publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published<'a> {
    /// The topic from the engine's options.
    pub topic: &'a [u8],
    /// The message's number: 0 at the engine's start, and one more with each message.
    pub sequence: u64,
    /// For [`crate::decode_batch`].
    pub payload: &'a [u8],
}

/// An answer of an engine's replay socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replayed<'a> {
    /// A message that was published before.
    Batch {
        /// The number under which it was published.
        sequence: u64,
        /// For [`crate::decode_batch`].
        payload: &'a [u8],
    },
    /// The replay is complete.
    End,
}

/// Why a message's frames are not those of KV events.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum FramesError {
    /// There are more frames, or fewer.
    #[error("a message has {found} frames, not 3")]
    Count {
        /// Frames of the message.
        found: usize,
    },
    /// The number does not have eight bytes.
    #[error("a message's number has {bytes} bytes, not 8")]
    Sequence {
        /// Length of the number's frame.
        bytes: usize,
    },
    /// The number is negative, and not -1.
    #[error("a message's number is {value}")]
    Negative {
        /// The eight bytes as two's complement.
        value: i64,
    },
    /// An answer does not begin with an empty frame.
    #[error("an answer's first frame has {bytes} bytes, not 0")]
    Delimiter {
        /// Length of the first frame.
        bytes: usize,
    },
}

impl<'a> Published<'a> {
    /// Reads `[topic, number, payload]`.
    ///
    /// # Errors
    /// [`FramesError`].
    pub fn of_frames<Frame: AsRef<[u8]>>(frames: &'a [Frame]) -> Result<Self, FramesError> {
        let [topic, number, payload] = three(frames)?;
        let number = sequence(number)?;
        let sequence = u64::try_from(number).map_err(|_| FramesError::Negative { value: number })?;
        Ok(Self { topic, sequence, payload })
    }
}

impl<'a> Replayed<'a> {
    /// Reads `[empty, number, payload]`. The last answer of a replay has the number -1.
    ///
    /// # Errors
    /// [`FramesError`].
    pub fn of_frames<Frame: AsRef<[u8]>>(frames: &'a [Frame]) -> Result<Self, FramesError> {
        let [delimiter, number, payload] = three(frames)?;
        if !delimiter.is_empty() {
            return Err(FramesError::Delimiter { bytes: delimiter.len() });
        }
        match sequence(number)? {
            -1 => Ok(Self::End),
            value => {
                let sequence = u64::try_from(value).map_err(|_| FramesError::Negative { value })?;
                Ok(Self::Batch { sequence, payload })
            }
        }
    }
}

/// The frames of a request to a replay socket, for all messages that it still has from the number `from` on.
pub fn replay_request(from: u64) -> [Vec<u8>; 2] {
    [Vec::new(), from.to_be_bytes().to_vec()]
}

fn three<Frame: AsRef<[u8]>>(frames: &[Frame]) -> Result<[&[u8]; 3], FramesError> {
    match frames {
        [first, second, third] => Ok([first.as_ref(), second.as_ref(), third.as_ref()]),
        _ => Err(FramesError::Count { found: frames.len() }),
    }
}

fn sequence(frame: &[u8]) -> Result<i64, FramesError> {
    frame.try_into().map(i64::from_be_bytes).map_err(|_| FramesError::Sequence { bytes: frame.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEVEN: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 7];
    const END: &[u8] = &[0xff; 8];

    #[test]
    fn frames_are_read() {
        let found = Published::of_frames(&[b"kv@pod", SEVEN, b"payload"]);
        assert_eq!(found, Ok(Published { topic: b"kv@pod", sequence: 7, payload: b"payload" }));
        let found = Replayed::of_frames(&[b"", SEVEN, b"payload"]);
        assert_eq!(found, Ok(Replayed::Batch { sequence: 7, payload: b"payload" }));
        assert_eq!(Replayed::of_frames(&[b"", END, b""]), Ok(Replayed::End));
        assert_eq!(replay_request(7), [b"", SEVEN]);
    }

    #[test]
    fn other_frames_are_refused() {
        assert_eq!(Published::of_frames(&[SEVEN]), Err(FramesError::Count { found: 1 }));
        assert_eq!(Published::of_frames(&[b"", &SEVEN[1..], b""]), Err(FramesError::Sequence { bytes: 7 }));
        assert_eq!(Published::of_frames(&[b"", END, b""]), Err(FramesError::Negative { value: -1 }));
        assert_eq!(Replayed::of_frames(&[b"x", SEVEN, b""]), Err(FramesError::Delimiter { bytes: 1 }));
    }
}
