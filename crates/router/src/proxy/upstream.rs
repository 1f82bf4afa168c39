//! Sends a request to a node, over a kept connection or a new one, and repeats it once if the engine cannot have begun it.
//!
//! An engine closes kept connections that were idle for long (vLLM after 5 s), and may do so just as a request is sent. The router
//! sends such a request once more, over a new connection, if the engine cannot have begun it:
//!
//! | the kept connection | the engine had | the router |
//! |---|---|---|
//! | failed before all of the request was written | not all of it | sends it again |
//! | was closed by the engine (FIN), whose kernel had not acknowledged all of the request | closed before all of it came | sends it again |
//! | was closed, and all of the request was acknowledged | read it | fails: the engine took it |
//! | was reset (RST) without a close before | perhaps read it: a kernel may delay its acknowledgement, and a reset brings none | fails, as if the engine had taken it |
//!
//! If the engine resets the connection and its kernel has acknowledged nothing of the request, the error is
//! [`UpstreamError::Reset`]. Most such engines have not read the request.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::Response;
use tokio::{net::TcpStream, time::timeout};

use super::{
    exchange::{Connection, Incoming},
    idle::Upstreams,
    outgoing::Outgoing,
    upstream_error::UpstreamError,
};
use crate::address::Address;

/// Sends the head and body of a request, and waits for the head of its answer.
pub(super) async fn send(
    upstreams: &Upstreams,
    address: &Arc<Address>,
    head: Bytes,
    body: Outgoing,
    connect_timeout: Duration,
) -> Result<Response<Incoming>, UpstreamError> {
    let mut ended = None;
    if let Some(stream) = upstreams.take(address) {
        let connection = Connection::new(stream, upstreams.clone(), Arc::clone(address));
        match connection.send_request(head.clone(), body.clone()).await {
            Err(error @ UpstreamError::NotBegun) => ended = Some(error),
            Err(error @ UpstreamError::Reset(_)) => {
                // The other kept connections were idle for longer, so they may be reset as well.
                upstreams.forget(address);
                return Err(error);
            }
            answered => return answered,
        }
    }
    // An engine that refuses connections after it ended one with a request may have died of that request.
    let stream = connect(address, connect_timeout).await.map_err(|error| ended.unwrap_or(error))?;
    let connection = Connection::new(stream, upstreams.clone(), Arc::clone(address));
    // The connection was new, so the engine did not close it for being idle.
    connection.send_request(head, body).await.map_err(|error| match error {
        UpstreamError::Reset(error) => UpstreamError::Failed(error),
        error => error,
    })
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
