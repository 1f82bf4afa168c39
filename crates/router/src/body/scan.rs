//! One pass over a body: its members, and the messages in it.

use std::{borrow::Cow, collections::HashSet, ops::Range};

use super::{error::BodyError, json::Cursor};

/// So many members are compared with each new one; of more, a table of names is made.
const MEMBERS_COMPARED: usize = 32;

/// A member of the body: `"key": value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its name with quotes and escapes, as it stands in the body.
    pub key: Range<usize>,
    /// Its value, whatever it is.
    pub value: Range<usize>,
}

/// What stands where in a body, which is one valid JSON object.
#[derive(Debug, Clone)]
pub struct Scan<'b> {
    body: &'b [u8],
    members: Vec<(Cow<'b, str>, Member)>,
    messages: Vec<Range<usize>>,
    /// The object, from its first to its last bracket.
    object: Range<usize>,
}

/// Walks over a body once.
///
/// # Errors
/// It is not one JSON object, or names a member twice, or is nested too deep.
pub fn scan(body: &[u8]) -> Result<Scan<'_>, BodyError> {
    std::str::from_utf8(body).map_err(|error| BodyError::NotUtf8 { at: error.valid_up_to() })?;
    let mut cursor = Cursor::new(body);
    cursor.skip_space();
    let start = cursor.at();
    let is_object = cursor.peek() == Some(b'{');
    let mut scan = Scan { body, members: Vec::new(), messages: Vec::new(), object: start..start };
    if is_object {
        scan.members(&mut cursor)?;
    } else {
        cursor.value()?;
    }
    scan.object.end = cursor.at();
    cursor.skip_space();
    if cursor.at() < body.len() {
        return cursor.wrong("the end of the body");
    }
    if is_object { Ok(scan) } else { Err(BodyError::NotAnObject) }
}

impl<'b> Scan<'b> {
    fn members(&mut self, cursor: &mut Cursor<'_>) -> Result<(), BodyError> {
        cursor.enter(true)?;
        let mut names = HashSet::new();
        while !self.members.is_empty() || cursor.peek() != Some(b'}') {
            let key = cursor.key()?;
            let name = name(self.body, &key);
            let is_twice = if self.members.len() < MEMBERS_COMPARED {
                self.member(&name).is_some()
            } else {
                if names.is_empty() {
                    names.extend(self.members.iter().map(|(name, _)| name.clone()));
                }
                !names.insert(name.clone())
            };
            if is_twice {
                return Err(BodyError::Twice { key: name.into_owned(), at: key.start });
            }
            let value = if name == "messages" && cursor.peek() == Some(b'[') {
                self.messages(cursor)?
            } else {
                cursor.value()?
            };
            self.members.push((name, Member { key, value }));
            cursor.skip_space();
            if cursor.peek() == Some(b'}') {
                break;
            }
            if !cursor.takes(b',') {
                return cursor.wrong("`,` or `}`");
            }
            cursor.skip_space();
        }
        cursor.leave();
        Ok(())
    }

    fn messages(&mut self, cursor: &mut Cursor<'_>) -> Result<Range<usize>, BodyError> {
        let start = cursor.at();
        cursor.enter(false)?;
        while !self.messages.is_empty() || cursor.peek() != Some(b']') {
            self.messages.push(cursor.value()?);
            cursor.skip_space();
            if cursor.peek() == Some(b']') {
                break;
            }
            if !cursor.takes(b',') {
                return cursor.wrong("`,` or `]`");
            }
            cursor.skip_space();
        }
        cursor.leave();
        Ok(start..cursor.at())
    }

    /// The bytes that were scanned.
    pub fn body(&self) -> &'b [u8] {
        self.body
    }

    /// The member of that name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|(of, _)| of == name).map(|(_, member)| member)
    }

    /// All members in their order, by name.
    pub fn all(&self) -> impl Iterator<Item = (&str, &Member)> {
        self.members.iter().map(|(name, member)| (name.as_ref(), member))
    }

    /// The value of a member as it stands in the body.
    pub fn raw(&self, name: &str) -> Option<&'b [u8]> {
        self.member(name).map(|member| &self.body[member.value.clone()])
    }

    /// The value of a member that is a string; `None` if there is none, or it is something else.
    pub fn string(&self, name: &str) -> Option<Cow<'b, str>> {
        let value = &self.member(name)?.value;
        (self.body[value.start] == b'"').then(|| self::name(self.body, value))
    }

    /// Whether a member is `true`.
    pub fn is_true(&self, name: &str) -> bool {
        self.raw(name) == Some(b"true")
    }

    /// Elements of `messages`; none where that is no array.
    pub fn messages_of_chat(&self) -> &[Range<usize>] {
        &self.messages
    }

    /// The object itself, without the space around it.
    pub(super) fn object(&self) -> Range<usize> {
        self.object.clone()
    }
}

/// The first member of an object, which is part of a scanned body, whose name is wanted. None too where the value is no object.
pub fn find_member(object: &[u8], is_wanted: impl Fn(&str) -> bool) -> Option<Cow<'_, str>> {
    let mut cursor = Cursor::new(object);
    if cursor.peek() != Some(b'{') {
        return None;
    }
    cursor.enter(true).ok()?;
    while cursor.peek() == Some(b'"') {
        let name = name(object, &cursor.key().ok()?);
        if is_wanted(&name) {
            return Some(name);
        }
        cursor.value().ok()?;
        cursor.skip_space();
        cursor.takes(b',');
        cursor.skip_space();
    }
    None
}

/// What a string says. One with a lone surrogate, which is no text, stays as it was written.
fn name<'b>(body: &'b [u8], quoted: &Range<usize>) -> Cow<'b, str> {
    let inside = &body[quoted.start + 1..quoted.end - 1];
    let written = || String::from_utf8_lossy(inside);
    if inside.contains(&b'\\') {
        serde_json::from_slice::<String>(&body[quoted.clone()]).map_or_else(|_| written(), Cow::Owned)
    } else {
        written()
    }
}
