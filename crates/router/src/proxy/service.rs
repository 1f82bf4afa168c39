//! What becomes of a client's request before it is served: routes, limits, and what is wrong with it.

use std::{
    cell::Cell,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::Poll,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderValue},
    http::request::Parts,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    answer::{AnswerBody, Problem, json_answer},
    attempt::Work,
    clients::Client,
    forward::REQUEST_ID,
    idle::Upstreams,
    shared::{Counters, Shared},
    tally::Tally,
};
use crate::{
    body::{Scan, marks, scan},
    ids::RequestId,
    legs,
    schedule::NodeState,
};

/// Says of which class a request is, for those that are refused in an overload.
const REQUEST_CLASS: &str = "x-request-class";
/// Longest id of a client that comes back to it.
const CLIENT_ID_BYTES_MAX: usize = 256;

/// Answers one request.
pub(super) async fn answer(
    shared: &Arc<Shared>,
    upstreams: &Upstreams,
    client: &Client,
    request: Request<Incoming>,
) -> Response<AnswerBody> {
    let (head, body) = request.into_parts();
    let id = shared.state.lock().ids.next_id();
    let client_id = client_id(&head.headers, id);
    let tally = Tally::begin(shared, &head);
    let mut response = match route(shared, upstreams, client, &head, body, id, &client_id, &tally).await {
        Ok(response) => response,
        Err(problem) => problem.answer(),
    };
    let measure = tally.answered(&response);
    response.body_mut().measure(measure);
    if shared.is_stopping() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response.headers_mut().insert(REQUEST_ID, client_id);
    response
}

#[allow(clippy::too_many_arguments, reason = "what a request needs on its way, handed on once")]
async fn route(
    shared: &Arc<Shared>,
    upstreams: &Upstreams,
    client: &Client,
    head: &Parts,
    body: Incoming,
    id: RequestId,
    client_id: &HeaderValue,
    tally: &Tally<'_>,
) -> Result<Response<AnswerBody>, Problem> {
    let path = head.uri.path();
    if path != "/health" && !is_allowed(&shared.settings.keys.read(), &head.headers) {
        let problem =
            Problem::new(StatusCode::UNAUTHORIZED, "the request shows no key that this router knows");
        return Err(Problem { closes: true, ..problem }.with_param("Authorization"));
    }
    match (&head.method, path) {
        (&Method::GET, "/health") => Ok(health(shared)),
        (&Method::GET, "/v1/models") => Ok(models(shared)),
        (&Method::POST, _) if path.starts_with("/v1/") && is_plain(path) => {
            let mut held = Held { shared, bytes: 0 };
            let body = read(body, client, &mut held).await?;
            post(shared, upstreams, head, &body, id, client_id, tally).await
        }
        (_, "/health" | "/v1/models") => Err(Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} is asked with GET, not with {}", head.method),
        )),
        _ => Err(Problem::new(StatusCode::NOT_FOUND, format!("{} {path} is not served here", head.method))),
    }
}

/// A problem if requests of this one's class are refused now.
fn refused(shared: &Shared, headers: &HeaderMap, model: Option<&str>) -> Option<Problem> {
    let class = headers.get(REQUEST_CLASS).map_or(Some("default"), |value| value.to_str().ok())?;
    let wait = shared.refusal(class, model)?;
    Counters::count(&shared.counters.shed);
    let sentence = format!(
        "all engines are overloaded, and requests of the class {class} are refused until they are not"
    );
    Some(Problem { retry_after: Some(wait), ..Problem::new(StatusCode::TOO_MANY_REQUESTS, sentence) })
}

/// Whether a path means to an engine what it means here: engines decode what is escaped in it.
fn is_plain(path: &str) -> bool {
    !path.contains('%') && path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
}

/// Whether a request may be served. How long this takes tells nothing of a key but its length.
fn is_allowed(keys: &[String], headers: &HeaderMap) -> bool {
    let shown = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let is = |key: &String, shown: &[u8]| {
        let differing =
            key.bytes().zip(shown).fold(0, |differing, (ours, theirs)| differing | (ours ^ theirs));
        key.len() == shown.len() && std::hint::black_box(differing) == 0
    };
    keys.is_empty() || shown.is_some_and(|shown| keys.iter().fold(false, |any, key| is(key, shown) | any))
}

/// The whole body, unless it is too long or its client too slow.
async fn read(mut body: Incoming, client: &Client, held: &mut Held<'_>) -> Result<Bytes, Problem> {
    let (most, patience) = (held.shared.settings.body_bytes_max, held.shared.settings.client_timeout);
    let too_large = || Problem {
        closes: true,
        ..Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {most} bytes"))
    };
    let too_slow = || Problem {
        closes: true,
        ..Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("nothing more of the body came for {} s", patience.as_secs_f64()),
        )
    };
    let announced = body.size_hint().lower();
    if announced > most as u64 {
        return Err(too_large());
    }
    // What a client announces costs nothing yet: it has to send it first.
    let mut whole = BytesMut::new();
    let mut only: Option<Bytes> = None;
    loop {
        client.sends();
        let frame = poll_fn(|context| match Pin::new(&mut body).poll_frame(context) {
            Poll::Pending if client.sends_too_slowly() => Poll::Ready(Err(too_slow())),
            polled => polled.map(Ok),
        });
        let Some(frame) = frame.await? else { break };
        let frame = frame.map_err(|error| Problem {
            closes: true,
            ..Problem::new(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}"))
        })?;
        let Ok(piece) = frame.into_data() else { continue };
        let so_far = whole.len() + only.as_ref().map_or(0, Bytes::len);
        if so_far + piece.len() > most {
            return Err(too_large());
        }
        held.take(piece.len())?;
        if so_far == 0 {
            only = Some(piece);
            continue;
        }
        if let Some(only) = only.take() {
            whole.reserve((announced as usize).min(1 << 20));
            whole.extend_from_slice(&only);
        }
        whole.extend_from_slice(&piece);
    }
    client.has_sent();
    Ok(only.unwrap_or_else(|| whole.freeze()))
}

/// What a request takes of the bytes that all bodies together may have, until it is dropped.
struct Held<'s> {
    shared: &'s Shared,
    bytes: usize,
}

impl Held<'_> {
    fn take(&mut self, bytes: usize) -> Result<(), Problem> {
        self.bytes += bytes;
        let before = self.shared.counters.body_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let most = self.shared.settings.bodies_bytes_max;
        if before + bytes as u64 <= most as u64 {
            return Ok(());
        }
        let sentence = format!("this router holds {most} bytes of requests already; ask again");
        Err(Problem {
            closes: true,
            retry_after: Some(Duration::from_secs(1)),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
        })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.shared.counters.body_bytes.fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

async fn post(
    shared: &Arc<Shared>,
    upstreams: &Upstreams,
    head: &Parts,
    body: &Bytes,
    id: RequestId,
    client_id: &HeaderValue,
    tally: &Tally<'_>,
) -> Result<Response<AnswerBody>, Problem> {
    let can_split = matches!(head.uri.path(), "/v1/completions" | "/v1/chat/completions");
    let scanned = if can_split || is_json(&head.headers) {
        let bad = |error: crate::body::BodyError| Problem::new(StatusCode::BAD_REQUEST, error.to_string());
        Some(scan(body).map_err(bad)?)
    } else {
        None
    };
    if let Some(scan) = &scanned
        && scan.raw(legs::TRANSFER).is_some_and(|value| value != b"null")
    {
        let sentence = "kv_transfer_params are the router's to set: leave them out";
        return Err(Problem::new(StatusCode::BAD_REQUEST, sentence).with_param(legs::TRANSFER));
    }
    let model = scanned.as_ref().and_then(|scan| scan.string("model"));
    if model.is_none()
        && scanned.as_ref().is_some_and(|scan| scan.raw("model").is_some_and(|value| value != b"null"))
    {
        return Err(Problem::new(StatusCode::BAD_REQUEST, "model is no string").with_param("model"));
    }
    tally.names(model.as_deref());
    if let Some(problem) = refused(shared, &head.headers, model.as_deref()) {
        return Err(problem);
    }
    let marks = scanned.as_ref().map(|scan| marks(scan, seed(scan))).unwrap_or_default();
    let prompt = match &scanned {
        Some(scan) => shared.knowledge.prompt(head.uri.path(), scan, model.as_deref()).await,
        None => None,
    };
    let work = Work {
        shared,
        upstreams,
        head,
        body,
        scan: scanned.as_ref(),
        model: model.as_deref(),
        marks: &marks,
        prompt: prompt.as_ref(),
        id,
        client_id,
        streams: scanned.as_ref().is_some_and(is_one_stream),
        one_node: !can_split || scanned.as_ref().is_none_or(|scan| legs::stays(scan).is_some()),
        taken: Cell::new(0),
        attempts: Cell::new(0),
        tally,
    };
    Ok(work.serve().await)
}

/// Whether one answer comes token by token.
fn is_one_stream(scan: &Scan<'_>) -> bool {
    let is_one = scan.raw("n").is_none_or(|count| matches!(count, b"1" | b"null"))
        && legs::stays(scan) != Some(legs::Stays::ManyPrompts);
    scan.raw("stream") == Some(b"true") && is_one
}

/// What decides, besides the text, which blocks a prompt has.
fn seed(scan: &Scan<'_>) -> u64 {
    ["model", "cache_salt", "tools"]
        .into_iter()
        .fold(0, |seed, name| xxh3_64_with_seed(scan.raw(name).unwrap_or_default(), seed))
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("application/json");
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// What the client knows the request by: its own id if it gave one, else ours. It is handed back and not read.
fn client_id(headers: &HeaderMap, id: RequestId) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|given| given.len() <= CLIENT_ID_BYTES_MAX).cloned();
    given
        .or_else(|| HeaderValue::from_str(&id.name()).ok())
        .unwrap_or_else(|| HeaderValue::from_static("kvlane"))
}

fn health(shared: &Shared) -> Response<AnswerBody> {
    if shared.is_stopping() {
        return Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the router stops").answer();
    }
    let is_served =
        shared.with_scheduler(|scheduler| scheduler.nodes().any(|(_, node)| node.state == NodeState::Ready));
    if is_served {
        json_answer(StatusCode::OK, r#"{"status": "ok"}"#.into())
    } else {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no node is ready").answer()
    }
}

/// All models that some node serves, as the first one that has it describes it.
fn models(shared: &Shared) -> Response<AnswerBody> {
    json_answer(StatusCode::OK, shared.models_page())
}
