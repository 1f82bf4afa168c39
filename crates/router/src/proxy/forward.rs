//! Builds the head of a leg's request from the client's head, and removes hop-by-hop headers from answers.

use bytes::Bytes;
use hyper::{
    HeaderMap, Response,
    header::{
        ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName,
        PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
    http::{request::Parts, uri::PathAndQuery},
};

use crate::{address::Address, schedule::Leg, traces::TRACEPARENT};

/// Initial capacity for the head of a request. Most heads are shorter.
const HEAD_BYTES: usize = 512;
/// Header with a request's id, for engines and clients.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header with a data-parallel rank, for vLLM's server.
const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Hop-by-hop headers, which concern one connection only (RFC 9110, 7.6.1).
static HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];
/// Headers that the router sets itself.
static OWN_HEADERS: [HeaderName; 5] = [HOST, CONTENT_LENGTH, EXPECT, REQUEST_ID, DATA_PARALLEL_RANK];

/// The head of a leg's request, as bytes. `passes_key`: the client's key is not one of the router's, so it passes. With a key of
/// the router an engine could send requests as a client. `traceparent` takes the place of the client's.
pub(super) fn to_engine(
    client: &Parts,
    address: &Address,
    leg: Leg,
    id: &str,
    body_bytes: usize,
    passes_key: bool,
    traceparent: Option<&str>,
) -> Bytes {
    let path = client.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let length = body_bytes.to_string();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    let mut write = |pieces: &[&[u8]]| pieces.iter().for_each(|piece| head.extend_from_slice(piece));
    write(&[client.method.as_str().as_bytes(), b" ", address.path.as_bytes(), path.as_bytes()]);
    write(&[b" HTTP/1.1\r\nhost: ", address.authority.as_bytes()]);
    write(&[b"\r\nx-request-id: ", id.as_bytes(), b"\r\ncontent-length: ", length.as_bytes(), b"\r\n"]);
    let named = named_by_connection(&client.headers);
    for (name, value) in &client.headers {
        let is_left_out = HOP_BY_HOP.contains(name)
            || OWN_HEADERS.contains(name)
            || named.contains(name)
            || *name == AUTHORIZATION && !passes_key
            || traceparent.is_some() && name.as_str() == TRACEPARENT
            // The router reads the prefill leg's answer, so it must not be compressed.
            || leg == Leg::Prefill && *name == ACCEPT_ENCODING;
        if !is_left_out {
            write(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
        }
    }
    if let Some(traceparent) = traceparent {
        write(&[TRACEPARENT.as_bytes(), b": ", traceparent.as_bytes(), b"\r\n"]);
    }
    if let Some(rank) = address.rank {
        write(&[DATA_PARALLEL_RANK.as_str().as_bytes(), b": ", rank.to_string().as_bytes(), b"\r\n"]);
    }
    write(&[b"\r\n"]);
    head.into()
}

/// Removes hop-by-hop headers from an engine's answer.
pub(super) fn to_client<B>(response: &mut Response<B>) {
    let headers = response.headers_mut();
    let named = named_by_connection(headers);
    let is_hop_by_hop = |name: &HeaderName| HOP_BY_HOP.contains(name) || named.contains(name);
    // One pass over the names, because most answers have one such header, and a lookup of each name takes longer.
    while let Some(name) = headers.keys().find(|name| is_hop_by_hop(name)).cloned() {
        headers.remove(name);
    }
}

/// Headers that the Connection header names, which are hop-by-hop, too.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let names = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    names.flat_map(|names| names.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}
