//! Counts one request in the [request metrics](crate::request_metrics): its route, its node, and its times.

use std::{
    cell::{Cell, RefCell},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use hyper::{Method, Response, StatusCode, header::CONTENT_TYPE, http::request::Parts};

use crate::{
    address::Address,
    body::Mark,
    recording::{Ended, Recording, blocks},
    request_metrics::{Answerer, BETWEEN_TOKENS_BOUNDS_US, PendingTokens, ROUTES, Series, route_of},
    schedule::{Choice, Leg, NodeId},
    shared::Shared,
    traces::{OpenSpan, RequestTrace},
};
use kvlane_trace::Lengths;

/// Times between tokens that an answer gathers before it adds them to the shared histogram.
const PENDING_MAX: u32 = 64;
/// nginx's status for requests whose client left before an answer began.
const CLIENT_LEFT: u16 = 499;
/// The last event of a stream, which is not a token.
const STREAM_END: &[u8] = b"data: [DONE]\n\n";
/// Part of the first event of a chat's stream. This event comes with the first token, but is not one.
const ROLE: &[u8] = b"\"role\"";
/// Precedes the token count in the `usage` of an answer in one piece.
const COMPLETION_TOKENS: &[u8] = b"\"completion_tokens\":";
/// The same in `/v1/responses` and `/v1/messages`.
const OUTPUT_TOKENS: &[u8] = b"\"output_tokens\":";
/// Precedes the prompt's token count.
const PROMPT_TOKENS: [&[u8]; 2] = [b"\"prompt_tokens\":", b"\"input_tokens\":"];

/// A request that has no answer yet. If this is dropped, the client has left.
pub(super) struct Tally<'s> {
    shared: &'s Shared,
    began: Instant,
    route: usize,
    is_measured: Cell<bool>,
    model: RefCell<Option<String>>,
    /// The node of the last attempt.
    node: Cell<Option<NodeId>>,
    attempts: Cell<u64>,
    prompt_tokens: Cell<u64>,
    cached_tokens: Cell<u64>,
    /// Blocks of the prompt's text, if requests are recorded.
    blocks: Cell<Option<Vec<u64>>>,
    trace: RefCell<RequestTrace>,
}

/// An answer on its way to the client. When it is dropped, it counts the duration of the request.
#[derive(Debug)]
pub(super) struct Measure {
    series: Arc<Series>,
    began: Instant,
    streams: bool,
    /// Time of the last token.
    last: Option<Instant>,
    pending: PendingTokens,
    /// None if requests are not recorded.
    recorded: Option<Box<Recorded>>,
    /// The request's span, which ends with the answer.
    _span: Option<Box<OpenSpan>>,
}

/// The part of a recorded request that is known so far.
#[derive(Debug)]
struct Recorded {
    recording: Arc<Recording>,
    ended: Ended,
    /// The engine's answer has said how many tokens it has.
    is_counted: bool,
}

impl<'s> Tally<'s> {
    /// Begins to count a request whose head has arrived. Only POSTs count, because others are probes and lists.
    pub(super) fn begin(shared: &'s Shared, head: &Parts) -> Self {
        let is_measured = head.method == Method::POST;
        Self {
            shared,
            began: Instant::now(),
            route: route_of(head.uri.path()),
            is_measured: Cell::new(is_measured),
            model: RefCell::default(),
            node: Cell::default(),
            attempts: Cell::default(),
            prompt_tokens: Cell::default(),
            cached_tokens: Cell::default(),
            blocks: Cell::default(),
            trace: RefCell::default(),
        }
    }

    /// Notes the marks of a prompt that an engine computes, if requests are recorded.
    pub(super) fn set_marks(&self, marks: &[Mark]) {
        if self.shared.recording.is_on() {
            self.blocks.set(Some(blocks(marks)));
        }
    }

    /// Sets the model that the request names.
    pub(super) fn set_model(&self, model: Option<&str>) {
        *self.model.borrow_mut() = model.map(str::to_owned);
    }

    /// Notes a choice, and counts an attempt at the node that shall answer.
    pub(super) fn set_choice(&self, node: NodeId, choice: &Choice) {
        self.prompt_tokens.set(choice.prompt_tokens);
        self.cached_tokens.set(choice.cached_tokens);
        self.count_attempt(node);
    }

    /// Counts an attempt at this node. Each one after the first is a retry.
    pub(super) fn count_attempt(&self, node: NodeId) {
        self.node.set(Some(node));
        self.attempts.set(self.attempts.get() + 1);
    }

    /// Counts the status of an answer that begins. Returns its measure, or None if the request does not count.
    pub(super) fn begin_answer<B>(&self, response: &Response<B>) -> Option<Measure> {
        let kind = response.headers().get(CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
        let series = self.count(response.status())?;
        let span = self.take_span().map(|span| self.describe(span, response.status()));
        Some(Measure {
            _span: span,
            series,
            began: self.began,
            streams: kind.starts_with(b"text/event-stream"),
            last: None,
            pending: PendingTokens::default(),
            recorded: self.recorded(response.status()),
        })
    }

    /// Begins the request's trace. Its client has shown a key, if it needs one: strangers choose no traces.
    pub(super) fn trace(&self, head: &Parts) {
        if let Some(traces) = self.shared.traces.get().filter(|_| self.is_measured.get()) {
            *self.trace.borrow_mut() = traces.request(&head.headers, self.began);
        }
    }

    /// The span of a leg of this request if it is traced, and the header for the leg's engine if that is not the client's.
    pub(super) fn leg_span(&self, leg: Leg, address: &Address) -> (Option<OpenSpan>, Option<String>) {
        match &*self.trace.borrow() {
            RequestTrace::None => (None, None),
            RequestTrace::Unsampled(header) => (None, Some(header.clone())),
            RequestTrace::Sampled(request) => {
                let mut span = request.leg(leg);
                span.add("server.address", address.host.as_str());
                span.add("server.port", u64::from(address.port));
                let header = span.traceparent();
                (Some(span), Some(header))
            }
        }
    }

    fn take_span(&self) -> Option<Box<OpenSpan>> {
        match self.trace.take() {
            RequestTrace::Sampled(span) => Some(span),
            RequestTrace::None | RequestTrace::Unsampled(_) => None,
        }
    }

    /// Puts into the request's span what is known once its answer begins.
    fn describe(&self, mut span: Box<OpenSpan>, status: StatusCode) -> Box<OpenSpan> {
        span.add("http.route", ROUTES[self.route]);
        span.add("http.response.status_code", u64::from(status.as_u16()));
        if let Some(model) = self.model.borrow().as_deref().filter(|model| self.shared.is_served(model)) {
            span.add("gen_ai.request.model", model);
        }
        span.add("kvlane.prompt_tokens", self.prompt_tokens.get());
        span.add("kvlane.cached_tokens", self.cached_tokens.get());
        span.add("kvlane.attempts", self.attempts.get());
        if status.is_server_error() {
            span.fail("the answer is an error");
        }
        span
    }

    /// The request, if requests are recorded and a node serves it.
    fn recorded(&self, status: StatusCode) -> Option<Box<Recorded>> {
        let keys = self.blocks.take()?;
        let node = self.node.get().filter(|_| status.is_success())?;
        let node = self
            .shared
            .with_scheduler(|scheduler| scheduler.node(node).map(|node| Arc::clone(&node.name)))?;
        let ended = Ended {
            began: self.began,
            node,
            model: self.model.borrow().clone(),
            keys,
            lengths: Some(Lengths { prompt: self.prompt_tokens.get(), output: 0 }),
            first_token: None,
        };
        let recording = Arc::clone(&self.shared.recording);
        Some(Box::new(Recorded { recording, ended, is_counted: false }))
    }

    fn count(&self, status: StatusCode) -> Option<Arc<Series>> {
        if !self.is_measured.replace(false) {
            return None;
        }
        let answerer = self.node.get().map_or(Answerer::Router, Answerer::Node);
        let model = self.model.borrow();
        let shared = self.shared;
        let series = shared.requests.series(
            answerer,
            model.as_deref(),
            self.route,
            |model| shared.is_served(model),
            |node| shared.has_node(node),
        );
        series.answered(status.as_u16());
        series.prompt_tokens.fetch_add(self.prompt_tokens.get(), Ordering::Relaxed);
        series.cached_tokens.fetch_add(self.cached_tokens.get(), Ordering::Relaxed);
        series.retries.fetch_add(self.attempts.get().saturating_sub(1), Ordering::Relaxed);
        Some(series)
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        if self.is_measured.get()
            && let Ok(left) = StatusCode::from_u16(CLIENT_LEFT)
            && let Some(series) = self.count(left)
        {
            if let Some(span) = self.take_span() {
                self.describe(span, left).fail("the client left");
            }
            series.duration.observe(self.began.elapsed());
        }
    }
}

impl Measure {
    /// Counts a piece of the answer, which has this many events.
    pub(super) fn count_piece(&mut self, data: &[u8], events: u64) {
        self.read_usage(data);
        if !self.streams {
            if let Some(tokens) = completion_tokens(data) {
                self.series.generated_tokens.fetch_add(tokens, Ordering::Relaxed);
            }
            return;
        }
        let is_end = events > 0 && data.ends_with(STREAM_END);
        let is_role = self.last.is_none() && memchr::memmem::find(data, ROLE).is_some();
        let tokens = events.saturating_sub(u64::from(is_end) + u64::from(is_role));
        let Some(count) = u32::try_from(tokens).ok().filter(|tokens| *tokens > 0) else { return };
        let now = Instant::now();
        match self.last.replace(now) {
            None => {
                let first_token = now.saturating_duration_since(self.began);
                self.series.first_token.observe(first_token);
                if let Some(recorded) = &mut self.recorded {
                    recorded.ended.first_token = Some(first_token);
                }
            }
            Some(last) => {
                let each = now.saturating_duration_since(last) / count;
                self.pending.observe(BETWEEN_TOKENS_BOUNDS_US, each, count);
                if self.pending.total() >= PENDING_MAX {
                    self.series.between_tokens.add(&mut self.pending);
                }
            }
        }
        self.series.generated_tokens.fetch_add(tokens, Ordering::Relaxed);
        if let Some(recorded) = self.recorded.as_mut().filter(|recorded| !recorded.is_counted)
            && let Some(lengths) = &mut recorded.ended.lengths
        {
            lengths.output += tokens;
        }
    }

    /// Takes the token counts that the answer has, if the request is recorded.
    fn read_usage(&mut self, data: &[u8]) {
        let Some(recorded) = &mut self.recorded else { return };
        let Some(lengths) = &mut recorded.ended.lengths else { return };
        if let Some(tokens) = PROMPT_TOKENS.iter().find_map(|name| number_behind(data, name)) {
            lengths.prompt = tokens;
        }
        let of_answer = [COMPLETION_TOKENS, OUTPUT_TOKENS];
        // The first event of a message's stream says 0, before there are tokens.
        if let Some(tokens) =
            of_answer.iter().find_map(|name| number_behind(data, name)).filter(|tokens| *tokens > 0)
        {
            lengths.output = tokens;
            recorded.is_counted = true;
        }
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        self.series.between_tokens.add(&mut self.pending);
        self.series.duration.observe(self.began.elapsed());
        if let Some(mut recorded) = self.recorded.take() {
            if !self.streams && !recorded.is_counted {
                recorded.ended.lengths = None;
            }
            recorded.recording.ended(recorded.ended, Instant::now());
        }
    }
}

/// The last `completion_tokens` in these bytes. The router does not parse the answer for it.
fn completion_tokens(data: &[u8]) -> Option<u64> {
    number_behind(data, COMPLETION_TOKENS)
}

/// The number behind the last `name` in these bytes.
fn number_behind(data: &[u8], name: &[u8]) -> Option<u64> {
    let at = memchr::memmem::rfind(data, name)? + name.len();
    let rest = data[at..].trim_ascii_start();
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn measure(streams: bool) -> Measure {
        let metrics = crate::request_metrics::RequestMetrics::default();
        let series = metrics.series(Answerer::Router, None, 0, |_| true, |_| true);
        let began = Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or_else(Instant::now);
        Measure {
            series,
            began,
            streams,
            last: None,
            pending: PendingTokens::default(),
            recorded: None,
            _span: None,
        }
    }

    #[test]
    fn events_of_a_stream_are_tokens_but_for_its_end() {
        let mut measure = measure(true);
        measure.count_piece(b"data: {\"delta\": {\"role\": \"assistant\"}}\n\n", 1);
        measure.count_piece(b"data: {}\n\n", 1);
        measure.count_piece(b"data: {}\n\ndata: {}\n\n", 2);
        measure.count_piece(b"data: [DONE]\n\n", 1);
        let series = Arc::clone(&measure.series);
        assert_eq!(series.generated_tokens.load(Ordering::Relaxed), 3);
        assert!(series.between_tokens.read().is_empty(), "added at the end");
        drop(measure);
        for observed in [series.first_token.read(), series.between_tokens.read(), series.duration.read()] {
            assert!(!observed.is_empty());
        }
    }

    #[test]
    fn an_answer_in_one_piece_says_itself_how_many_tokens_it_has() {
        let mut measure = measure(false);
        measure.count_piece(br#"{"usage": {"prompt_tokens": 9, "completion_tokens": 5}}"#, 0);
        measure.count_piece(br#"{"completion_tokens": null}"#, 0);
        assert_eq!(measure.series.generated_tokens.load(Ordering::Relaxed), 5);
        assert!(measure.series.first_token.read().is_empty(), "its first byte is its last");
    }
}
