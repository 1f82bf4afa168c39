//! Fetches a page of a node's server: one connection and one GET, within two seconds.

use std::{io, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};

use crate::address::Address;

/// Time for the connection and the whole answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A page of a node.
#[derive(Debug)]
pub(crate) struct NodePage {
    pub(crate) body: Bytes,
    /// Where the node was reached: its name may have several addresses.
    pub(crate) at: Option<SocketAddr>,
}

/// The node gave no page.
#[derive(Debug, Error)]
pub(crate) enum PageError {
    #[error("no connection: {0}")]
    Connection(#[from] io::Error),
    #[error("no answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("it answered {status} to GET {path}")]
    Status { status: StatusCode, path: &'static str },
    #[error("its answer to GET {path} is longer than {bytes_max} bytes, or ends early")]
    Length { path: &'static str, bytes_max: usize },
}

/// Fetches the page at this path of a node. A page of more than `bytes_max` is an error.
pub(crate) async fn get(
    address: &Address,
    path: &'static str,
    bytes_max: usize,
) -> Result<NodePage, PageError> {
    let fetched = timeout(PATIENCE, fetch(address, path, bytes_max)).await;
    fetched.unwrap_or(Err(PageError::Late))
}

async fn fetch(address: &Address, path: &'static str, bytes_max: usize) -> Result<NodePage, PageError> {
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
    let at = stream.peer_addr().ok();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = format!("{}{path}", address.path).parse().unwrap_or_default();
    if let Ok(host) = address.authority.parse() {
        request.headers_mut().insert(HOST, host);
    }
    let response = sender.send_request(request).await?;
    let status = response.status();
    let collected = Limited::new(response.into_body(), bytes_max).collect().await;
    drop(sender);
    connection.abort();
    if !status.is_success() {
        return Err(PageError::Status { status, path });
    }
    let body = collected.map_err(|_| PageError::Length { path, bytes_max })?.to_bytes();
    Ok(NodePage { body, at })
}
