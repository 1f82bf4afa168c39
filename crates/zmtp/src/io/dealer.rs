//! [`Dealer`]: the DEALER side of one connection to a ROUTER socket.

use std::net::SocketAddr;

use bytes::Bytes;

use super::{
    connection::{Connection, ConnectionError},
    peer_options::PeerOptions,
};
use crate::SocketType;

/// Exchanges messages with a ROUTER or REP socket, in any order. If the peer expects a REQ socket, send an empty first
/// frame, and expect one. When the connection ends, the caller connects anew.
#[derive(Debug)]
pub struct Dealer {
    connection: Connection,
}

impl Dealer {
    /// Connects to the socket at `address`. With an empty `identity`, a ROUTER there generates one.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub async fn connect(
        address: SocketAddr,
        identity: Bytes,
        options: PeerOptions,
    ) -> Result<Self, ConnectionError> {
        Ok(Self { connection: Connection::connect(address, SocketType::Dealer, identity, options).await? })
    }

    /// Sends a message. If the future is dropped, the rest of the message goes out before the next one.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this dealer cannot be used any more.
    pub async fn send<Frame: AsRef<[u8]>>(&mut self, frames: &[Frame]) -> Result<(), ConnectionError> {
        self.connection.session().send(frames)?;
        self.connection.flush().await
    }

    /// Receives the frames of the next message.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this dealer cannot be used any more.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ConnectionError> {
        self.connection.next_message().await
    }
}
