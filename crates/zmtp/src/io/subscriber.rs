//! [`Subscriber`]: the SUB side of one connection to a PUB socket.

use std::net::SocketAddr;

use bytes::Bytes;

use super::{
    connection::{Connection, ConnectionError},
    peer_options::PeerOptions,
};
use crate::SocketType;

/// Receives the messages that a PUB socket publishes under a topic.
///
/// When the connection ends, [`Subscriber::recv`] says why, and the caller connects anew. Messages that are published
/// meanwhile are lost, so number them. A peer that vanishes is not noticed, so bound the silence with a timeout around
/// `recv`; dropping its future loses nothing.
#[derive(Debug)]
pub struct Subscriber {
    connection: Connection,
}

impl Subscriber {
    /// Connects to the PUB or XPUB socket at `address`, and subscribes to all messages whose first frame begins with
    /// `topic`. The subscription may not have arrived when this returns. Messages that are published before it arrives
    /// do not come.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub async fn connect(
        address: SocketAddr,
        topic: &[u8],
        options: PeerOptions,
    ) -> Result<Self, ConnectionError> {
        let mut connection = Connection::connect(address, SocketType::Sub, Bytes::new(), options).await?;
        connection.session().subscribe(topic)?;
        connection.flush().await?;
        Ok(Self { connection })
    }

    /// Receives the frames of the next message.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this subscriber cannot be used any more.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ConnectionError> {
        self.connection.next_message().await
    }
}
