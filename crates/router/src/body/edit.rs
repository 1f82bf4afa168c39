//! Edits of a body's members. All other bytes keep their values and their order.

use std::{borrow::Cow, ops::Range};

use super::scan::{Member, Scan};

/// What becomes of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    /// It has this value, which is JSON; a member that is not there is added at the end.
    Set(&'a str, &'a str),
    /// It goes, if it is there.
    Remove(&'a str),
}

impl Change<'_> {
    fn name(&self) -> &str {
        match self {
            Change::Set(name, _) | Change::Remove(name) => name,
        }
    }
}

/// An edited body in pieces: slices of the client's body, and new bytes between them. A copy of a long body for each leg would
/// multiply its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edited<'b> {
    body: &'b [u8],
    pieces: Vec<Cow<'b, [u8]>>,
    /// Range that was kept last and is not yet a piece.
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

/// The body with these changes, at most one for each name. Names that are added need no escapes.
pub fn edit<'b>(scan: &Scan<'b>, changes: &[Change<'_>]) -> Edited<'b> {
    let body = scan.body();
    let object = scan.object();
    let mut edited = Edited { body, pieces: Vec::new(), kept: 0..0 };
    let change_of = |name: &str| changes.iter().find(|change| change.name() == name);
    let first_key = scan.all().next().map_or(object.start + 1, |(_, member)| member.key.start);
    edited.keep(0..object.start + 1);
    let mut is_first = true;
    let mut end_before = object.start + 1;
    for (name, Member { key, value }) in scan.all() {
        let change = change_of(name);
        if !matches!(change, Some(Change::Remove(_))) {
            // The space behind the bracket, or the comma with the space around it.
            let from = if is_first { object.start + 1..first_key } else { end_before..key.start };
            is_first = false;
            edited.keep(from);
            match change {
                Some(Change::Set(_, new)) => {
                    edited.keep(key.start..value.start);
                    edited.add(new.as_bytes());
                }
                _ => edited.keep(key.start..value.end),
            }
        }
        end_before = value.end;
    }
    for change in changes {
        let Change::Set(name, value) = change else { continue };
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
