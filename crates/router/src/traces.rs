//! Spans of the requests that are sampled: one for the whole request, and one below it for each leg.
//!
//! ```text
//!   parent: the client's span, if its `traceparent` says sampled; else the root of a new trace
//!     +-- kvlane.route              the request's head ......... the last byte of its answer
//!           +-- kvlane.route.prefill    a leg, from its request to its last byte; its engine gets this span as
//!           +-- kvlane.route.decode     the parent in `traceparent`
//! ```
//! A request whose client did not sample it keeps its `traceparent`, and nothing is exported of it.

use std::{
    io,
    sync::Arc,
    time::{Instant, SystemTime},
};

use hyper::HeaderMap;
use kvlane_otlp::{
    Counters, Exporter, Kind, Metrics, NewSpan, Settings, SpanId, TraceContext, Tracer, Value,
};

use crate::schedule::Leg;

/// The header that carries a request's trace.
pub(crate) const TRACEPARENT: &str = "traceparent";

/// Exports the router's spans and metrics.
#[derive(Debug)]
pub(crate) struct Traces {
    exporter: Exporter,
    tracer: Tracer,
}

/// The trace of a request.
#[derive(Debug, Default)]
pub(crate) enum RequestTrace {
    /// Nothing is exported, or its client did not sample it. Its header passes as it is.
    #[default]
    None,
    /// The router began a trace and did not sample it. Its engines get this header, so that they do not sample it either.
    Unsampled(String),
    /// Its span, until the answer begins.
    Sampled(Box<OpenSpan>),
}

/// A span that ends, and is exported, when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenSpan {
    traces: Arc<Traces>,
    context: TraceContext,
    id: SpanId,
    name: &'static str,
    kind: Kind,
    since: Instant,
    attributes: Vec<(&'static str, Value)>,
    error: Option<&'static str>,
}

impl Traces {
    /// Exports from now on; `metrics` reads the router's. A request without a trace begins one with the probability `share`.
    pub(crate) fn start(
        settings: &Settings,
        share: f64,
        metrics: impl Fn() -> Metrics + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let exporter = Exporter::start(settings, metrics)?;
        Ok(Arc::new(Self { exporter, tracer: Tracer::new(kvlane_memory::random()?, share) }))
    }

    /// Sends what waits, and exports nothing from then on.
    pub(crate) fn stop(&self) {
        self.exporter.stop();
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.exporter.counters()
    }

    /// Begins the trace of a request that has arrived with these headers, at `since`.
    pub(crate) fn request(self: &Arc<Self>, headers: &HeaderMap, since: Instant) -> RequestTrace {
        let given: Option<TraceContext> =
            headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
        let is_given = given.is_some();
        let context = given.unwrap_or_else(|| self.tracer.begin());
        if context.is_sampled {
            let span = self.span(context, "kvlane.route", Kind::Server, since);
            RequestTrace::Sampled(Box::new(span))
        } else if is_given {
            RequestTrace::None
        } else {
            RequestTrace::Unsampled(context.below(self.tracer.span_id()).to_string())
        }
    }

    fn span(
        self: &Arc<Self>,
        context: TraceContext,
        name: &'static str,
        kind: Kind,
        since: Instant,
    ) -> OpenSpan {
        OpenSpan {
            traces: Arc::clone(self),
            context,
            id: self.tracer.span_id(),
            name,
            kind,
            since,
            attributes: Vec::new(),
            error: None,
        }
    }
}

impl OpenSpan {
    /// The span of a leg of this request.
    pub(crate) fn leg(&self, leg: Leg) -> Self {
        let name = match leg {
            Leg::Whole => "kvlane.route.whole",
            Leg::Prefill => "kvlane.route.prefill",
            Leg::Decode => "kvlane.route.decode",
        };
        self.traces.span(self.context.below(self.id), name, Kind::Client, Instant::now())
    }

    /// The header for a request that this span is the parent of.
    pub(crate) fn traceparent(&self) -> String {
        self.context.below(self.id).to_string()
    }

    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<Value>) {
        self.attributes.push((name, value.into()));
    }

    pub(crate) fn fail(&mut self, why: &'static str) {
        self.error = Some(why);
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let ended = SystemTime::now();
        self.traces.exporter.export(NewSpan {
            context: self.context,
            id: self.id,
            name: self.name,
            kind: self.kind,
            began: ended.checked_sub(self.since.elapsed()).unwrap_or(ended),
            ended,
            attributes: std::mem::take(&mut self.attributes),
            error: self.error,
        });
    }
}
