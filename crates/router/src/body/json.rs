//! A cursor that checks JSON (RFC 8259) and keeps nothing of it. The cursor does not recurse: each level costs one bit.

use std::ops::Range;

use super::error::BodyError;

/// Most levels of objects and arrays, with the outermost one.
pub const DEPTH_MAX: usize = 128;

/// Bytes of text that are compared at once.
const STRIDE: usize = 16;

/// A position in JSON text, which is UTF-8.
pub(super) struct Cursor<'b> {
    bytes: &'b [u8],
    at: usize,
    depth: usize,
    /// One bit for each open bracket, the innermost lowest. A set bit is an object.
    objects: u128,
}

impl<'b> Cursor<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0, depth: 0, objects: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    pub(super) fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Steps over this byte if it comes next. Returns whether it did.
    pub(super) fn accept(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    pub(super) fn wrong<T>(&self, expected: &'static str) -> Result<T, BodyError> {
        Err(BodyError::NotJson { at: self.at, expected })
    }

    /// Steps over the opening bracket that comes next, and the space behind it.
    pub(super) fn enter(&mut self, is_object: bool) -> Result<(), BodyError> {
        if self.depth == DEPTH_MAX {
            return Err(BodyError::TooDeep { at: self.at, most: DEPTH_MAX });
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(is_object);
        self.at += 1;
        self.skip_space();
        Ok(())
    }

    /// Steps over the closing bracket of the innermost object or array.
    pub(super) fn leave(&mut self) {
        self.depth -= 1;
        self.objects >>= 1;
        self.at += 1;
    }

    /// Steps over a string. Its range includes the quotes.
    pub(super) fn string(&mut self) -> Result<Range<usize>, BodyError> {
        let start = self.at;
        if !self.accept(b'"') {
            return self.wrong("a string");
        }
        loop {
            self.skip_plain();
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(start..self.at);
                }
                Some(b'\\') => self.escape()?,
                Some(0x20..) => self.at += 1,
                Some(_) => return self.wrong("no control character, but its escape"),
                None => return self.wrong("the end of a string"),
            }
        }
    }

    /// Steps over whole strides of text without quotes, escapes and control characters, which is most of a long prompt.
    fn skip_plain(&mut self) {
        let is_special = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
        let (strides, _) = self.bytes[self.at..].as_chunks::<STRIDE>();
        // Without a branch for each byte, so that the compiler compares all bytes of a stride at once.
        let is_plain =
            |stride: &&[u8; STRIDE]| !stride.iter().fold(false, |any, byte| any | is_special(byte));
        self.at += strides.iter().take_while(is_plain).count() * STRIDE;
    }

    fn escape(&mut self) -> Result<(), BodyError> {
        self.at += 1;
        match self.peek() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 1,
            Some(b'u') => {
                self.at += 1;
                for _ in 0..4 {
                    if !self.peek().is_some_and(|byte| byte.is_ascii_hexdigit()) {
                        return self.wrong("four hexadecimal digits");
                    }
                    self.at += 1;
                }
            }
            _ => return self.wrong("one of \"\\/bfnrtu"),
        }
        Ok(())
    }

    /// Steps over a member's name, and the colon and space behind it. The range is the name's.
    pub(super) fn key(&mut self) -> Result<Range<usize>, BodyError> {
        let key = self.string()?;
        self.skip_space();
        if !self.accept(b':') {
            return self.wrong("`:`");
        }
        self.skip_space();
        Ok(key)
    }

    /// Steps over a value of any kind, with all that is in it.
    pub(super) fn value(&mut self) -> Result<Range<usize>, BodyError> {
        let (start, outside) = (self.at, self.depth);
        loop {
            let has_entered = self.begin_value()?;
            if !has_entered && self.end_values(outside)? {
                return Ok(start..self.at);
            }
        }
    }

    /// Steps over a scalar or an empty bracket, and returns false; or enters a bracket up to its first value, and returns true.
    fn begin_value(&mut self) -> Result<bool, BodyError> {
        match self.peek() {
            Some(bracket @ (b'{' | b'[')) => {
                let is_object = bracket == b'{';
                self.enter(is_object)?;
                if self.peek() == Some(if is_object { b'}' } else { b']' }) {
                    self.leave();
                    return Ok(false);
                }
                if is_object {
                    self.key()?;
                }
                return Ok(true);
            }
            Some(b'"') => {
                self.string()?;
            }
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(b't') => self.word("true")?,
            Some(b'f') => self.word("false")?,
            Some(b'n') => self.word("null")?,
            _ => return self.wrong("a value"),
        }
        Ok(false)
    }

    /// Steps on behind a value. Returns true once the brackets around it are closed down to depth `outside`, or false if another
    /// value follows.
    fn end_values(&mut self, outside: usize) -> Result<bool, BodyError> {
        while self.depth > outside {
            self.skip_space();
            let is_object = self.objects & 1 == 1;
            match (is_object, self.peek()) {
                (_, Some(b',')) => {
                    self.at += 1;
                    self.skip_space();
                    if is_object {
                        self.key()?;
                    }
                    return Ok(false);
                }
                (true, Some(b'}')) | (false, Some(b']')) => self.leave(),
                (true, _) => return self.wrong("`,` or `}`"),
                (false, _) => return self.wrong("`,` or `]`"),
            }
        }
        Ok(true)
    }

    fn number(&mut self) -> Result<(), BodyError> {
        self.accept(b'-');
        if !self.accept(b'0') {
            self.digits()?;
        }
        if self.accept(b'.') {
            self.digits()?;
        }
        if self.accept(b'e') || self.accept(b'E') {
            let _ = self.accept(b'+') || self.accept(b'-');
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), BodyError> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        if self.at == start { self.wrong("a digit") } else { Ok(()) }
    }

    fn word(&mut self, word: &'static str) -> Result<(), BodyError> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return self.wrong("true, false or null");
        }
        self.at += word.len();
        Ok(())
    }
}
