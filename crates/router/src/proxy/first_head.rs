//! Waits for the head of a connection's first request.
//!
//! The head stays in the kernel's buffer until all of it is there: the router only peeks. So the connection costs this process a
//! socket and a task, and strangers who send nothing, or half a head, take no further memory.

use std::{io, time::Duration};

use rustix::net::{RecvFlags, recv};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::watch,
    time::{sleep, timeout},
};

use super::{clients::HEAD_TIMEOUT, idle::Upstreams, service::shows_key};
use crate::shared::Keys;

/// Longest head on a connection that has not shown a key.
const STRANGERS_HEAD_BYTES_MAX: usize = 16 << 10;
/// Time for heads that are in flight when the proxy stops.
const LAST_HEADS: Duration = Duration::from_millis(100);
/// The same answer as hyper's to a head that is too long.
const TOO_LONG: &[u8] =
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// The sender of the first head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadSender {
    /// The head shows a key, or the router needs none.
    Client,
    /// The head shows no key: the router refuses the request, or answers about its own health.
    Stranger,
}

#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The head is whole, is malformed, or shows a key already. hyper parses it.
    Head(HeadSender),
    /// The head is longer than a stranger's may be.
    TooLong,
    /// The client sends no more.
    End,
}

/// Waits until a connection has sent the head of a request, or a key. None if that does not come in time, or if the proxy stops.
pub(super) async fn first_head(
    stream: &TcpStream,
    upstreams: &Upstreams,
    keys: &Keys,
    stopped: &mut watch::Receiver<Option<Duration>>,
) -> Option<HeadSender> {
    let found = tokio::select! {
        biased;
        found = timeout(HEAD_TIMEOUT, find(stream, upstreams, keys)) => found,
        // Heads in flight are still served.
        () = async {
            let _ = stopped.changed().await;
            sleep(LAST_HEADS).await;
        } => return None,
    };
    let Ok(Ok(found)) = found else { return None };
    if found == Found::TooLong {
        // The answer is short, so it fits into the kernel's buffer. Unread bytes would make the kernel reset the connection
        // before the client has read the answer.
        let _ = upstreams.with_buffer(|buffer| stream.try_read(buffer));
        let _ = stream.try_write(TOO_LONG);
    }
    match found {
        Found::Head(sender) => Some(sender),
        Found::TooLong | Found::End => None,
    }
}

async fn find(stream: &TcpStream, upstreams: &Upstreams, keys: &Keys) -> io::Result<Found> {
    let mut searched = 0;
    loop {
        let ready = stream.ready(Interest::READABLE).await?;
        let peek = |buffer: &mut [u8]| {
            stream.try_io(Interest::READABLE, || {
                let (length, _) = recv(stream, &mut *buffer, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
                let found = judge(&buffer[..length], searched, &keys.read());
                searched = length;
                // Clears the readiness: the next bytes wake this again.
                found.ok_or_else(|| io::ErrorKind::WouldBlock.into())
            })
        };
        match upstreams.with_buffer(peek) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if ready.is_read_closed() => return Ok(Found::End),
            Err(_) => {}
            found => return found,
        }
    }
}

/// Judges the bytes of a head that have arrived. Its end is not in the first `searched` of them. None if more bytes are needed.
fn judge(bytes: &[u8], searched: usize, keys: &[String]) -> Option<Found> {
    if bytes.is_empty() {
        return Some(Found::End);
    }
    let is_too_long = bytes.len() >= STRANGERS_HEAD_BYTES_MAX;
    let bytes = &bytes[..bytes.len().min(STRANGERS_HEAD_BYTES_MAX)];
    // Empty lines may precede a head.
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n'));
    let is_no_method = start.is_some_and(|start| !bytes[start].is_ascii_graphic());
    let from = start.unwrap_or(bytes.len()).max(searched.saturating_sub(2)).min(bytes.len());
    let ends = |at: usize| matches!(&bytes[from + at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]);
    let has_ended = is_no_method || memchr::memchr_iter(b'\n', &bytes[from..]).any(ends);
    if !has_ended && !is_too_long {
        return None;
    }
    let is_client = keys.is_empty() || shows_key(keys, authorization(bytes));
    Some(match (is_client, has_ended) {
        (true, _) => Found::Head(HeadSender::Client),
        (false, true) => Found::Head(HeadSender::Stranger),
        (false, false) => Found::TooLong,
    })
}

/// The value of the Authorization header, if its line is whole.
fn authorization(bytes: &[u8]) -> Option<&[u8]> {
    const NAME: &[u8] = b"authorization:";
    let whole = &bytes[..memchr::memrchr(b'\n', bytes)?];
    let of_name = |line: &&[u8]| line.get(..NAME.len()).is_some_and(|name| name.eq_ignore_ascii_case(NAME));
    whole.split(|byte| *byte == b'\n').find(of_name).map(|line| line[NAME.len()..].trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8], keys: &[String]) -> Option<Found> {
        judge(bytes, 0, keys)
    }

    #[test]
    fn a_head_ends_with_an_empty_line_however_it_is_cut() {
        let heads: [&[u8]; 3] =
            [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\n\n"];
        for head in heads {
            for length in 1..head.len() {
                assert_eq!(of(&head[..length], &[]), None, "{length}");
                assert_eq!(judge(head, length, &[]), Some(Found::Head(HeadSender::Client)), "{length}");
            }
        }
        assert_eq!(of(b"\x16\x03\x01", &[]), Some(Found::Head(HeadSender::Client)), "TLS is refused at once");
        assert_eq!(of(b"", &[]), Some(Found::End));
    }

    #[test]
    fn a_long_head_needs_a_key_where_there_are_keys() {
        let keys = ["key".to_owned()];
        let long = format!("X-Long: {}", "x".repeat(STRANGERS_HEAD_BYTES_MAX));
        let with = |line: &str| format!("GET / HTTP/1.1\r\n{line}{long}").into_bytes();
        assert_eq!(of(&with(""), &[]), Some(Found::Head(HeadSender::Client)));
        assert_eq!(of(&with(""), &keys), Some(Found::TooLong));
        assert_eq!(of(&with("aUthorization:  Bearer key\r\n"), &keys), Some(Found::Head(HeadSender::Client)));
        assert_eq!(of(&with("Authorization: Bearer other\r\n"), &keys), Some(Found::TooLong));
        let short = |key: &str| format!("GET / HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n");
        assert_eq!(of(short("key").as_bytes(), &keys), Some(Found::Head(HeadSender::Client)));
        assert_eq!(of(short("other").as_bytes(), &keys), Some(Found::Head(HeadSender::Stranger)));
        let whole = format!("GET / HTTP/1.1\r\n{long}\r\n\r\n");
        assert_eq!(of(whole.as_bytes(), &keys), Some(Found::TooLong), "though it came as a whole");
        assert_eq!(of("\r\n".repeat(STRANGERS_HEAD_BYTES_MAX).as_bytes(), &keys), Some(Found::TooLong));
    }
}
