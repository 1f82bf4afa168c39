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
    sync::{Arc, Weak},
    time::{Instant, SystemTime},
};

use hyper::HeaderMap;
use kvlane_door::{PROCESS_METRICS, Process};
use kvlane_otlp::{
    Counters, Exporter, Kind, Metrics, NewSpan, OTLP_METRICS, Settings, SpanId, TraceContext, Tracer, Value,
    metrics_of,
};

use crate::{metrics, request_rows, schedule::Leg, shared::Shared};

/// The header that carries a request's trace.
pub(crate) const TRACEPARENT: &str = "traceparent";

/// Exports the router's spans and metrics.
#[derive(Debug)]
pub(crate) struct Traces {
    exporter: Exporter,
    tracer: Tracer,
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

impl Shared {
    /// Exports spans and metrics from now on. Of the requests that come without a trace, this share (0 to 1) begins one.
    ///
    /// # Errors
    /// The authority is no certificate, or the system gives no thread. Also if it exports already.
    pub fn export(self: &Arc<Self>, settings: &Settings, share: f64) -> io::Result<()> {
        let shared = Arc::downgrade(self);
        let exporter = Exporter::start(settings, move || all_metrics(&shared))?;
        let traces = Arc::new(Traces { exporter, tracer: Tracer::new(share)? });
        self.traces.set(traces).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Sends what waits to be exported, and exports nothing from then on.
    pub fn stop_export(&self) {
        if let Some(traces) = self.traces.get() {
            traces.exporter.stop();
        }
    }
}

fn all_metrics(shared: &Weak<Shared>) -> Metrics {
    let Some(shared) = shared.upgrade() else { return Metrics::default() };
    let mut all = metrics_of(metrics::METRICS, &*shared);
    all.append(metrics_of(request_rows::METRICS, &*shared));
    all.append(metrics_of(PROCESS_METRICS, &Process::read()));
    if let Some(traces) = shared.traces.get() {
        all.append(metrics_of(OTLP_METRICS, traces.counters()));
    }
    all
}

impl Traces {
    pub(crate) fn counters(&self) -> &Counters {
        self.exporter.counters()
    }

    /// The span of a request that has arrived with these headers, if it is sampled.
    pub(crate) fn request(self: &Arc<Self>, headers: &HeaderMap) -> Option<OpenSpan> {
        let given =
            headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
        let context = given.unwrap_or_else(|| self.tracer.begin());
        context.is_sampled.then(|| self.span(context, "kvlane.route", Kind::Server))
    }

    fn span(self: &Arc<Self>, context: TraceContext, name: &'static str, kind: Kind) -> OpenSpan {
        OpenSpan {
            traces: Arc::clone(self),
            context,
            id: self.tracer.span_id(),
            name,
            kind,
            since: Instant::now(),
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
        self.traces.span(self.context.below(self.id), name, Kind::Client)
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
