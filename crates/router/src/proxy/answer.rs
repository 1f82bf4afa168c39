//! Answers to clients: an engine's answer, passed on as it comes, or the router's own error in OpenAI's shape.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::{Body, Frame, SizeHint},
    header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER},
};
use serde_json::json;

use super::{
    exchange::Incoming, head_rules::FramingFault, leg::LegGuard, tally::Measure,
    upstream_error::UpstreamError,
};
use crate::{body::Mark, schedule::LegEnd};

/// The body of an answer to a client.
#[derive(Debug)]
pub(super) enum AnswerBody {
    /// The router has all of it: its own answer, or an engine's that it has read.
    Buffered(Full<Bytes>),
    /// An engine's answer, passed on as it comes.
    Engine(Box<EngineBody>),
}

/// An engine's answer on its way to the client. The leg ends when the engine has sent the last byte. A client that leaves drops
/// this, and with it the connection to the engine, which aborts the request.
#[derive(Debug)]
pub(super) struct EngineBody {
    /// The first piece. The router reads it before it answers, so that another engine can replace one that fails before that.
    first: Option<Frame<Bytes>>,
    /// The rest of the body, with its connection. None at the end.
    rest: Option<Incoming>,
    leg: LegGuard,
    measure: Option<Measure>,
}

impl EngineBody {
    /// An answer whose first piece has arrived.
    pub(super) fn new(first: Frame<Bytes>, rest: Incoming, mut leg: LegGuard, marks: &[Mark]) -> Self {
        leg.prefilled(marks);
        let mut body = Self { first: Some(first), rest: Some(rest), leg, measure: None };
        body.count();
        body.end_if_over();
        body
    }

    /// An answer without a body.
    pub(super) fn empty(mut leg: LegGuard) -> Self {
        leg.end(LegEnd::Served);
        Self { first: None, rest: None, leg, measure: None }
    }

    fn count(&mut self) {
        if let Some(first) = &self.first {
            self.leg.generated(tokens(first));
        }
    }

    fn end_if_over(&mut self) {
        if self.rest.take_if(|incoming| incoming.is_end_stream()).is_some() {
            self.leg.end(LegEnd::Served);
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(incoming) = &mut self.rest else { return Poll::Ready(None) };
        match ready!(Pin::new(incoming).poll_frame(context)) {
            Some(Ok(frame)) => {
                let tokens = tokens(&frame);
                self.leg.generated(tokens);
                if let (Some(measure), Some(data)) = (&mut self.measure, frame.data_ref()) {
                    measure.count_piece(data, tokens);
                }
                self.end_if_over();
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.rest = None;
                self.leg.fail(&error.to_string());
                Poll::Ready(Some(Err(error)))
            }
            None => {
                self.rest = None;
                self.leg.end(LegEnd::Served);
                Poll::Ready(None)
            }
        }
    }
}

impl AnswerBody {
    /// Lets `measure` count this answer from its first piece on.
    pub(super) fn measure(&mut self, mut measure: Option<Measure>) {
        // A buffered answer ends at once.
        let Self::Engine(body) = self else { return };
        if let (Some(measure), Some(data)) = (&mut measure, body.first.as_ref().and_then(Frame::data_ref)) {
            measure.count_piece(data, body.first.as_ref().map_or(0, tokens));
        }
        body.measure = measure;
    }
}

/// Tokens in a piece of a streamed answer: one per event. Other answers have no events.
fn tokens(frame: &Frame<Bytes>) -> u64 {
    frame.data_ref().map_or(0, |data| memchr::memmem::find_iter(data, b"data: ").count() as u64)
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        match &mut *self {
            Self::Buffered(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
            Self::Engine(body) => body.poll(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Buffered(body) => body.is_end_stream(),
            Self::Engine(body) => body.first.is_none() && body.rest.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Buffered(body) => body.size_hint(),
            // Content-Length, where the engine gave one, is in the headers already.
            Self::Engine(_) => SizeHint::default(),
        }
    }
}

/// An error of the router, in the shape of OpenAI's and vLLM's: `{"error": {"message", "type", "param", "code"}}`.
#[derive(Debug, Clone)]
pub(super) struct Problem {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The member of the body, or the header, that is wrong.
    pub(super) param: Option<String>,
    pub(super) retry_after: Option<Duration>,
    /// The connection closes, because the rest of the request was not read.
    pub(super) closes: bool,
}

impl Problem {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, retry_after: None, closes: false }
    }

    /// Closes the connection, because the request and the bytes behind it could be read in two ways.
    pub(super) fn bad_framing(fault: FramingFault) -> Self {
        Self { closes: true, ..Self::new(StatusCode::BAD_REQUEST, fault.to_string()) }
    }

    pub(super) fn with_param(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    pub(super) fn answer(&self) -> Response<AnswerBody> {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::UNAUTHORIZED => "AuthenticationError",
            StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
            status if status.is_client_error() => "BadRequestError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        let error = json!({ "error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16(),
        }});
        let mut response = json_answer(self.status, error.to_string());
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_millis().div_ceil(1000).max(1) as u64;
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.closes {
            response.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// A JSON answer of the router itself.
pub(super) fn json_answer(status: StatusCode, json: String) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Buffered(Full::new(json.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
