//! Asks a node: over a connection that is kept, or a new one.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::Response;
use tokio::{net::TcpStream, time::timeout};

use super::{
    exchange::{Connection, Incoming},
    idle::Upstreams,
    shared::Address,
    upstream_error::UpstreamError,
};

/// Sends a request, a head and a body, and waits for the head of its answer. A kept connection that the node has closed
/// meanwhile is no failure of the node: the request goes over another one then.
pub(super) async fn send(
    upstreams: &Upstreams,
    address: &Arc<Address>,
    head: Bytes,
    body: Bytes,
    connect_timeout: Duration,
) -> Result<Response<Incoming>, UpstreamError> {
    while let Some(stream) = upstreams.take(address) {
        let connection = Connection::new(stream, upstreams.clone(), Arc::clone(address));
        match connection.ask(head.clone(), body.clone()).await {
            // Nothing has come back of a node that closes a connection just now: it has not worked at the request.
            Err(UpstreamError::Closed | UpstreamError::Failed(_)) => {}
            answered => return answered,
        }
    }
    let stream = connect(address, connect_timeout).await?;
    Connection::new(stream, upstreams.clone(), Arc::clone(address)).ask(head, body).await
}

async fn connect(address: &Address, connect_timeout: Duration) -> Result<TcpStream, UpstreamError> {
    let connecting = TcpStream::connect((address.host.as_str(), address.port));
    let stream = timeout(connect_timeout, connecting)
        .await
        .map_err(|_| UpstreamError::Slow(connect_timeout))?
        .map_err(UpstreamError::Refused)?;
    stream.set_nodelay(true).map_err(UpstreamError::Refused)?;
    Ok(stream)
}
