//! Which headers go on to engines, and back to clients.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    HeaderMap, Request, Response,
    header::{
        ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue,
        PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
    http::request::Parts,
};

use super::shared::Address;
use crate::schedule::Leg;

/// Names a request, for engines and clients.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Names a data-parallel rank, for vLLM's server.
const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Of one connection only (RFC 9110, 7.6.1).
const OF_THE_CONNECTION: [HeaderName; 8] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];
/// What the router says itself.
const OURS: [HeaderName; 5] = [HOST, CONTENT_LENGTH, EXPECT, REQUEST_ID, DATA_PARALLEL_RANK];

/// The request that an engine gets.
pub(super) fn to_engine(
    client: &Parts,
    address: &Address,
    leg: Leg,
    id: &str,
    body: Bytes,
) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = client.method.clone();
    let path = client.uri.path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = if address.path.is_empty() {
        client.uri.path_and_query().cloned().map(Into::into).unwrap_or_default()
    } else {
        format!("{}{path}", address.path).parse().unwrap_or_default()
    };
    let headers = request.headers_mut();
    headers.reserve(client.headers.len() + 2);
    let named = named_by_connection(&client.headers);
    for (name, value) in &client.headers {
        let is_left_out = OF_THE_CONNECTION.contains(name)
            || OURS.contains(name)
            || named.contains(name)
            // The router reads the prefill leg's answer.
            || leg == Leg::Prefill && *name == ACCEPT_ENCODING;
        if !is_left_out {
            headers.append(name.clone(), value.clone());
        }
    }
    if let Ok(host) = HeaderValue::from_str(&address.authority) {
        headers.insert(HOST, host);
    }
    if let Some(rank) = address.rank {
        headers.insert(DATA_PARALLEL_RANK, HeaderValue::from(rank));
    }
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
    request
}

/// The head of an engine's answer, as its client gets it.
pub(super) fn to_client<B>(response: &mut Response<B>, id: &HeaderValue) {
    let named = named_by_connection(response.headers());
    let headers = response.headers_mut();
    for name in OF_THE_CONNECTION.iter().chain(&named) {
        headers.remove(name);
    }
    headers.insert(REQUEST_ID, id.clone());
}

/// Headers that the Connection header names: they are of the connection, too.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let names = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    names.flat_map(|names| names.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}
