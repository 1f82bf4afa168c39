//! Asks a node: over a connection that is kept, or a new one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::Response;
use tokio::{net::TcpStream, time::timeout};

use super::{
    exchange::{Connection, Incoming},
    idle::Upstreams,
    outgoing::Outgoing,
    shared::Address,
    upstream_error::UpstreamError,
};

/// A node that ends a kept connection later than this after a request has worked at it.
const JUST_NOW: Duration = Duration::from_millis(200);

/// Sends a request, a head and a body, and waits for the head of its answer. A kept connection that the node closes just now
/// is no failure of the node: the request goes over a new one then, once.
pub(super) async fn send(
    upstreams: &Upstreams,
    address: &Arc<Address>,
    head: Bytes,
    body: Outgoing,
    connect_timeout: Duration,
) -> Result<Response<Incoming>, UpstreamError> {
    let mut lost = None;
    if let Some(stream) = upstreams.take(address) {
        let asked = Instant::now();
        let connection = Connection::new(stream, upstreams.clone(), Arc::clone(address));
        match connection.ask(head.clone(), body.clone()).await {
            Err(error @ (UpstreamError::Closed | UpstreamError::Failed(_))) if asked.elapsed() < JUST_NOW => {
                lost = Some(error);
            }
            answered => return answered,
        }
    }
    // A node that cannot be reached after it has closed a connection with a request may have died of it.
    let stream = connect(address, connect_timeout).await.map_err(|error| lost.unwrap_or(error))?;
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
