//! The SUB side of one connection to a PUB socket.

use std::net::SocketAddr;

use bytes::Bytes;

use super::{
    connection::{Connection, ConnectionError},
    peer_options::PeerOptions,
};
use crate::SocketType;

/// Receives what a PUB socket publishes under a topic.
///
/// It is one connection: when that ends, [`Subscriber::recv`] says why, and the caller connects anew. What was published
/// meanwhile is lost, so number the messages. A peer that is gone without a word is not noticed: bound the silence with a
/// timeout around `recv`, which may be dropped without losing anything.
#[derive(Debug)]
pub struct Subscriber {
    connection: Connection,
}

impl Subscriber {
    /// Connects to the PUB or XPUB socket at `address`, and asks for all messages whose first frame begins with `topic`.
    /// The subscription is on its way when this returns: what is published before it arrives does not come.
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

    /// The frames of the next message.
    ///
    /// # Errors
    /// [`ConnectionError`], after which this subscriber is of no more use.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ConnectionError> {
        self.connection.next_message().await
    }
}
