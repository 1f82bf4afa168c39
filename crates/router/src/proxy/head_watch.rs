//! A client's connection that checks the framing of requests as hyper reads them, without a copy.

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    clients::Client,
    head_rules::{FramingFault, HeadRules},
    joined::Joined,
};

/// Most bytes of one read. When one read fills a connection's buffer, hyper doubles the buffer, up to 64 KiB. The buffer stays
/// that large while the connection is idle. One byte less than 16 KiB stops the growth there.
const READ_BYTES_MAX: usize = (16 << 10) - 1;

/// Checks the requests of one connection, as its reads bring them.
#[derive(Debug, Default)]
pub(super) struct HeadWatch {
    rules: RefCell<HeadRules>,
    /// Number of requests whose head hyper has parsed. hyper may hold bytes of further requests.
    requests: Cell<u64>,
}

impl HeadWatch {
    pub(super) fn new() -> Rc<Self> {
        Rc::default()
    }

    /// Counts a request whose head hyper has parsed. Returns the fault in it, if any.
    pub(super) fn begin_request(&self) -> Option<FramingFault> {
        self.requests.set(self.requests.get() + 1);
        self.fault()
    }

    fn fault(&self) -> Option<FramingFault> {
        self.rules.borrow().fault(self.requests.get())
    }
}

/// A connection whose requests are checked. It also notes when heads begin, and whether the client reads its answers.
#[derive(Debug)]
pub(super) struct WatchedConnection {
    stream: Joined,
    watch: Rc<HeadWatch>,
    client: Rc<Client>,
}

impl WatchedConnection {
    pub(super) fn new(stream: Joined, watch: &Rc<HeadWatch>, client: &Rc<Client>) -> Self {
        Self { stream, watch: Rc::clone(watch), client: Rc::clone(client) }
    }
}

impl AsyncRead for WatchedConnection {
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
        if !came.is_empty() {
            let mut rules = self.watch.rules.borrow_mut();
            if rules.is_in_head() {
                self.client.begin_head();
            }
            rules.observe(came);
        }
        // hyper has begun this request, whose head was right. Its body is malformed, so hyper must not read on.
        match self.watch.fault() {
            Some(fault) => Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, fault))),
            None => read,
        }
    }
}

impl AsyncWrite for WatchedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.client.note_write(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.client.note_write(written.is_pending());
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
