//! Changes of a body's members. All other bytes stay as they came.

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

/// The body with these changes, at most one for each name. Names that are added need no escapes.
pub fn edit(scan: &Scan<'_>, changes: &[Change<'_>]) -> Vec<u8> {
    let body = scan.body();
    let object = scan.object();
    let added: usize = changes.iter().map(|change| change.name().len() + 8).sum();
    let mut edited = Vec::with_capacity(body.len() + added + 64);
    let change_of = |name: &str| changes.iter().find(|change| change.name() == name);
    let first_key = scan.all().next().map_or(object.start + 1, |(_, member)| member.key.start);
    edited.extend_from_slice(&body[..=object.start]);
    let mut is_first = true;
    let mut end_before = object.start + 1;
    for (name, Member { key, value }) in scan.all() {
        let change = change_of(name);
        if !matches!(change, Some(Change::Remove(_))) {
            // The space behind the bracket, or the comma with the space around it.
            let from = if is_first { object.start + 1..first_key } else { end_before..key.start };
            is_first = false;
            edited.extend_from_slice(&body[from]);
            match change {
                Some(Change::Set(_, new)) => {
                    edited.extend_from_slice(&body[key.start..value.start]);
                    edited.extend_from_slice(new.as_bytes());
                }
                _ => edited.extend_from_slice(&body[key.start..value.end]),
            }
        }
        end_before = value.end;
    }
    for change in changes {
        let Change::Set(name, value) = change else { continue };
        if scan.member(name).is_none() {
            if !is_first {
                edited.extend_from_slice(b", ");
            }
            is_first = false;
            edited.extend_from_slice(format!("\"{name}\": {value}").as_bytes());
        }
    }
    edited.extend_from_slice(&body[end_before..]);
    edited
}
