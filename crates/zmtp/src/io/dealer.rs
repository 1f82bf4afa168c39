//! The DEALER side of one connection to a ROUTER socket.

use std::net::SocketAddr;

use bytes::Bytes;

use super::{
    connection::{Connection, ConnectionError},
    peer_options::PeerOptions,
};
use crate::SocketType;

/// Asks a ROUTER or REP socket, in no order of turns. To one that expects a REQ socket, send an empty first frame, and
/// expect one. It is one connection: when that ends, the caller connects anew.
#[derive(Debug)]
pub struct Dealer {
    connection: Connection,
}

impl Dealer {
    /// Connects to the socket at `address`. An empty `identity` has a ROUTER there choose one.
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

    /// Sends a message. If the future is dropped, what is left of the message goes out before the next.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this dealer is of no more use.
    pub async fn send<Frame: AsRef<[u8]>>(&mut self, frames: &[Frame]) -> Result<(), ConnectionError> {
        self.connection.session().send(frames)?;
        self.connection.flush().await
    }

    /// The frames of the next message.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this dealer is of no more use.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ConnectionError> {
        self.connection.next_message().await
    }
}
