//! Finds where each request of a client's connection ends, as strictly as [`answers`](crate::answers) parses engines. Pure.
//!
//! hyper parses requests leniently: it accepts lines without CR, `gzip, chunked` and two equal lengths, and silently drops a
//! length beside chunks. Two parsers may take such bytes for different requests, which is how requests are smuggled past a
//! proxy. These rules follow the same bytes, from head to body to the next head, and report the faults that hyper accepts.

use thiserror::Error;

use crate::answers::Framing;

const LENGTH: &[u8] = b"content-length:";
const ENCODING: &[u8] = b"transfer-encoding:";
/// Bytes of an incomplete line that are kept: more than either header needs.
const KEPT_BYTES: usize = 128;

/// Why a request is refused: it could be read in two ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum FramingFault {
    #[error("a line of the request's head ends without CR")]
    BareLineFeed,
    #[error("the request has both Content-Length and Transfer-Encoding: leave one out")]
    LengthAndEncoding,
    #[error("the request has more than one Content-Length")]
    ManyLengths,
    #[error("the request's Content-Length is not a number")]
    BadLength,
    #[error("the request's Transfer-Encoding is not just \"chunked\"")]
    BadEncoding,
    #[error("the request's body is not in well-formed chunks")]
    BadChunk,
}

/// Position of a connection within its requests.
#[derive(Debug, Default)]
pub(super) struct HeadRules {
    position: Position,
    /// Number of the current request; the first is 1.
    number: u64,
}

#[derive(Debug, Default)]
enum Position {
    /// Before a request.
    #[default]
    Start,
    Head(HeadLines),
    Body(Framing),
    /// Unknown, because of this fault.
    Fault(FramingFault),
}

/// The framing headers of a head, as far as it has arrived.
#[derive(Debug, Default)]
struct HeadLines {
    /// The request line has arrived. Empty lines may precede it.
    has_begun: bool,
    length: Option<u64>,
    is_chunked: bool,
    unended: Unended,
}

/// A line of which only the beginning has arrived.
#[derive(Debug, Default)]
struct Unended {
    kept: Vec<u8>,
    bytes: usize,
    last: u8,
}

impl HeadRules {
    /// Follows the next bytes of the connection.
    pub(super) fn observe(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let walked = match &mut self.position {
                Position::Start => {
                    self.number += 1;
                    self.position = Position::Head(HeadLines::default());
                    continue;
                }
                Position::Head(head) => head.observe(bytes),
                Position::Body(framing) => match framing.take(bytes, |_| {}) {
                    Ok(taken) => Ok((taken, None)),
                    Err(_) => Err(FramingFault::BadChunk),
                },
                Position::Fault(_) => return,
            };
            match walked {
                Ok((taken, body)) => {
                    bytes = &bytes[taken..];
                    if let Some(body) = body {
                        self.position = Position::Body(body);
                    }
                }
                Err(fault) => self.position = Position::Fault(fault),
            }
            if matches!(&self.position, Position::Body(framing) if framing.is_over()) {
                self.position = Position::Start;
            }
        }
    }

    /// Whether the connection waits for a head, or for the rest of one.
    pub(super) fn is_in_head(&self) -> bool {
        matches!(self.position, Position::Start | Position::Head(_))
    }

    /// The fault in one of the first `requests`, if any.
    pub(super) fn fault(&self, requests: u64) -> Option<FramingFault> {
        match self.position {
            Position::Fault(fault) if self.number <= requests => Some(fault),
            _ => None,
        }
    }
}

impl HeadLines {
    /// Returns the number of bytes that belong to the head, and the body's framing if the head ends among them.
    fn observe(&mut self, bytes: &[u8]) -> Result<(usize, Option<Framing>), FramingFault> {
        let mut taken = 0;
        while let Some(end) = memchr::memchr(b'\n', &bytes[taken..]) {
            let line = &bytes[taken..taken + end];
            taken += end + 1;
            let is_over = if self.unended.bytes == 0 {
                let text = line.strip_suffix(b"\r").ok_or(FramingFault::BareLineFeed)?;
                self.line(text, true)?
            } else {
                self.unended.add(line);
                let Unended { kept, bytes, last } = std::mem::take(&mut self.unended);
                if last != b'\r' {
                    return Err(FramingFault::BareLineFeed);
                }
                self.line(kept.strip_suffix(b"\r").unwrap_or(&kept), bytes == kept.len())?
            };
            if is_over {
                return Ok((taken, Some(self.body()?)));
            }
        }
        self.unended.add(&bytes[taken..]);
        Ok((bytes.len(), None))
    }

    /// Takes a line without its end, or the beginning of an incomplete one. Returns whether the head ends with it.
    fn line(&mut self, text: &[u8], is_whole: bool) -> Result<bool, FramingFault> {
        if text.is_empty() {
            return Ok(self.has_begun);
        }
        if !self.has_begun {
            self.has_begun = true;
        } else if let Some(value) = value_of(text, LENGTH) {
            let number = number(value).filter(|_| is_whole).ok_or(FramingFault::BadLength)?;
            if self.length.replace(number).is_some() {
                return Err(FramingFault::ManyLengths);
            }
        } else if let Some(value) = value_of(text, ENCODING) {
            let is_only = !std::mem::replace(&mut self.is_chunked, true);
            if !is_only || !is_whole || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(FramingFault::BadEncoding);
            }
        }
        Ok(false)
    }

    fn body(&self) -> Result<Framing, FramingFault> {
        match (self.length, self.is_chunked) {
            (Some(_), true) => Err(FramingFault::LengthAndEncoding),
            (None, true) => Ok(Framing::chunked()),
            (length, false) => Ok(Framing::length(length.unwrap_or(0))),
        }
    }
}

impl Unended {
    fn add(&mut self, piece: &[u8]) {
        let room = KEPT_BYTES - self.kept.len();
        self.kept.extend_from_slice(&piece[..piece.len().min(room)]);
        self.bytes += piece.len();
        self.last = piece.last().copied().unwrap_or(self.last);
    }
}

/// The value of a header line, if the line has this name.
fn value_of<'l>(line: &'l [u8], name: &[u8]) -> Option<&'l [u8]> {
    let (start, value) = line.split_at_checked(name.len())?;
    start.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

fn number(digits: &[u8]) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| is_number)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fault in the first `requests` of these bytes, however they are cut into pieces.
    fn fault(bytes: &[u8], requests: u64) -> Option<FramingFault> {
        let of = |pieces: usize| {
            let mut rules = HeadRules::default();
            bytes.chunks(pieces).for_each(|piece| rules.observe(piece));
            rules.fault(requests)
        };
        let found = of(bytes.len());
        (1..60).for_each(|pieces| assert_eq!(of(pieces), found, "in pieces of {pieces}"));
        found
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_a_fault() {
        use FramingFault::{BadChunk, BadEncoding, BadLength, BareLineFeed, LengthAndEncoding, ManyLengths};
        let cases: [(&[u8], Option<FramingFault>); 17] = [
            (b"POST / HTTP/1.1\r\nHost: a\r\ncOntent-Length: 5 \r\n\r\nhello", None),
            (b"\r\nPOST / HTTP/1.1\r\ntransfer-encoding:Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", None),
            (b"POST / HTTP/1.1\r\nX-Content-Length: x\r\nContent-Lengths: y\r\n\r\n", None),
            (b"POST /content-length:x HTTP/1.1\r\nContent-Lengt\r\nh: 5\r\n\r\n", None),
            (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n\na\n", None),
            (b"POST / HTTP/1.1\nHost: a\r\n\r\n", Some(BareLineFeed)),
            (b"POST / HTTP/1.1\r\nHost: a\n\r\n", Some(BareLineFeed)),
            (b"POST / HTTP/1.1\r\nHost: a\r\n\n", Some(BareLineFeed)),
            (b"\nPOST / HTTP/1.1\r\nHost: a\r\n\r\n", Some(BareLineFeed)),
            (
                b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                Some(LengthAndEncoding),
            ),
            (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", Some(ManyLengths)),
            (b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n", Some(BadLength)),
            (b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n", Some(BadLength)),
            (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Some(BadEncoding)),
            (
                b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
                Some(BadEncoding),
            ),
            (b"POST / HTTP/1.1\r\nTransfer-Encoding:\x0bchunked\r\n\r\n", Some(BadEncoding)),
            (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", Some(BadChunk)),
        ];
        for (bytes, expected) in cases {
            assert_eq!(fault(bytes, 1), expected, "{}", String::from_utf8_lossy(bytes));
            // A good request before it, with each kind of body, is not at fault.
            for before in [
                &b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"[..],
                b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n\n\n\n\r\n0\r\nX: y\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            ] {
                let both = [before, bytes].concat();
                assert_eq!((fault(&both, 1), fault(&both, 2)), (None, expected));
            }
        }
    }

    #[test]
    fn a_line_of_any_length_keeps_little_memory() {
        let mut rules = HeadRules::default();
        rules.observe(b"GET / HTTP/1.1\r\nX: ");
        (0..1000).for_each(|_| rules.observe(&[b'x'; 100]));
        rules.observe(b"\r\nContent-Length: ");
        let Position::Head(head) = &rules.position else { panic!("{rules:?}") };
        assert!(head.unended.kept.capacity() <= 2 * KEPT_BYTES);
        (0..1000).for_each(|_| rules.observe(b" "));
        rules.observe(b"5\r\n");
        assert_eq!(rules.fault(1), Some(FramingFault::BadLength), "nobody writes that");
    }
}
