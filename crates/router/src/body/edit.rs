//! Edits of a body's members. All other bytes keep their values and their order.

use std::{borrow::Cow, ops::Range};

use super::scan::{BodyMember, Scan};

/// A change of one member of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyChange<'a> {
    /// Gives the member of this name this value, which is JSON. Appends the member if there is none.
    Set(&'a str, &'a str),
    /// Removes the member of this name, if there is one.
    Remove(&'a str),
}

impl BodyChange<'_> {
    fn name(&self) -> &str {
        match self {
            BodyChange::Set(name, _) | BodyChange::Remove(name) => name,
        }
    }
}

/// An edited body in pieces: slices of the client's body, and new bytes between them. A copy of a long body for each leg would
/// multiply its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edited<'b> {
    body: &'b [u8],
    pieces: Vec<Cow<'b, [u8]>>,
    /// Kept range at the end, which is not yet a piece.
    kept: Range<usize>,
}

impl<'b> Edited<'b> {
    fn keep(&mut self, range: Range<usize>) {
        if range.start != self.kept.end {
            self.cut();
            self.kept.start = range.start;
        }
        self.kept.end = range.end;
    }

    fn add(&mut self, new: &[u8]) {
        self.cut();
        match self.pieces.last_mut() {
            Some(Cow::Owned(last)) => last.extend_from_slice(new),
            _ => self.pieces.push(Cow::Owned(new.to_vec())),
        }
    }

    fn cut(&mut self) {
        if !self.kept.is_empty() {
            self.pieces.push(Cow::Borrowed(&self.body[self.kept.clone()]));
        }
        self.kept.start = self.kept.end;
    }

    /// The pieces in their order; none is empty.
    pub fn pieces(self) -> Vec<Cow<'b, [u8]>> {
        self.pieces
    }

    /// All pieces in one copy.
    pub fn to_vec(&self) -> Vec<u8> {
        self.pieces.concat()
    }
}

/// Applies these changes, at most one for each name. Added names contain no character that JSON escapes.
pub fn edit<'b>(scan: &Scan<'b>, changes: &[BodyChange<'_>]) -> Edited<'b> {
    let body = scan.body();
    let object = scan.object();
    let mut edited = Edited { body, pieces: Vec::new(), kept: 0..0 };
    let change_of = |name: &str| changes.iter().find(|change| change.name() == name);
    let first_key = scan.all().next().map_or(object.start + 1, |(_, member)| member.key.start);
    edited.keep(0..object.start + 1);
    let mut is_first = true;
    let mut end_before = object.start + 1;
    for (name, BodyMember { key, value }) in scan.all() {
        let change = change_of(name);
        if !matches!(change, Some(BodyChange::Remove(_))) {
            // The space behind the bracket, or the comma with the space around it.
            let from = if is_first { object.start + 1..first_key } else { end_before..key.start };
            is_first = false;
            edited.keep(from);
            match change {
                Some(BodyChange::Set(_, new)) => {
                    edited.keep(key.start..value.start);
                    edited.add(new.as_bytes());
                }
                _ => edited.keep(key.start..value.end),
            }
        }
        end_before = value.end;
    }
    for change in changes {
        let BodyChange::Set(name, value) = change else { continue };
        if scan.member(name).is_none() {
            if !is_first {
                edited.add(b", ");
            }
            is_first = false;
            edited.add(format!("\"{name}\": {value}").as_bytes());
        }
    }
    edited.keep(end_before..body.len());
    edited.cut();
    edited
}
