//! Parses the bytes that a node sends: the head of its answer, then the data of the body.

use std::io;

use bytes::Bytes;

use super::upstream_error::UpstreamError;
use crate::answers::{AnswerError, Framing, HEAD_BYTES_MAX, Head, head, head_ends};

/// Heads with a status below 200 that may come before an answer.
const INTERIM_MAX: usize = 16;

/// The part of a body that arrived together with its head.
pub(super) struct Early {
    pub(super) data: Bytes,
    /// Bytes arrived that do not belong to the answer.
    pub(super) has_surplus: bool,
}

/// Parses a head that arrives in pieces.
#[derive(Default)]
pub(super) struct HeadReading {
    /// An incomplete head.
    gathered: Vec<u8>,
    /// Interim heads so far.
    interim: usize,
}

impl HeadReading {
    /// Takes the bytes of one read: none at the connection's end. Returns the head once it is complete.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Option<(Head, Early)>, UpstreamError> {
        if bytes.is_empty() {
            return Err(if self.has_begun() { UpstreamError::Cut } else { UpstreamError::Closed });
        }
        let searched = self.gathered.len();
        if searched == 0 {
            return self.find(bytes);
        }
        self.gathered.extend_from_slice(bytes);
        if head_ends(&self.gathered, searched).is_none() {
            let is_too_long = self.gathered.len() > HEAD_BYTES_MAX;
            return if is_too_long { Err(AnswerError::HeadTooLong(HEAD_BYTES_MAX).into()) } else { Ok(None) };
        }
        let gathered = std::mem::take(&mut self.gathered);
        self.find(&gathered)
    }

    /// Finds the answer's head behind interim heads, which have a status below 200.
    fn find(&mut self, mut bytes: &[u8]) -> Result<Option<(Head, Early)>, UpstreamError> {
        while !bytes.is_empty() {
            let Some((mut head, length)) = head(bytes)? else {
                self.gathered = bytes.to_vec();
                return Ok(None);
            };
            bytes = &bytes[length..];
            if !head.status.is_informational() {
                let (data, taken) = data_of(&mut head.framing, bytes)?;
                return Ok(Some((head, Early { data, has_surplus: taken < bytes.len() })));
            }
            self.interim += 1;
            if self.interim > INTERIM_MAX {
                return Err(AnswerError::HeadTooLong(HEAD_BYTES_MAX).into());
            }
        }
        Ok(None)
    }

    fn has_begun(&self) -> bool {
        !self.gathered.is_empty() || self.interim > 0
    }

    /// The error for a read that failed: before the answer, or within it.
    pub(super) fn failed(&self, error: io::Error) -> UpstreamError {
        if self.has_begun() { UpstreamError::Broken(error) } else { UpstreamError::Failed(error) }
    }
}

/// The data among these bytes, in one piece, and how many of the bytes belong to the answer.
pub(super) fn data_of(framing: &mut Framing, bytes: &[u8]) -> Result<(Bytes, usize), AnswerError> {
    let (mut first, mut joined): (&[u8], Vec<u8>) = (&[], Vec::new());
    let taken = framing.take(bytes, |piece| {
        if first.is_empty() {
            first = piece;
            return;
        }
        if joined.is_empty() {
            joined.reserve(bytes.len());
            joined.extend_from_slice(first);
        }
        joined.extend_from_slice(piece);
    })?;
    Ok((if joined.is_empty() { Bytes::copy_from_slice(first) } else { joined.into() }, taken))
}
