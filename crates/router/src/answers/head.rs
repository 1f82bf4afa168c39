//! Parses the head of an answer: its status and headers, and how its body ends.

use hyper::{
    HeaderMap, StatusCode,
    ext::ReasonPhrase,
    header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, TRANSFER_ENCODING},
};

use super::{error::AnswerError, framing::Framing};

/// Longest head of an answer that the router accepts, in bytes.
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most headers of an answer.
const HEADERS_MAX: usize = 100;

/// The status line and headers before a body.
#[derive(Debug)]
pub struct Head {
    /// Status. Below 200, another head follows.
    pub status: StatusCode,
    /// Reason phrase, if it is not the usual one for the status.
    pub reason: Option<ReasonPhrase>,
    /// All headers. Several values of one name are in their order.
    pub headers: HeaderMap,
    /// Finds the body in the bytes behind the head.
    pub framing: Framing,
    /// Whether the engine takes another request over the connection afterwards.
    pub is_kept: bool,
}

/// Where the first head in these bytes ends, if it is complete. An earlier call found no end in the first `searched` bytes.
pub fn head_ends(received: &[u8], searched: usize) -> Option<usize> {
    let from = searched.saturating_sub(3).min(received.len());
    received[from..].windows(4).position(|four| four == b"\r\n\r\n").map(|at| from + at + 4)
}

/// Parses the head of an answer at the beginning of these bytes. Returns it and its length, or None if it is incomplete. The
/// request was not a HEAD, whose answer has no body.
///
/// # Errors
/// The bytes are not an answer, or one whose end could be read in two ways.
pub fn head(received: &[u8]) -> Result<Option<(Head, usize)>, AnswerError> {
    let mut room = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut room);
    // httparse skips empty lines before a head, and an answer has none there.
    if received.first().is_some_and(|first| *first != b'H') {
        return Err(AnswerError::NotHttp(httparse::Error::Version));
    }
    let length = match parsed.parse(received).map_err(AnswerError::NotHttp)? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial if received.len() >= HEAD_BYTES_MAX => {
            return Err(AnswerError::HeadTooLong(HEAD_BYTES_MAX));
        }
        httparse::Status::Partial => return Ok(None),
    };
    let bytes = &received[..length];
    if bytes.len() > HEAD_BYTES_MAX {
        return Err(AnswerError::HeadTooLong(HEAD_BYTES_MAX));
    }
    if bytes.iter().zip(&bytes[1..]).any(|(before, byte)| *byte == b'\n' && *before != b'\r') {
        return Err(AnswerError::BareLineFeed);
    }
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(AnswerError::NotHttp(httparse::Error::Status))?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(AnswerError::Switches);
    }
    let reason = parsed.reason.filter(|reason| Some(*reason) != status.canonical_reason());
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 1);
    for header in parsed.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes());
        let name = name.map_err(|_| AnswerError::NotHttp(httparse::Error::HeaderName))?;
        let value = HeaderValue::from_bytes(header.value);
        let value = value.map_err(|_| AnswerError::NotHttp(httparse::Error::HeaderValue))?;
        headers.append(name, value);
    }
    let is_http_1_1 = parsed.version == Some(1);
    let framing = framing(status, &headers, is_http_1_1)?;
    let is_kept = is_http_1_1 && !framing.ends_with_connection() && !says_close(&headers);
    let reason = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok());
    Ok(Some((Head { status, reason, headers, framing, is_kept }, length)))
}

/// RFC 9112, 6.3, but strict: headers that can be read in two ways are refused.
fn framing(status: StatusCode, headers: &HeaderMap, is_http_1_1: bool) -> Result<Framing, AnswerError> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut encodings = headers.get_all(TRANSFER_ENCODING).iter();
    let (length, encoding) = (lengths.next(), encodings.next());
    if length.is_some() && encoding.is_some() || lengths.any(|other| Some(other) != length) {
        return Err(AnswerError::TwoLengths);
    }
    let encoded = match encoding {
        None => false,
        Some(given) if is_http_1_1 && given.as_bytes().eq_ignore_ascii_case(b"chunked") => true,
        Some(_) => return Err(AnswerError::BadEncoding),
    };
    if encodings.next().is_some() {
        return Err(AnswerError::BadEncoding);
    }
    let length = length.map(number).transpose()?;
    if status.is_informational() || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return Ok(Framing::length(0));
    }
    Ok(match length {
        _ if encoded => Framing::chunked(),
        Some(length) => Framing::length(length),
        None => Framing::until_close(),
    })
}

fn number(given: &HeaderValue) -> Result<u64, AnswerError> {
    let digits = given.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|digits| digits.parse().ok()).ok_or(AnswerError::BadLength)
}

fn says_close(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(CONNECTION).iter();
    values.any(|value| {
        value
            .as_bytes()
            .split(|byte| *byte == b',')
            .any(|word| word.trim_ascii().eq_ignore_ascii_case(b"close"))
    })
}
