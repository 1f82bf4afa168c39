//! The body of a leg's request.

use std::borrow::Cow;

use bytes::Bytes;

use crate::body::Edited;

/// Pieces of a body, in their order. Unchanged pieces are slices of the client's body, so a leg does not copy it.
#[derive(Debug, Clone, Default)]
pub(super) struct Outgoing {
    pub(super) first: Bytes,
    /// The other pieces. Empty if nothing was changed, and then without memory.
    pub(super) later: Vec<Bytes>,
}

impl Outgoing {
    /// Applies an edit to this body.
    pub(super) fn edited(body: &Bytes, edited: Edited<'_>) -> Self {
        let mut pieces = edited.pieces().into_iter().map(|piece| match piece {
            Cow::Borrowed(kept) => body.slice_ref(kept),
            Cow::Owned(new) => new.into(),
        });
        Self { first: pieces.next().unwrap_or_default(), later: pieces.collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.later.iter().map(Bytes::len).sum::<usize>()
    }
}

impl From<Bytes> for Outgoing {
    fn from(body: Bytes) -> Self {
        Self { first: body, later: Vec::new() }
    }
}
