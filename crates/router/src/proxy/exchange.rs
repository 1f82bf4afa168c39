//! Sends one request over a connection to a node, and reads its answer.
//!
//! A connection has no task of its own: the task that waits for the answer polls it. So a piece of an answer wakes only the task
//! of the client's connection, which reads the piece and writes it to the client. A client that does not read keeps the node
//! from sending.
//!
//! ```text
//!   Connection::send_request -- head of the answer --> Incoming -- last byte --> idle, for the next request
//!        |  sends while it waits for the head              |  sends the rest of the request while it reads
//!        '-- error: closed                                 '-- dropped before the last byte: closed; the engine aborts
//! ```

use std::{
    collections::VecDeque,
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use hyper::{
    Response,
    body::{Body, Frame},
};
use kvlane_memory::unacknowledged_bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use super::{
    idle::Upstreams,
    outgoing::Outgoing,
    reading::{Early, HeadReading, data_of},
    upstream_error::UpstreamError,
};
use crate::address::Address;
use crate::answers::{Framing, Head};

/// Most pieces that one write hands to the kernel.
const SLICES_MAX: usize = 16;
/// Most bytes that are written before other tasks have their turn.
const TURN_BYTES: usize = 256 << 10;

/// A connection to a node.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    upstreams: Upstreams,
    address: Arc<Address>,
    /// Unsent bytes of the head and of the body's first piece.
    unsent: [Bytes; 2],
    /// Unsent pieces of the body after the first one.
    later: VecDeque<Bytes>,
    /// False once a write has failed: the node takes no more of the request.
    takes_more: bool,
}

/// The body of an answer, with its connection. With the last byte the connection goes back to the idle ones. If this is dropped
/// before, the connection closes, which aborts the request in the engine.
#[derive(Debug)]
pub(super) struct Incoming {
    /// None once the body has ended or failed.
    connection: Option<Connection>,
    framing: Framing,
    is_kept: bool,
    /// Bytes of the body that arrived together with the head.
    early: Bytes,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, upstreams: Upstreams, address: Arc<Address>) -> Self {
        Self {
            stream,
            upstreams,
            address,
            unsent: <[Bytes; 2]>::default(),
            later: VecDeque::new(),
            takes_more: true,
        }
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send_request(
        mut self,
        head: Bytes,
        body: Outgoing,
    ) -> Result<Response<Incoming>, UpstreamError> {
        let length = head.len() + body.len();
        self.unsent = [head, body.first];
        self.later = body.later.into();
        let mut reading = HeadReading::default();
        let answered = poll_fn(|context| {
            self.poll_send(context);
            self.poll_head(context, &mut reading)
        })
        .await;
        let (head, early) = answered.map_err(|error| self.explain(error, length))?;
        let mut response = Response::new(Incoming::new(self, head.framing, head.is_kept, early));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        if let Some(reason) = head.reason {
            response.extensions_mut().insert(reason);
        }
        Ok(response)
    }

    /// Refines an error by how much of a request of this length the engine's kernel had received. The engine's FIN acknowledges
    /// these bytes, so the engine cannot have read a request that is not acknowledged by then.
    fn explain(&mut self, error: UpstreamError, length: usize) -> UpstreamError {
        if !matches!(error, UpstreamError::Closed | UpstreamError::Failed(_)) {
            return error;
        }
        let is_all_written = self.takes_more && !self.is_sending();
        let missing = unacknowledged_bytes(&self.stream).unwrap_or(0);
        match error {
            _ if !is_all_written => UpstreamError::NotBegun,
            UpstreamError::Closed if missing > 0 => UpstreamError::NotBegun,
            // EPIPE is how the kernel reports a reset that follows a FIN.
            UpstreamError::Failed(error) if error.kind() == io::ErrorKind::BrokenPipe && missing > 0 => {
                UpstreamError::NotBegun
            }
            UpstreamError::Failed(error) if missing == length => UpstreamError::Reset(error),
            error => error,
        }
    }

    /// Writes what the socket takes now. A node that takes no more of a request may still have answered it.
    fn poll_send(&mut self, context: &mut Context<'_>) {
        let mut turn = TURN_BYTES;
        while self.is_sending() {
            if turn == 0 {
                // Gives other tasks a turn, because the socket to a node on this host may take all of a long body at once.
                context.waker().wake_by_ref();
                return;
            }
            let (mut slices, mut count, mut room) = ([IoSlice::new(&[]); SLICES_MAX], 0, turn);
            for (slice, piece) in slices.iter_mut().zip(self.unsent.iter().chain(&self.later)) {
                *slice = IoSlice::new(&piece[..piece.len().min(room)]);
                (count, room) = (count + 1, room - slice.len());
            }
            match Pin::new(&mut self.stream).poll_write_vectored(context, &slices[..count]) {
                Poll::Ready(Ok(sent @ 1..)) => {
                    turn -= sent;
                    self.advance(sent);
                }
                Poll::Ready(_) => {
                    self.takes_more = false;
                    self.unsent = Default::default();
                    self.later.clear();
                }
                Poll::Pending => return,
            }
        }
    }

    fn advance(&mut self, mut sent: usize) {
        for piece in self.unsent.iter_mut().chain(&mut self.later) {
            let of_piece = sent.min(piece.len());
            piece.advance(of_piece);
            sent -= of_piece;
        }
        while self.later.front().is_some_and(Bytes::is_empty) {
            self.later.pop_front();
        }
    }

    fn is_sending(&mut self) -> bool {
        let is_sending = !self.later.is_empty() || self.unsent.iter().any(|piece| !piece.is_empty());
        if !is_sending && self.takes_more {
            // An empty piece would still hold the memory of the whole body.
            self.unsent = Default::default();
        }
        is_sending
    }

    fn poll_head(
        &mut self,
        context: &mut Context<'_>,
        reading: &mut HeadReading,
    ) -> Poll<Result<(Head, Early), UpstreamError>> {
        loop {
            match ready!(self.poll_read(context, |bytes| reading.take(bytes))) {
                Ok(Ok(None)) => {}
                Ok(Ok(Some(found))) => return Poll::Ready(Ok(found)),
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(error) => return Poll::Ready(Err(reading.failed(error))),
            }
        }
    }

    /// Reads once, and passes the bytes to `work`: none at the connection's end.
    fn poll_read<T>(
        &mut self,
        context: &mut Context<'_>,
        work: impl FnOnce(&[u8]) -> T,
    ) -> Poll<io::Result<T>> {
        let Self { stream, upstreams, .. } = self;
        upstreams.with_buffer(|buffer| {
            let mut read = ReadBuf::new(buffer);
            ready!(Pin::new(stream).poll_read(context, &mut read))?;
            Poll::Ready(Ok(work(read.filled())))
        })
    }

    /// Gives the connection to the idle ones, if the whole request was sent. The answer has been read to its end.
    fn keep(mut self) {
        if self.takes_more && !self.is_sending() {
            self.upstreams.keep(self.address, self.stream);
        }
    }
}

impl Incoming {
    fn new(connection: Connection, framing: Framing, is_kept: bool, early: Early) -> Self {
        let mut incoming = Self { connection: Some(connection), framing, is_kept, early: early.data };
        incoming.end_if_over(early.has_surplus);
        incoming
    }

    /// Releases the connection if the body is complete. A connection that brought more than the answer is closed.
    fn end_if_over(&mut self, has_surplus: bool) {
        if let Some(connection) = self.connection.take_if(|_| self.framing.is_over())
            && self.is_kept
            && !has_surplus
        {
            connection.keep();
        }
    }

    /// Whether only the end of the connection ends the body. A truncated answer of this kind looks complete.
    pub(super) fn ends_with_connection(&self) -> bool {
        self.framing.ends_with_connection()
    }

    /// Why the rest of the body will not come, if the connection has already ended. Peeks only.
    pub(super) fn poll_cut(&mut self, context: &mut Context<'_>) -> Option<UpstreamError> {
        if self.framing.ends_with_connection() {
            return None;
        }
        let stream = &mut self.connection.as_mut()?.stream;
        match stream.poll_peek(context, &mut ReadBuf::new(&mut [0])) {
            Poll::Ready(Ok(0)) => Some(UpstreamError::Cut),
            Poll::Ready(Err(error)) => Some(UpstreamError::Broken(error)),
            Poll::Ready(Ok(_)) | Poll::Pending => None,
        }
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        if !self.early.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.early))));
        }
        loop {
            let Some(connection) = &mut self.connection else { return Poll::Ready(None) };
            connection.poll_send(context);
            let framing = &mut self.framing;
            let read = connection.poll_read(context, |bytes| {
                let (data, taken) = data_of(framing, bytes)?;
                Ok((data, bytes.is_empty(), taken < bytes.len()))
            });
            let failure = match ready!(read) {
                Ok(Ok((_, true, _))) if self.framing.ends_with_connection() => None,
                Ok(Ok((_, true, _))) => Some(UpstreamError::Cut),
                Ok(Ok((data, false, has_surplus))) => {
                    self.end_if_over(has_surplus);
                    if data.is_empty() {
                        continue;
                    }
                    return Poll::Ready(Some(Ok(data)));
                }
                Ok(Err(error)) => Some(UpstreamError::Nonsense(error)),
                Err(error) => Some(UpstreamError::Broken(error)),
            };
            self.connection = None;
            return Poll::Ready(failure.map(Err));
        }
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        self.poll_data(context).map_ok(Frame::data)
    }

    fn is_end_stream(&self) -> bool {
        self.connection.is_none() && self.early.is_empty()
    }
}
