//! Serves one request of a client: checks it, reads and scans its body, then passes it to [`Work::serve`].
//!
//! The checks, in this order; the first that fails is the answer:
//! 1. the Host header, the client's key, the method and path;
//! 2. the size of the head; the body's size, and the rate at which it comes;
//! 3. the body's JSON, members that only the router may set, the model's name;
//! 4. whether requests of this class are refused now, because all nodes are overloaded.
//!
//! So a client without a key cannot make the router read a body. `/health` and preflights need no key, and have no body.

use std::{cell::Cell, future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HeaderValue},
    http::request::Parts,
};
use tokio::time::timeout;

use super::{
    answer::{AnswerBody, Problem, json_answer},
    attempt::Work,
    clients::{BODY_RATE_MIN, Client},
    doubted::Doubted,
    forward::REQUEST_ID,
    gathered::Gathered,
    held::Held,
    idle::Upstreams,
    paths::{Route, route as route_of},
    tally::Tally,
};
use crate::{
    body::Scan,
    counters::Counters,
    ids::RequestId,
    legs,
    schedule::NodeState,
    shared::{OutlineError, Shared},
};

/// Header with a request's class. In an overload the router refuses the classes that the operator has listed.
const REQUEST_CLASS: &str = "x-request-class";
/// Longest `x-request-id` of a client that its answer repeats.
const CLIENT_ID_BYTES_MAX: usize = 256;
/// Longest name of a model, with its escapes and quotes, because `/decisions` keeps it.
const MODEL_BYTES_MAX: usize = 1 << 10;
/// Heads up to this size do not count as memory of a request.
const HEAD_BYTES_FREE: usize = 8 << 10;
/// Engines answer a preflight at once. Strangers may send one, so a stuck engine must not hold their permits for long.
const PREFLIGHT_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of a body that are read before other tasks of the thread have their turn.
const TURN_BYTES: usize = 256 << 10;

/// A request whose head has arrived.
struct Arrived<'a> {
    shared: &'a Arc<Shared>,
    upstreams: &'a Upstreams,
    client: &'a Client,
    head: &'a Parts,
    id: RequestId,
    client_id: &'a HeaderValue,
    tally: &'a Tally<'a>,
}

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
    let arrived =
        Arrived { shared, upstreams, client, head: &head, id, client_id: &client_id, tally: &tally };
    let mut response = arrived.answer(body).await.unwrap_or_else(|problem| problem.answer());
    let measure = tally.begin_answer(&response);
    response.body_mut().measure(measure);
    if shared.is_stopping() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response.headers_mut().insert(REQUEST_ID, client_id);
    response
}

impl Arrived<'_> {
    async fn answer(&self, body: Incoming) -> Result<Response<AnswerBody>, Problem> {
        let Self { shared, head, .. } = self;
        let path = head.uri.path();
        if let Some(names) = &shared.settings.names {
            let checked = names.check(head.version, &head.uri, &head.headers);
            checked.map_err(|(status, sentence)| Problem {
                closes: true,
                ..Problem::new(status, sentence).with_param("Host")
            })?;
        }
        let route = route_of(&head.method, path, &head.headers, shared.settings.allow_admin_paths);
        let needs_no_key = path == "/health" || matches!(route, Ok(Route::Preflight));
        let is_allowed = is_allowed(&shared.settings.keys.read(), &head.headers);
        if !needs_no_key && !is_allowed {
            let problem =
                Problem::new(StatusCode::UNAUTHORIZED, "the request shows no key that this router knows");
            return Err(Problem { closes: true, ..problem }.with_param("Authorization"));
        }
        if is_allowed {
            self.tally.trace(head);
        }
        // A connection that shows no key gets one answer.
        let last = |mut answer: Response<AnswerBody>| {
            if !is_allowed {
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            answer
        };
        let held = Held::new(shared);
        match route? {
            Route::Health => Ok(last(health(shared))),
            Route::Models => Ok(models(shared)),
            // A preflight has no body, so the router does not read one.
            route @ Route::Preflight => {
                let passing =
                    timeout(PREFLIGHT_TIMEOUT, async { self.pass(&Bytes::new(), &held, route).await });
                let late =
                    || Problem::new(StatusCode::GATEWAY_TIMEOUT, "no engine answered the preflight in time");
                passing.await.unwrap_or_else(|_| Err(late())).map(last)
            }
            route => {
                let head_bytes = head_bytes(head);
                if head_bytes > HEAD_BYTES_FREE {
                    // Counted twice: the client's head, and the head of a leg.
                    held.take(2 * head_bytes)?;
                }
                let body = read(shared, body, self.client, &held).await?;
                self.pass(&body, &held, route).await
            }
        }
    }

    /// Checks the body, which has arrived, and passes the request on to nodes.
    async fn pass(&self, body: &Bytes, held: &Held, route: Route) -> Result<Response<AnswerBody>, Problem> {
        let Self { shared, upstreams, client, head, id, client_id, tally } = *self;
        let api = if let Route::Generates(api) = route { api } else { None };
        let is_post = head.method == Method::POST;
        let (scanned, marks) = if is_post && (api.is_some() || !body.is_empty() && is_json(&head.headers)) {
            let refused = |error: OutlineError| {
                let status = match &error {
                    OutlineError::Body(_) => StatusCode::BAD_REQUEST,
                    OutlineError::Ended => StatusCode::INTERNAL_SERVER_ERROR,
                };
                Problem::new(status, error.to_string())
            };
            let outlined = shared.scanner.outline(body).await.map_err(refused)?;
            held.take(outlined.bytes())?;
            (Some(Scan::new(body, outlined.outline)), outlined.marks)
        } else {
            (None, Vec::new())
        };
        if let Some(reserved) = scanned.as_ref().and_then(legs::reserved) {
            let problem = Problem::new(StatusCode::BAD_REQUEST, reserved.to_string());
            return Err(problem.with_param(reserved.param()));
        }
        if scanned.as_ref().and_then(|scan| scan.raw("model")).is_some_and(|raw| raw.len() > MODEL_BYTES_MAX)
        {
            let sentence = format!("model is longer than {MODEL_BYTES_MAX} bytes");
            return Err(Problem::new(StatusCode::BAD_REQUEST, sentence).with_param("model"));
        }
        let model = scanned.as_ref().and_then(|scan| scan.string("model"));
        if model.is_none()
            && scanned.as_ref().is_some_and(|scan| scan.raw("model").is_some_and(|value| value != b"null"))
        {
            return Err(Problem::new(StatusCode::BAD_REQUEST, "model is no string").with_param("model"));
        }
        tally.set_model(model.as_deref());
        if let Some(problem) = refused(shared, &head.headers, model.as_deref()) {
            return Err(problem);
        }
        // A node that only tokenizes a text does not cache it.
        let computed = scanned.as_ref().filter(|_| matches!(route, Route::Generates(_)));
        let marks = if computed.is_some() { marks } else { Vec::new() };
        if computed.is_some() {
            tally.set_marks(&marks);
        }
        let prompt = match computed {
            Some(scan) => shared.knowledge.prompt(head.uri.path(), body, scan, model.as_deref()).await,
            None => None,
        };
        held.take(prompt.as_ref().map_or(0, |prompt| prompt.tokens.capacity() * size_of::<u32>()))?;
        let work = Work {
            shared,
            upstreams,
            head,
            body,
            scan: scanned.as_ref(),
            model: model.as_deref(),
            marks: &marks,
            prompt: prompt.as_ref(),
            held,
            id,
            client_id,
            streams: scanned.as_ref().is_some_and(is_one_stream),
            one_node: api
                .zip(scanned.as_ref())
                .is_none_or(|(api, scan)| legs::unsplittable_at(api, scan).is_some()),
            api,
            computes: matches!(route, Route::Generates(_)),
            taken: Cell::new(0),
            doubted: Doubted::new(shared, client, &head.headers, body),
            attempts: Cell::new(0),
            tally,
        };
        Ok(work.serve().await)
    }
}

/// The refusal of a request, if its class is refused now.
fn refused(shared: &Shared, headers: &HeaderMap, model: Option<&str>) -> Option<Problem> {
    let class = headers.get(REQUEST_CLASS).map_or(Some("default"), |value| value.to_str().ok())?;
    let wait = shared.refusal(class, model)?;
    Counters::count(&shared.counters.shed);
    let sentence = format!(
        "all engines are overloaded, and requests of the class {class} are refused until they are not"
    );
    Some(Problem { retry_after: Some(wait), ..Problem::new(StatusCode::TOO_MANY_REQUESTS, sentence) })
}

/// Whether the request shows a key, or needs none. The time that this takes reveals only a key's length.
fn is_allowed(keys: &[String], headers: &HeaderMap) -> bool {
    shows_key(keys, headers.get(AUTHORIZATION).map(HeaderValue::as_bytes))
}

/// Whether an Authorization header shows one of the keys.
pub(super) fn shows_key(keys: &[String], authorization: Option<&[u8]>) -> bool {
    let shown = authorization.and_then(|value| value.strip_prefix(b"Bearer "));
    let is = |key: &String, shown: &[u8]| {
        let differing =
            key.bytes().zip(shown).fold(0, |differing, (ours, theirs)| differing | (ours ^ theirs));
        key.len() == shown.len() && std::hint::black_box(differing) == 0
    };
    keys.is_empty() || shown.is_some_and(|shown| keys.iter().fold(false, |any, key| is(key, shown) | any))
}

/// Reads the whole body. Fails if it is too long, its client too slow, or the memory for all requests used up.
async fn read(shared: &Shared, mut body: Incoming, client: &Client, held: &Held) -> Result<Bytes, Problem> {
    let (most, patience) = (shared.settings.body_bytes_max, shared.settings.client_timeout);
    let closing = |status, sentence: String| Problem { closes: true, ..Problem::new(status, sentence) };
    let too_large = || closing(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {most} bytes"));
    let too_slow = || {
        let sentence = format!(
            "the body comes too slowly: nothing for {} s, or fewer than {BODY_RATE_MIN} bytes a second",
            patience.as_secs_f64()
        );
        closing(StatusCode::REQUEST_TIMEOUT, sentence)
    };
    let announced = body.size_hint();
    if announced.lower() > most as u64 {
        return Err(too_large());
    }
    // An announced length costs no memory: only bytes that have arrived count.
    let mut gathered = Gathered::new(announced.exact().map(|bytes| bytes as usize), most);
    let mut turn = 0;
    client.begin_body();
    loop {
        let frame = poll_fn(|context| match Pin::new(&mut body).poll_frame(context) {
            Poll::Pending if client.sends_too_slowly() => Poll::Ready(Err(too_slow())),
            polled => polled.map(Ok),
        });
        let Some(frame) = frame.await? else { break };
        let unreadable = |error: &dyn std::fmt::Display| {
            closing(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}"))
        };
        let Ok(piece) = frame.map_err(|error| unreadable(&error))?.into_data() else { continue };
        client.count_body(piece.len());
        if gathered.len() + piece.len() > most {
            return Err(too_large());
        }
        held.take(piece.len())?;
        turn += piece.len();
        let no_room =
            |error| closing(StatusCode::SERVICE_UNAVAILABLE, format!("no memory for the body: {error}"));
        gathered.add(piece).map_err(no_room)?;
        if turn >= TURN_BYTES {
            turn = 0;
            tokio::task::yield_now().await;
        }
    }
    client.end_body();
    Ok(gathered.whole())
}

/// Whether the request asks for one answer, token by token.
fn is_one_stream(scan: &Scan<'_>) -> bool {
    let is_one = scan.raw("n").is_none_or(|count| matches!(count, b"1" | b"null"))
        && legs::unsplittable(scan) != Some(legs::Unsplittable::ManyPrompts);
    scan.raw("stream") == Some(b"true") && is_one
}

/// The head's size, without the method and the bytes between headers.
fn head_bytes(head: &Parts) -> usize {
    let of_headers = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len());
    of_headers.sum::<usize>() + head.uri.path_and_query().map_or(0, |path| path.as_str().len())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("application/json");
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// The id under which the client knows the request: its own if it gave one, else the router's. The answer repeats it; the router
/// does not read it.
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

/// All models that the nodes serve. If several nodes describe a model, any of these descriptions is taken.
fn models(shared: &Shared) -> Response<AnswerBody> {
    json_answer(StatusCode::OK, shared.models_page())
}
