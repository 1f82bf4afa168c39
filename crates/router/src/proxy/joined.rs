//! A client's connection: short pieces are sent as one.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// Pieces of fewer bytes together are copied: that takes less time than handing each to the kernel.
const JOINED_BYTES: usize = 2048;

/// A stream that joins pieces. A chunk of an answer is three of them: its size, its data, its end.
#[derive(Debug)]
pub(super) struct Joined(pub(super) TcpStream);

impl AsyncRead for Joined {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Joined {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut joined = [0; JOINED_BYTES];
        let mut length = 0;
        for piece in pieces {
            let Some(room) = joined.get_mut(length..length + piece.len()) else {
                return Pin::new(&mut self.0).poll_write_vectored(context, pieces);
            };
            room.copy_from_slice(piece);
            length += piece.len();
        }
        Pin::new(&mut self.0).poll_write(context, &joined[..length])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
