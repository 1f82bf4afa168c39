//! [`Exporter`]: the queue of spans, and the thread that sends them and the metrics.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use opentelemetry_proto::tonic::{
    collector::{metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest},
    common::v1::InstrumentationScope,
    metrics::v1::{ResourceMetrics, ScopeMetrics},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span},
};
use parking_lot::Mutex;
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

/// Takes spans from any thread, and exports them.
pub struct Exporter {
    spans: SyncSender<Event>,
    counters: Arc<Counters>,
    is_stopping: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Event {
    Ended(Box<NewSpan>),
    Stop,
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
        let (spans, events) = mpsc::sync_channel(WAITING_MAX);
        let (counters, is_stopping) = <(Arc<Counters>, Arc<AtomicBool>)>::default();
        let mut sender = Sender {
            collector,
            counters: Arc::clone(&counters),
            is_stopping: Arc::clone(&is_stopping),
            resource: resource(settings),
            started: nanos(SystemTime::now()),
            batch: Vec::new(),
            due: None,
            unsent: None,
            is_failing: false,
        };
        let run = move || sender.run(&events, &metrics);
        let thread = std::thread::Builder::new().name("kvlane-otlp".into()).spawn(run)?;
        Ok(Self { spans, counters, is_stopping, thread: Mutex::new(Some(thread)) })
    }

    /// Queues a span. Never waits: if too many wait, the span is dropped.
    pub fn export(&self, span: NewSpan) {
        if !span.context.is_sampled {
            return;
        }
        Counters::add(&self.counters.waiting_spans, 1);
        match self.spans.try_send(Event::Ended(Box::new(span))) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.counters.waiting_spans.fetch_sub(1, Ordering::Relaxed);
                Counters::add(&self.counters.dropped_spans, 1);
            }
        }
    }

    /// Counts of exported and dropped spans.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sends what waits, once, and ends the thread: after 5 to 10 s if the collector begins to be silent just now.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        self.is_stopping.store(true, Ordering::Relaxed);
        // The thread waits for an event, or is parked because all is full.
        let _ = self.spans.try_send(Event::Stop);
        thread.thread().unpark();
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
    counters: Arc<Counters>,
    is_stopping: Arc<AtomicBool>,
    resource: Resource,
    started: u64,
    batch: Vec<Span>,
    /// When the batch goes at the latest.
    due: Option<Instant>,
    /// While there is one, the queue fills.
    unsent: Option<Unsent>,
    is_failing: bool,
}

impl Sender {
    fn run(&mut self, events: &mpsc::Receiver<Event>, metrics: &dyn Fn() -> Metrics) {
        let mut metrics_at = Instant::now() + METRICS_INTERVAL;
        loop {
            let next = self.due.into_iter().chain(self.unsent.as_ref().map(|unsent| unsent.again_at));
            let next = next.chain([metrics_at]).min().unwrap_or(metrics_at);
            let wait = next.saturating_duration_since(Instant::now());
            // While a batch waits to be sent again, and the next one is full, spans stay in the queue.
            let event = if self.batch.len() < BATCH_MAX {
                events.recv_timeout(wait)
            } else {
                std::thread::park_timeout(wait);
                Err(RecvTimeoutError::Timeout)
            };
            match event {
                Ok(Event::Ended(span)) => self.add(*span),
                Ok(Event::Stop) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.is_stopping.store(true, Ordering::Relaxed),
            }
            if self.is_stopping.load(Ordering::Relaxed) {
                while let Ok(Event::Ended(span)) = events.try_recv() {
                    self.add(*span);
                }
                return self.send_last(metrics);
            }
            let now = Instant::now();
            if self.unsent.as_ref().is_some_and(|unsent| unsent.again_at <= now) {
                self.send_again();
            }
            let is_due = self.batch.len() >= BATCH_MAX || self.due.is_some_and(|due| due <= now);
            if is_due && self.unsent.is_none() {
                self.send_batch();
            }
            if metrics_at <= now {
                self.send_metrics(metrics);
                metrics_at = Instant::now() + METRICS_INTERVAL;
            }
        }
    }

    fn add(&mut self, span: NewSpan) {
        self.counters.waiting_spans.fetch_sub(1, Ordering::Relaxed);
        self.due.get_or_insert_with(|| Instant::now() + BATCH_AGE);
        self.batch.push(span.into_proto());
    }

    fn send_batch(&mut self) {
        self.due = None;
        let spans = std::mem::take(&mut self.batch);
        if spans.is_empty() {
            return;
        }
        let count = spans.len() as u64;
        let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, ..Default::default() }];
        let of_resource =
            ResourceSpans { resource: Some(self.resource.clone()), scope_spans, ..Default::default() };
        let body = ExportTraceServiceRequest { resource_spans: vec![of_resource] }.encode_to_vec();
        let now = Instant::now();
        let unsent =
            Unsent { body, spans: count, pause: RETRY_FIRST, again_at: now, give_up_at: now + RETRY_FOR };
        self.send(unsent);
    }

    fn send_again(&mut self) {
        if let Some(unsent) = self.unsent.take() {
            self.send(unsent);
        }
    }

    fn send(&mut self, mut unsent: Unsent) {
        let result = self.collector.post("traces", &unsent.body);
        self.note(result.as_ref().err());
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

    fn send_metrics(&mut self, metrics: &dyn Fn() -> Metrics) {
        let metrics = metrics().at(self.started, nanos(SystemTime::now()));
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..Default::default() }];
        let of_resource =
            ResourceMetrics { resource: Some(self.resource.clone()), scope_metrics, ..Default::default() };
        let body = ExportMetricsServiceRequest { resource_metrics: vec![of_resource] }.encode_to_vec();
        let result = self.collector.post("metrics", &body);
        self.note(result.as_ref().err());
        if result.is_ok() {
            Counters::add(&self.counters.exported_metrics, 1);
        }
    }

    /// Sends what is left, unless the collector fails: the program wants to end.
    fn send_last(&mut self, metrics: &dyn Fn() -> Metrics) {
        let lost = |counters: &Counters, spans: u64| Counters::add(&counters.dropped_spans, spans);
        if self.is_failing {
            lost(&self.counters, self.batch.len() as u64);
        } else {
            self.send_batch();
        }
        if let Some(unsent) = self.unsent.take() {
            lost(&self.counters, unsent.spans);
        }
        if !self.is_failing {
            self.send_metrics(metrics);
        }
    }

    /// Logs when the collector begins to fail, and when it works again.
    fn note(&mut self, failure: Option<&Refused>) {
        match failure {
            Some(why) => {
                Counters::add(&self.counters.failed_requests, 1);
                if !std::mem::replace(&mut self.is_failing, true) {
                    // Log: the collector does not take spans or metrics; they are dropped after a minute, and nothing
                    // else is affected. Do: look at the collector, and at --otlp-endpoint and its files.
                    tracing::warn!("OTLP export fails: {why}");
                }
            }
            None => {
                if std::mem::replace(&mut self.is_failing, false) {
                    // Log: the collector takes spans and metrics again.
                    tracing::info!("OTLP export works again");
                }
            }
        }
    }
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
