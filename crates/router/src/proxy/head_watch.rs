//! A client's connection that checks requests as they come, without a copy.

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

/// Most that is read at once. hyper doubles a connection's buffer when one read fills it, up to 64 KiB, and keeps it that large while
/// the connection is idle: one byte less than 16 KiB ends that there.
const READ_BYTES_MAX: usize = (16 << 10) - 1;

/// Observations of a connection's requests.
#[derive(Debug, Default)]
pub(super) struct HeadWatch {
    rules: RefCell<HeadRules>,
    /// Number of requests that hyper has read. It may have bytes of further ones.
    requests: Cell<u64>,
}

impl HeadWatch {
    pub(super) fn new() -> Rc<Self> {
        Rc::default()
    }

    /// hyper has read the head of one more request. Returns the fault in it, if any.
    pub(super) fn request(&self) -> Option<FramingFault> {
        self.requests.set(self.requests.get() + 1);
        self.fault()
    }

    fn fault(&self) -> Option<FramingFault> {
        self.rules.borrow().fault(self.requests.get())
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
        if !came.is_empty() {
            let mut rules = self.watch.rules.borrow_mut();
            if rules.is_in_head() {
                self.client.sends_head();
            }
            rules.see(came);
        }
        // The head was right and the body is wrong, so hyper must not go on with this request.
        match self.watch.fault() {
            Some(fault) => Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, fault))),
            None => read,
        }
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
