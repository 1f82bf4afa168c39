//! Scans a body in one pass: finds its members, and the messages of a chat.

use std::{borrow::Cow, collections::HashSet, ops::Range};

use super::{error::BodyError, json::Cursor};

/// Most members of a body. Requests have some tens. The bound is needed because the router takes more memory for a member than
/// its shortest form has bytes.
pub const MEMBERS_MAX: usize = 1024;
/// Most messages of a chat.
pub const MESSAGES_MAX: usize = 65_536;
/// Longest name of a member, with its escapes.
pub const NAME_BYTES_MAX: usize = 1024;
/// A new name is compared with up to this many earlier ones. Beyond that the scan makes a set of names.
const MEMBERS_COMPARED: usize = 32;

/// A member of the body: `"key": value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyMember {
    /// Range of the name, with quotes and escapes.
    pub key: Range<usize>,
    /// Range of the value.
    pub value: Range<usize>,
}

/// Ranges of a body's members, without the body, so that another thread than the request's can make the scan.
#[derive(Debug, Clone, Default)]
pub struct Outline {
    members: Vec<Named>,
    messages: Vec<Range<usize>>,
    /// The object, from its first to its last bracket.
    object: Range<usize>,
}

#[derive(Debug, Clone)]
struct Named {
    /// The name without its escapes, if it has any.
    unescaped: Option<Box<str>>,
    member: BodyMember,
}

/// A body that is one valid JSON object, with the ranges of its members.
#[derive(Debug, Clone)]
pub struct Scan<'b> {
    body: &'b [u8],
    outline: Outline,
}

/// Scans a body in one pass, and keeps a reference to it.
///
/// # Errors
/// The body is not one JSON object, names a member twice, is nested too deep, or has too many members or messages.
pub fn scan(body: &[u8]) -> Result<Scan<'_>, BodyError> {
    Ok(Scan::new(body, outline(body)?))
}

/// Scans a body without keeping a reference to it.
///
/// # Errors
/// As for [`scan`].
pub fn outline(body: &[u8]) -> Result<Outline, BodyError> {
    std::str::from_utf8(body).map_err(|error| BodyError::NotUtf8 { at: error.valid_up_to() })?;
    let mut cursor = Cursor::new(body);
    cursor.skip_space();
    let start = cursor.at();
    let is_object = cursor.peek() == Some(b'{');
    let mut outline = Outline { object: start..start, ..Outline::default() };
    if is_object {
        outline.members(body, &mut cursor)?;
    } else {
        cursor.value()?;
    }
    outline.object.end = cursor.at();
    cursor.skip_space();
    if cursor.at() < body.len() {
        return cursor.wrong("the end of the body");
    }
    if is_object { Ok(outline) } else { Err(BodyError::NotAnObject) }
}

impl Outline {
    fn members(&mut self, body: &[u8], cursor: &mut Cursor<'_>) -> Result<(), BodyError> {
        cursor.enter(true)?;
        let mut names = HashSet::new();
        while !self.members.is_empty() || cursor.peek() != Some(b'}') {
            if self.members.len() == MEMBERS_MAX {
                return Err(BodyError::TooMany { what: "members", at: cursor.at(), most: MEMBERS_MAX });
            }
            let key = cursor.key()?;
            if key.len() > NAME_BYTES_MAX + 2 {
                return Err(BodyError::LongName { at: key.start, most: NAME_BYTES_MAX });
            }
            let name = text(body, &key);
            let is_twice = if self.members.len() < MEMBERS_COMPARED {
                self.member(body, &name).is_some()
            } else {
                if names.is_empty() {
                    names.extend(self.members.iter().map(|named| text(body, &named.member.key)));
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
            let unescaped = if body[key.clone()].contains(&b'\\') { Some(name.into()) } else { None };
            self.members.push(Named { unescaped, member: BodyMember { key, value } });
            cursor.skip_space();
            if cursor.peek() == Some(b'}') {
                break;
            }
            if !cursor.accept(b',') {
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
            if self.messages.len() == MESSAGES_MAX {
                return Err(BodyError::TooMany { what: "messages", at: cursor.at(), most: MESSAGES_MAX });
            }
            self.messages.push(cursor.value()?);
            cursor.skip_space();
            if cursor.peek() == Some(b']') {
                break;
            }
            if !cursor.accept(b',') {
                return cursor.wrong("`,` or `]`");
            }
            cursor.skip_space();
        }
        cursor.leave();
        Ok(start..cursor.at())
    }

    fn member(&self, body: &[u8], name: &str) -> Option<&BodyMember> {
        let named = self.members.iter().find(|named| named.name(body) == name.as_bytes())?;
        Some(&named.member)
    }

    /// Bytes of memory that the ranges take. Unescaped names do not count, because they are shorter than the body.
    pub fn bytes(&self) -> usize {
        self.members.capacity() * size_of::<Named>() + self.messages.capacity() * size_of::<Range<usize>>()
    }
}

impl Named {
    fn name<'n>(&'n self, body: &'n [u8]) -> &'n [u8] {
        let written = || &body[self.member.key.start + 1..self.member.key.end - 1];
        self.unescaped.as_deref().map_or_else(written, str::as_bytes)
    }
}

impl<'b> Scan<'b> {
    /// Joins a body with the outline that was made of it.
    pub(crate) fn new(body: &'b [u8], outline: Outline) -> Self {
        Self { body, outline }
    }

    /// The ranges without the body.
    pub(crate) fn into_outline(self) -> Outline {
        self.outline
    }

    /// The bytes that were scanned.
    pub fn body(&self) -> &'b [u8] {
        self.body
    }

    /// The member of this name. Names are compared without escapes.
    pub fn member(&self, name: &str) -> Option<&BodyMember> {
        self.outline.member(self.body, name)
    }

    /// All members in their order, with their unescaped names.
    pub fn all(&self) -> impl Iterator<Item = (&str, &BodyMember)> {
        let all = self.outline.members.iter().map(|named| (named.name(self.body), &named.member));
        all.map(|(name, member)| (std::str::from_utf8(name).unwrap_or_default(), member))
    }

    /// The value of a member as it stands in the body.
    pub fn raw(&self, name: &str) -> Option<&'b [u8]> {
        self.member(name).map(|member| &self.body[member.value.clone()])
    }

    /// The value of a member that is a string, without escapes. `None` if there is no member, or its value is no string.
    pub fn string(&self, name: &str) -> Option<Cow<'b, str>> {
        let value = &self.member(name)?.value;
        (self.body[value.start] == b'"').then(|| text(self.body, value))
    }

    /// Whether a member is `true`.
    pub fn is_true(&self, name: &str) -> bool {
        self.raw(name) == Some(b"true")
    }

    /// Ranges of the elements of `messages`. Empty if that is not an array.
    pub fn messages_of_chat(&self) -> &[Range<usize>] {
        &self.outline.messages
    }

    /// The object itself, without the space around it.
    pub(super) fn object(&self) -> Range<usize> {
        self.outline.object.clone()
    }
}

/// The name of the first member of an object that `is_wanted`. The object is part of a scanned body. None if the value is no
/// object.
pub fn find_member(object: &[u8], is_wanted: impl Fn(&str) -> bool) -> Option<Cow<'_, str>> {
    let mut cursor = Cursor::new(object);
    if cursor.peek() != Some(b'{') {
        return None;
    }
    cursor.enter(true).ok()?;
    while cursor.peek() == Some(b'"') {
        let name = text(object, &cursor.key().ok()?);
        if is_wanted(&name) {
            return Some(name);
        }
        cursor.value().ok()?;
        cursor.skip_space();
        cursor.accept(b',');
        cursor.skip_space();
    }
    None
}

/// The text of a string, without escapes. A string with a lone surrogate is not text, and stays as it was written.
fn text<'b>(body: &'b [u8], quoted: &Range<usize>) -> Cow<'b, str> {
    let inside = &body[quoted.start + 1..quoted.end - 1];
    let written = || String::from_utf8_lossy(inside);
    if inside.contains(&b'\\') {
        serde_json::from_slice::<String>(&body[quoted.clone()]).map_or_else(|_| written(), Cow::Owned)
    } else {
        written()
    }
}
