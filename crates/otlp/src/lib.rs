//! Exports spans and metrics to an OpenTelemetry collector: OTLP over HTTP, in protobuf.
//!
//! ```text
//!   any thread --span(): never waits--> queue of 4,096 --kvlane-otlp--> batches of 512, or after 1 s --> POST /v1/traces
//!                                                         every 15 s: the program's table of metrics --> POST /v1/metrics
//! ```
//! - A span that finds the queue full is dropped and counted. A collector that is slow, dead or refuses costs nothing else.
//! - A batch that the collector could not take for now is sent again for a minute, with pauses of 1 to 16 s.
//! - [`TraceContext`] reads and writes the header `traceparent` (W3C Trace Context, level 1). Nothing is exported of a request
//!   whose caller did not sample it.
#![forbid(unsafe_code)]

mod counters;
mod endpoint;
mod exporter;
mod metrics;
mod post;
mod settings;
mod span;
mod trace_context;

pub use self::{
    counters::{Counters, OTLP_METRICS},
    endpoint::{BadEndpoint, Endpoint},
    exporter::Exporter,
    metrics::{Metrics, metrics_of},
    post::rejected,
    settings::Settings,
    span::{Kind, NewSpan, Value},
    trace_context::{BadTraceparent, SpanId, TraceContext, Tracer},
};
