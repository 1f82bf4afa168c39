//! [`Exporter`]: the queue of spans, and the thread that sends them and the metrics.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use opentelemetry_proto::tonic::{
    collector::{metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest},
    common::v1::InstrumentationScope,
    metrics::v1::{ResourceMetrics, ScopeMetrics},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans},
};
use parking_lot::{Condvar, Mutex};
use prost::Message;

use crate::{
    counters::Counters,
    metrics::Metrics,
    post::{Collector, Refused},
    settings::Settings,
    span::{NewSpan, Value, attribute, nanos},
};

/// Most spans that wait. Each takes a few hundred bytes.
const WAITING_MAX: usize = 4096;
/// Most spans of a request.
const BATCH_MAX: usize = 512;
/// A batch goes this long after its first span.
const BATCH_AGE: Duration = Duration::from_secs(1);
/// Time between two exports of the metrics.
const METRICS_INTERVAL: Duration = Duration::from_secs(15);
/// First pause before a batch is sent again. Each further one is twice as long.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(16);
/// A batch that the collector has not taken for so long is dropped.
const RETRY_FOR: Duration = Duration::from_secs(60);
/// Time for a whole request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The same for the last ones, because the program wants to end.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes spans from any thread, and exports them.
pub struct Exporter {
    queue: Arc<Queue>,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Spans that wait. The first one and a full batch wake the thread, and no other: a wake-up for each span would take a
/// processor from the threads that serve requests.
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    spans: VecDeque<NewSpan>,
    is_stopping: bool,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Exporter {
    /// Starts the thread. It calls `metrics` every 15 s.
    ///
    /// # Errors
    /// The authority is no certificate, or the kernel gives no thread.
    pub fn start(settings: &Settings, metrics: impl Fn() -> Metrics + Send + 'static) -> io::Result<Self> {
        let collector = Collector::new(settings)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
        let (queue, counters) = <(Arc<Queue>, Arc<Counters>)>::default();
        let mut sender = Sender {
            collector,
            queue: Arc::clone(&queue),
            counters: Arc::clone(&counters),
            resource: resource(settings),
            started: nanos(SystemTime::now()),
            due: None,
            unsent: None,
            is_failing: [false; 2],
        };
        let run = move || sender.run(&metrics);
        let thread = std::thread::Builder::new().name("kvlane-otlp".into()).spawn(run)?;
        Ok(Self { queue, counters, thread: Mutex::new(Some(thread)) })
    }

    /// Queues a span. Never waits: if too many wait, the span is dropped.
    pub fn export(&self, span: NewSpan) {
        if !span.context.is_sampled {
            return;
        }
        let mut waiting = self.queue.waiting.lock();
        if waiting.is_stopping || waiting.spans.len() >= WAITING_MAX {
            return Counters::add(&self.counters.dropped_spans, 1);
        }
        waiting.spans.push_back(span);
        let count = waiting.spans.len();
        // Under the lock, so that the thread subtracts it afterwards.
        Counters::add(&self.counters.waiting_spans, 1);
        drop(waiting);
        if count == 1 || count == BATCH_MAX {
            self.queue.changed.notify_one();
        }
    }

    /// Counts of exported and dropped spans.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sends what waits, once, and ends the thread: within 7 s, also if the collector is silent.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        self.queue.waiting.lock().is_stopping = true;
        self.queue.changed.notify_one();
        if thread.join().is_err() {
            // Log: a bug: no span and no metric was exported any more; all else works. Do: report it, with the log.
            tracing::error!("thread kvlane-otlp panicked");
        }
    }
}

/// A request that the collector has not taken.
struct Unsent {
    body: Vec<u8>,
    spans: u64,
    pause: Duration,
    again_at: Instant,
    give_up_at: Instant,
}

/// State of the thread.
struct Sender {
    collector: Collector,
    queue: Arc<Queue>,
    counters: Arc<Counters>,
    resource: Resource,
    started: u64,
    /// When the spans that wait go at the latest.
    due: Option<Instant>,
    /// While there is one, the queue fills.
    unsent: Option<Unsent>,
    /// Whether the collector fails, by signal.
    is_failing: [bool; 2],
}

/// The two kinds of data of an export.
#[derive(Clone, Copy)]
enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    fn path(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
        }
    }
}

impl Sender {
    fn run(&mut self, metrics: &dyn Fn() -> Metrics) {
        let queue = Arc::clone(&self.queue);
        let mut metrics_at = Instant::now() + METRICS_INTERVAL;
        loop {
            let mut waiting = queue.waiting.lock();
            if waiting.is_stopping {
                drop(waiting);
                return self.send_last(metrics);
            }
            let now = Instant::now();
            if waiting.spans.len() >= BATCH_MAX {
                self.due = Some(now);
            } else if !waiting.spans.is_empty() {
                self.due.get_or_insert(now + BATCH_AGE);
            }
            let next = next_at(self.due, self.unsent.as_ref().map(|unsent| unsent.again_at), metrics_at);
            if next > now {
                queue.changed.wait_until(&mut waiting, next);
                continue;
            }
            drop(waiting);
            if self.unsent.as_ref().is_some_and(|unsent| unsent.again_at <= now) {
                self.send_again();
            } else if self.unsent.is_none() && self.due.is_some_and(|due| due <= now) {
                self.send_batch();
            }
            if metrics_at <= now {
                self.send_metrics(metrics, TIMEOUT);
                metrics_at = Instant::now() + METRICS_INTERVAL;
            }
        }
    }

    fn send_batch(&mut self) {
        let now = Instant::now();
        if let Some((body, spans)) = self.take_batch() {
            let give_up_at = now + RETRY_FOR;
            self.send(Unsent { body, spans, pause: RETRY_FIRST, again_at: now, give_up_at });
        }
    }

    /// The oldest spans as a request, and how many they are. None if none waits.
    fn take_batch(&mut self) -> Option<(Vec<u8>, u64)> {
        self.due = None;
        let taken: Vec<NewSpan> = {
            let mut waiting = self.queue.waiting.lock();
            let count = waiting.spans.len().min(BATCH_MAX);
            waiting.spans.drain(..count).collect()
        };
        let count = taken.len() as u64;
        self.counters.waiting_spans.fetch_sub(count, Ordering::Relaxed);
        let spans = taken.into_iter().map(NewSpan::into_proto).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, ..Default::default() }];
        let of_resource =
            ResourceSpans { resource: Some(self.resource.clone()), scope_spans, ..Default::default() };
        (count > 0)
            .then(|| (ExportTraceServiceRequest { resource_spans: vec![of_resource] }.encode_to_vec(), count))
    }

    fn send_again(&mut self) {
        if let Some(unsent) = self.unsent.take() {
            self.send(unsent);
        }
    }

    fn send(&mut self, mut unsent: Unsent) {
        let result = self.post(Signal::Traces, &unsent.body, TIMEOUT);
        let now = Instant::now();
        match result {
            Ok(rejected) => {
                let rejected = rejected.min(unsent.spans);
                Counters::add(&self.counters.exported_spans, unsent.spans - rejected);
                Counters::add(&self.counters.dropped_spans, rejected);
            }
            Err(Refused::ForNow(_)) if now < unsent.give_up_at => {
                unsent.again_at = now + unsent.pause;
                unsent.pause = (unsent.pause * 2).min(RETRY_MAX);
                self.unsent = Some(unsent);
            }
            Err(_) => Counters::add(&self.counters.dropped_spans, unsent.spans),
        }
    }

    fn send_metrics(&mut self, metrics: &dyn Fn() -> Metrics, timeout: Duration) {
        // A bug in a metric must not end the export of spans.
        let Ok(metrics) = catch_unwind(AssertUnwindSafe(metrics)) else {
            return Counters::add(&self.counters.failed_requests, 1);
        };
        let metrics = metrics.at(self.started, nanos(SystemTime::now()));
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..Default::default() }];
        let of_resource =
            ResourceMetrics { resource: Some(self.resource.clone()), scope_metrics, ..Default::default() };
        let body = ExportMetricsServiceRequest { resource_metrics: vec![of_resource] }.encode_to_vec();
        if self.post(Signal::Metrics, &body, timeout).is_ok() {
            Counters::add(&self.counters.exported_metrics, 1);
        }
    }

    /// One request. The library starts a thread to look up the collector's name, and panics if there is none to be had.
    fn post(&mut self, signal: Signal, body: &[u8], timeout: Duration) -> Result<u64, Refused> {
        let collector = &self.collector;
        let posted = catch_unwind(AssertUnwindSafe(|| collector.post(signal.path(), body, timeout)));
        let result = posted.unwrap_or_else(|_| Err(Refused::ForNow("the system gives no thread".into())));
        self.note(signal, result.as_ref().err());
        result
    }

    /// Sends what is left, unless the collector fails: the program wants to end.
    fn send_last(&mut self, metrics: &dyn Fn() -> Metrics) {
        if let Some(unsent) = self.unsent.take() {
            Counters::add(&self.counters.dropped_spans, unsent.spans);
        }
        let of_metrics = self.is_failing[Signal::Metrics as usize];
        while let Some((body, spans)) = self.take_batch() {
            // After a failure the rest is only counted.
            let rejected = if self.is_failing[Signal::Traces as usize] {
                spans
            } else {
                self.post(Signal::Traces, &body, LAST_TIMEOUT).map_or(spans, |some| some.min(spans))
            };
            Counters::add(&self.counters.exported_spans, spans - rejected);
            Counters::add(&self.counters.dropped_spans, rejected);
        }
        if !of_metrics && !self.is_failing[Signal::Traces as usize] {
            self.send_metrics(metrics, LAST_TIMEOUT);
        }
    }

    /// Logs when the collector begins to fail, and when it works again.
    fn note(&mut self, signal: Signal, failure: Option<&Refused>) {
        let (is_failing, what) = (&mut self.is_failing[signal as usize], signal.path());
        match failure {
            Some(why) => {
                Counters::add(&self.counters.failed_requests, 1);
                if !std::mem::replace(is_failing, true) {
                    // Log: the collector does not take spans or metrics; they are dropped after a minute, and nothing
                    // else is affected. Do: look at the collector, and at --otlp-endpoint and its files.
                    tracing::warn!("OTLP export of {what} fails: {why}");
                }
            }
            None => {
                if std::mem::replace(is_failing, false) {
                    // Log: the collector takes spans and metrics again.
                    tracing::info!("OTLP export of {what} works again");
                }
            }
        }
    }
}

/// The next moment at which something goes: the batch at hand, the one that is to be sent again, or the metrics. While a
/// batch waits to be sent again, no other one goes, so it must not wake the thread either.
fn next_at(due: Option<Instant>, again_at: Option<Instant>, metrics_at: Instant) -> Instant {
    again_at.or(due).map_or(metrics_at, |at| at.min(metrics_at))
}

fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "kvlane".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..Default::default()
    }
}

fn resource(settings: &Settings) -> Resource {
    let texts = [
        ("service.name", settings.service),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", settings.instance.as_str()),
    ];
    let attributes = texts.map(|(name, text)| attribute(name, Value::from(text))).into();
    Resource { attributes, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread took a whole core while a collector was away: the batch behind the unsent one was due, and could not go.
    #[test]
    fn a_batch_behind_one_that_waits_does_not_wake_the_thread() {
        let now = Instant::now();
        let [first, second, third] = [1, 2, 3].map(|seconds| now + Duration::from_secs(seconds));
        assert_eq!(next_at(Some(first), Some(second), third), second);
        assert_eq!(next_at(Some(first), None, third), first);
        assert_eq!(next_at(None, None, third), third);
        assert_eq!(next_at(Some(third), None, second), second);
        assert_eq!(next_at(Some(first), Some(third), second), second);
    }

    #[test]
    fn what_is_secret_is_not_printed() {
        let headers = vec![("Authorization".to_owned(), "secret".to_owned())];
        let Ok(endpoint) = "http://127.0.0.1:1".parse() else { panic!("an address") };
        let settings = Settings { endpoint, headers, authority: None, service: "s", instance: "i".into() };
        let text = format!("{settings:?}");
        assert!(text.contains("Authorization") && !text.contains("secret"), "{text}");
    }
}
