//! [`Connection`]: runs a session over a TCP socket.

use std::net::SocketAddr;

use bytes::Bytes;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::peer_options::PeerOptions;
use crate::{Event, Limits, ProtocolError, Session, SocketType};

const READ_BYTES: usize = 16 << 10;

/// Why a connection ended.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The peer broke the protocol or a limit.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// Connecting and the handshake took too long.
    #[error("the peer did not finish its handshake within {0:?}")]
    Handshake(std::time::Duration),
}

/// A session and its socket.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    session: Session,
    read: Box<[u8]>,
    /// The session has not taken `read[taken..filled]` yet.
    taken: usize,
    filled: usize,
}

impl Connection {
    pub(super) fn new(
        stream: TcpStream,
        ours: SocketType,
        identity: Bytes,
        limits: Limits,
    ) -> Result<Self, ConnectionError> {
        stream.set_nodelay(true)?;
        let session = Session::new(ours, identity, limits)?;
        Ok(Self { stream, session, read: vec![0; READ_BYTES].into(), taken: 0, filled: 0 })
    }

    /// Connects, and completes the handshake.
    pub(super) async fn connect(
        address: SocketAddr,
        ours: SocketType,
        identity: Bytes,
        options: PeerOptions,
    ) -> Result<Self, ConnectionError> {
        let connected = async {
            let stream = TcpStream::connect(address).await?;
            let mut connection = Self::new(stream, ours, identity, options.limits)?;
            connection.ready().await?;
            Ok(connection)
        };
        let late = |_| ConnectionError::Handshake(options.handshake);
        timeout(options.handshake, connected).await.map_err(late)?
    }

    /// Waits until the handshake is complete; returns the peer's identity.
    pub(super) async fn ready(&mut self) -> Result<Bytes, ConnectionError> {
        match self.next().await? {
            Event::Ready { identity, .. } => Ok(identity),
            _ => Err(ProtocolError::OutOfTurn { what: "a message" }.into()),
        }
    }

    /// Returns the next event, after sending the unsent bytes if it has to wait. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<Event, ConnectionError> {
        loop {
            let mut unread = &self.read[self.taken..self.filled];
            let event = self.session.receive(&mut unread);
            self.taken = self.filled - unread.len();
            if let Some(event) = event? {
                return Ok(event);
            }
            self.flush().await?;
            self.filled = self.stream.read(&mut self.read).await?;
            self.taken = 0;
            if self.filled == 0 {
                return Err(ConnectionError::Closed);
            }
        }
    }

    /// Returns the next message, and ignores subscriptions and signs of life.
    pub(super) async fn next_message(&mut self) -> Result<Vec<Bytes>, ConnectionError> {
        loop {
            if let Event::Message(frames) = self.next().await? {
                return Ok(frames);
            }
        }
    }

    pub(super) fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Sends the unsent bytes. If the future is dropped, the rest stays unsent.
    pub(super) async fn flush(&mut self) -> Result<(), ConnectionError> {
        while !self.session.unsent().is_empty() {
            let sent = self.stream.write(self.session.unsent()).await?;
            if sent == 0 {
                return Err(ConnectionError::Closed);
            }
            self.session.mark_sent(sent);
        }
        Ok(())
    }
}
