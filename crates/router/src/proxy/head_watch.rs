//! Whether a request's head has a Content-Length beside a Transfer-Encoding.
//!
//! Such a request is two different ones to two readers, which is how requests are smuggled past a proxy. hyper reads it as chunked,
//! leaves the length out, and closes the connection after its answer; so nothing that follows is taken for a request. It does not
//! tell, though. Here the lines of heads are looked at as they come, without a copy; bodies are not looked at.

use std::{
    cell::Cell,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{clients::Client, joined::Joined};

const NAME: &[u8; 15] = b"content-length:";
/// Most that is read at once. hyper doubles a connection's buffer when one read fills it, up to 64 KiB, and keeps it that large while
/// the connection is idle: one byte less than 16 KiB ends that there.
const READ_BYTES_MAX: usize = (16 << 10) - 1;

/// What was seen of the head that is on its way.
#[derive(Debug, Default)]
pub(super) struct HeadWatch {
    /// Its end was seen: what comes is a body.
    is_over: Cell<bool>,
    /// Bytes of the line so far that agree with the name, and whether all do.
    agreeing: Cell<usize>,
    is_line_other: Cell<bool>,
    /// Bytes of the line, but for its end.
    is_line_empty: Cell<bool>,
    has_length: Cell<bool>,
}

impl HeadWatch {
    pub(super) fn new() -> Rc<Self> {
        let watch = Rc::new(Self::default());
        watch.begin();
        watch
    }

    /// A new head is to come.
    pub(super) fn begin(&self) {
        self.is_over.set(false);
        self.has_length.set(false);
        self.new_line();
        // An empty line before a head is none that ends it.
        self.is_line_empty.set(false);
    }

    /// Whether the head had a Content-Length.
    pub(super) fn has_length(&self) -> bool {
        self.has_length.get()
    }

    fn new_line(&self) {
        self.agreeing.set(0);
        self.is_line_other.set(false);
        self.is_line_empty.set(true);
    }

    fn see(&self, mut bytes: &[u8]) {
        while !self.is_over.get() && !bytes.is_empty() {
            let end = memchr::memchr(b'\n', bytes);
            let line = &bytes[..end.unwrap_or(bytes.len())];
            self.see_line(line);
            let Some(end) = end else { return };
            if self.is_line_empty.get() {
                self.is_over.set(true);
            }
            self.new_line();
            bytes = &bytes[end + 1..];
        }
    }

    /// A part of a line, without its end.
    fn see_line(&self, part: &[u8]) {
        if part.iter().any(|byte| *byte != b'\r') {
            self.is_line_empty.set(false);
        }
        if self.is_line_other.get() || self.has_length.get() {
            return;
        }
        let agreeing = self.agreeing.get();
        let wanted = &NAME[agreeing..];
        let common = wanted.len().min(part.len());
        if !part[..common].eq_ignore_ascii_case(&wanted[..common]) {
            self.is_line_other.set(true);
        } else if agreeing + common == NAME.len() {
            self.has_length.set(true);
        } else {
            self.agreeing.set(agreeing + common);
        }
    }
}

/// A connection whose heads are watched, and whether its client reads.
#[derive(Debug)]
pub(super) struct Watched {
    stream: Joined,
    watch: Rc<HeadWatch>,
    client: Rc<Client>,
}

impl Watched {
    pub(super) fn new(stream: Joined, watch: &Rc<HeadWatch>, client: &Rc<Client>) -> Self {
        Self { stream, watch: Rc::clone(watch), client: Rc::clone(client) }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = if buffer.remaining() > READ_BYTES_MAX {
            let mut short = ReadBuf::new(buffer.initialize_unfilled_to(READ_BYTES_MAX));
            let read = Pin::new(&mut self.stream).poll_read(context, &mut short);
            let came = short.filled().len();
            buffer.advance(came);
            read
        } else {
            Pin::new(&mut self.stream).poll_read(context, buffer)
        };
        let came = &buffer.filled()[before..];
        if !came.is_empty() && !self.watch.is_over.get() {
            self.client.sends_head();
        }
        self.watch.see(came);
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.client.wrote(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.client.wrote(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_length(head: &[u8], pieces: usize) -> bool {
        let watch = HeadWatch::new();
        head.chunks(pieces).for_each(|piece| watch.see(piece));
        watch.has_length()
    }

    #[test]
    fn a_length_is_seen_however_the_head_is_cut() {
        let with: [&[u8]; 3] = [
            b"POST / HTTP/1.1\r\nHost: a\r\ncOntent-Length: 5\r\n\r\n",
            b"POST / HTTP/1.1\nContent-Length:5\n\n",
            b"\r\nPOST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        ];
        let without: [&[u8]; 3] = [
            b"POST / HTTP/1.1\r\nX-Content-Length: 5\r\nContent-Lengths: 4\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\n\r\nContent-Length: 5\r\n\r\n",
            b"POST /Content-Length:5 HTTP/1.1\r\nContent-Lengt\r\nh: 5\r\n\r\n",
        ];
        for pieces in 1..60 {
            assert!(with.iter().all(|head| has_length(head, pieces)), "{pieces}");
            assert!(!without.iter().any(|head| has_length(head, pieces)), "{pieces}");
        }
    }

    #[test]
    fn the_next_head_counts_for_itself() {
        let watch = HeadWatch::new();
        watch.see(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello");
        assert!(watch.has_length());
        watch.begin();
        watch.see(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
        assert!(!watch.has_length());
    }
}
