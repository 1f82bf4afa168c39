//! Heads and bodies of answers parse alike wherever the bytes are cut, and ambiguous ones are refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use hyper::StatusCode;
use kvlane_router::answers::{AnswerError, Framing, HEAD_BYTES_MAX, Head, head, head_ends};
use proptest::prelude::*;

const OK: &str = "HTTP/1.1 200 OK\r\n";

fn read(text: &str) -> Head {
    let (head, length) = head(text.as_bytes()).unwrap().unwrap();
    assert_eq!(head_ends(text.as_bytes(), 0), Some(length));
    head
}

fn refused(headers: &str) -> AnswerError {
    head(format!("{OK}{headers}\r\n").as_bytes()).unwrap_err()
}

/// Data of a body that comes in these pieces, whether it is over, and bytes that were not of it.
fn walked(framing: &mut Framing, pieces: &[&[u8]]) -> Result<(Vec<u8>, usize), AnswerError> {
    let (mut data, mut surplus) = (Vec::new(), 0);
    for piece in pieces {
        let taken = framing.take(piece, |part| {
            assert!(!part.is_empty());
            data.extend_from_slice(part);
        })?;
        surplus += piece.len() - taken;
    }
    Ok((data, surplus))
}

fn chunked(text: &str) -> Result<(Vec<u8>, usize, bool), AnswerError> {
    let mut framing = Framing::chunked();
    let (data, surplus) = walked(&mut framing, &[text.as_bytes()])?;
    Ok((data, surplus, framing.is_over()))
}

proptest! {
    #[test]
    fn chunks_that_are_cut_anywhere_are_the_same(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
        extension in "(;[a-z]{1,5}(=[a-z0-9]{1,5})?)?",
        trailer in "(x-[a-z]{1,5}: [a-z]{0,5}\r\n){0,2}",
        surplus in prop::collection::vec(any::<u8>(), 0..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut bytes = Vec::new();
        for chunk in &chunks {
            bytes.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
            bytes.extend_from_slice(chunk);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(format!("0{extension}\r\n{trailer}\r\n").as_bytes());
        let of_the_answer = bytes.len();
        bytes.extend_from_slice(&surplus);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let mut framing = Framing::chunked();
        let (data, left) = walked(&mut framing, &pieces).unwrap();
        prop_assert_eq!(data, chunks.concat());
        prop_assert!(framing.is_over());
        prop_assert_eq!(left, bytes.len() - of_the_answer);
    }

    /// The control: without its last byte no body is over.
    #[test]
    fn a_body_is_over_at_its_last_byte_and_not_before(data in prop::collection::vec(any::<u8>(), 1..50)) {
        let chunk = [format!("{:X}\r\n", data.len()).as_bytes(), &data, b"\r\n0\r\n\r\n"].concat();
        let kinds = [(Framing::length(data.len() as u64), data.clone()), (Framing::chunked(), chunk)];
        for (mut framing, bytes) in kinds {
            let (last, before) = bytes.split_last().unwrap();
            walked(&mut framing, &[before]).unwrap();
            prop_assert!(!framing.is_over());
            walked(&mut framing, &[&[*last]]).unwrap();
            prop_assert!(framing.is_over());
        }
    }

    #[test]
    fn a_head_is_found_once_it_is_whole(cut in 0..60usize, searched in 0..60usize) {
        let text = format!("{OK}content-length: 5\r\nserver: uvicorn\r\n\r\n");
        let cut = cut.min(text.len() - 1);
        prop_assert!(head(&text.as_bytes()[..cut]).unwrap().is_none());
        prop_assert_eq!(head_ends(&text.as_bytes()[..cut], 0), None);
        prop_assert_eq!(head_ends(text.as_bytes(), searched.min(cut)), Some(text.len()));
    }
}

#[test]
fn a_body_ends_as_its_head_says() {
    assert_eq!(read(&format!("{OK}content-length: 17\r\n\r\n")).framing, Framing::length(17));
    assert_eq!(
        read(&format!("{OK}Content-Length: 17\r\ncontent-length: 17\r\n\r\n")).framing,
        Framing::length(17)
    );
    assert_eq!(read(&format!("{OK}Transfer-Encoding: Chunked\r\n\r\n")).framing, Framing::chunked());
    assert_eq!(read(&format!("{OK}\r\n")).framing, Framing::until_close());
    for status in ["100 Continue", "204 No Content", "304 Not Modified"] {
        let head = read(&format!("HTTP/1.1 {status}\r\ncontent-length: 17\r\n\r\n"));
        assert!(head.framing.is_over(), "{status}");
    }
}

#[test]
fn a_connection_is_kept_where_both_sides_know_the_end() {
    let kept = |text: &str| read(&format!("{text}\r\n")).is_kept;
    assert!(kept("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n"));
    assert!(!kept("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: x, Close\r\n"));
    assert!(!kept("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n"));
    assert!(!kept("HTTP/1.1 200 OK\r\n"));
}

#[test]
fn a_head_passes_as_it_is() {
    let head = read("HTTP/1.1 299 Fine By Me\r\nset-cookie: a\r\nset-cookie: b\r\nx: \r\n\r\n");
    assert_eq!(head.status, StatusCode::from_u16(299).unwrap());
    assert_eq!(head.reason.unwrap().as_bytes(), b"Fine By Me");
    assert_eq!(head.headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(head.headers["x"], "");
    assert!(read(&format!("{OK}\r\n")).reason.is_none());
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    assert_eq!(refused("content-length: 5\r\ntransfer-encoding: chunked\r\n"), AnswerError::TwoLengths);
    assert_eq!(refused("content-length: 5\r\ncontent-length: 6\r\n"), AnswerError::TwoLengths);
    for length in ["5, 5", "+5", "-1", "0x5", "", "18446744073709551616", "5 5"] {
        assert_eq!(refused(&format!("content-length: {length}\r\n")), AnswerError::BadLength, "{length}");
    }
    for encoding in ["gzip, chunked", "chunked, chunked", "identity", "", "xchunked"] {
        let header = format!("transfer-encoding: {encoding}\r\n");
        assert_eq!(refused(&header), AnswerError::BadEncoding, "{encoding}");
    }
    assert_eq!(
        refused("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
        AnswerError::BadEncoding
    );
    let older = head(b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap_err();
    assert_eq!(older, AnswerError::BadEncoding);
    assert_eq!(head(b"HTTP/1.1 200 OK\ncontent-length: 5\r\n\r\n").unwrap_err(), AnswerError::BareLineFeed);
    assert_eq!(refused("a: b\ncontent-length: 5\r\n"), AnswerError::BareLineFeed);
    assert_eq!(
        head(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n").unwrap_err(),
        AnswerError::Switches
    );
    // A header that goes on in the next line, a space before the colon, a CR alone, no colon, a null.
    for header in ["a: b\r\n c\r\n", "content-length : 5\r\n", "a: b\rc\r\n", "nonsense\r\n", "a: \0\r\n"] {
        assert!(matches!(refused(header), AnswerError::NotHttp(_)), "{header:?}");
    }
    for text in
        ["\r\nHTTP/1.1 200 OK\r\n\r\n", "HTTP/2 200\r\n\r\n", "\x16\x03\x01", "HTTP/1.1 20 OK\r\n\r\n"]
    {
        assert!(matches!(head(text.as_bytes()), Err(AnswerError::NotHttp(_))), "{text:?}");
    }
    assert!(matches!(
        refused(&"a: b\r\n".repeat(101)),
        AnswerError::NotHttp(httparse::Error::TooManyHeaders)
    ));
}

#[test]
fn a_head_has_a_longest_length() {
    let long = format!("{OK}a: {}\r\n\r\n", "x".repeat(HEAD_BYTES_MAX));
    assert_eq!(head(long.as_bytes()).unwrap_err(), AnswerError::HeadTooLong(HEAD_BYTES_MAX));
    assert_eq!(
        head(&long.as_bytes()[..HEAD_BYTES_MAX]).unwrap_err(),
        AnswerError::HeadTooLong(HEAD_BYTES_MAX)
    );
    let longest = format!("{OK}a: {}\r\n\r\n", "x".repeat(HEAD_BYTES_MAX - OK.len() - 7));
    assert_eq!(longest.len(), HEAD_BYTES_MAX);
    assert!(head(longest.as_bytes()).unwrap().is_some());
}

#[test]
fn chunks_are_taken_only_as_they_should_be() {
    assert_eq!(chunked("5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\nHTTP"), Ok((b"hello".to_vec(), 4, true)));
    for size in [
        "",
        "x",
        "-5",
        "+5",
        "0x5",
        " 5",
        "5\n",
        ";",
        "10000000000000000",
        "5\rx",
        "5;a\n",
        "0000000000000005",
    ] {
        assert_eq!(chunked(&format!("{size}\r\nhello")), Err(AnswerError::BadChunkSize), "{size:?}");
    }
    for end in ["x\r\n", "\n", "\rx", "0\r\n"] {
        assert_eq!(chunked(&format!("5\r\nhello{end}")), Err(AnswerError::BadChunkEnd), "{end:?}");
    }
    for trailer in ["\n", "x\n", "x\ry", "\rx", "x: y\r\n\n"] {
        assert_eq!(chunked(&format!("0\r\n{trailer}")), Err(AnswerError::BadChunkEnd), "{trailer:?}");
    }
    let around = "x".repeat(16 << 10);
    assert!(matches!(chunked(&format!("5;{around}\r\n")), Err(AnswerError::TooManyExtraBytes(_))));
    assert!(matches!(chunked(&format!("0\r\n{around}x\r\n")), Err(AnswerError::TooManyExtraBytes(_))));
    let many = "1;x\r\na\r\n".repeat(9 << 10);
    assert!(matches!(chunked(&many), Err(AnswerError::TooManyExtraBytes(_))), "they count together");
}
