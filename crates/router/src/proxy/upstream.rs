//! Connections to nodes, kept alive: those of one thread.

use std::{cell::RefCell, collections::HashMap, io, rc::Rc, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};

use super::shared::Address;

/// Idle connections that are kept for each node.
const IDLE_MAX: usize = 256;
/// Longest headers of an answer.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// A node did not answer.
#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    #[error("it refuses connections: {0}")]
    Refused(io::Error),
    #[error("it did not take the connection within {} ms", .0.as_millis())]
    Slow(Duration),
    #[error("it ended the connection before an answer: {0}")]
    Ended(hyper::Error),
}

type Sender = SendRequest<Full<Bytes>>;

/// Idle connections by address.
#[derive(Debug, Clone, Default)]
pub(super) struct Upstreams {
    idle: Rc<RefCell<HashMap<Arc<Address>, Vec<Sender>>>>,
}

/// A connection that carries an answer. It goes back to the idle ones when all of the answer was read.
#[derive(Debug)]
pub(super) struct Lent {
    upstreams: Upstreams,
    address: Arc<Address>,
    sender: Sender,
}

impl Lent {
    /// The answer was read to its end.
    pub(super) fn give_back(self) {
        let mut idle = self.upstreams.idle.borrow_mut();
        let of_node = idle.entry(self.address).or_default();
        if of_node.len() < IDLE_MAX {
            of_node.push(self.sender);
        }
    }
}

impl Upstreams {
    /// Sends a request and waits for the head of its answer. A kept connection that the node has closed meanwhile is no
    /// failure of the node: the request goes over another one then.
    pub(super) async fn send(
        &self,
        address: &Arc<Address>,
        request: impl Fn() -> Request<Full<Bytes>>,
        connect_timeout: Duration,
    ) -> Result<(Response<Incoming>, Lent), UpstreamError> {
        while let Some(mut sender) = self.take_idle(address) {
            if sender.ready().await.is_err() {
                continue;
            }
            // Nothing has come back of a node that closes a connection just now: it has not worked at the request.
            if let Ok(response) = sender.try_send_request(request()).await {
                return Ok((response, self.lent(address, sender)));
            }
        }
        let mut sender = connect(address, connect_timeout).await?;
        match sender.try_send_request(request()).await {
            Ok(response) => Ok((response, self.lent(address, sender))),
            Err(mut error) => {
                drop(error.take_message());
                Err(UpstreamError::Ended(error.into_error()))
            }
        }
    }

    fn take_idle(&self, address: &Arc<Address>) -> Option<Sender> {
        let mut idle = self.idle.borrow_mut();
        let of_node = idle.get_mut(address)?;
        // The last one that was used: the others may grow old and be closed.
        while let Some(sender) = of_node.pop() {
            if !sender.is_closed() {
                return Some(sender);
            }
        }
        None
    }

    fn lent(&self, address: &Arc<Address>, sender: Sender) -> Lent {
        Lent { upstreams: self.clone(), address: Arc::clone(address), sender }
    }
}

async fn connect(address: &Address, connect_timeout: Duration) -> Result<Sender, UpstreamError> {
    let connecting = TcpStream::connect((address.host.as_str(), address.port));
    let stream = timeout(connect_timeout, connecting)
        .await
        .map_err(|_| UpstreamError::Slow(connect_timeout))?
        .map_err(UpstreamError::Refused)?;
    stream.set_nodelay(true).map_err(UpstreamError::Refused)?;
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(HEADER_BYTES_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(UpstreamError::Ended)?;
    tokio::task::spawn_local(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to a node ended");
        }
    });
    Ok(sender)
}
