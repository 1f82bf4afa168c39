//! A request's body on its way to a node.

use std::borrow::Cow;

use bytes::Bytes;

use crate::body::Edited;

/// Pieces that are sent one after the other. Unchanged pieces are slices of the client's body, so a leg does not copy it.
#[derive(Debug, Clone, Default)]
pub(super) struct Outgoing {
    pub(super) first: Bytes,
    /// Empty if nothing was changed, so that this costs no memory.
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
