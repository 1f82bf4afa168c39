//! The daemon's recorder, apart from any global one.

use kvlane_door::MetricKind;
use std::time::Duration;

use metrics::{Histogram, Label, Unit, counter, gauge, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::{
    scrape::Scrape,
    table::{Event, METRICS, Metric, Source},
};
use crate::calls::table::{CALLS, Call};

/// Upper bounds of the histogram of requests, in seconds.
const BUCKETS: [f64; 14] =
    [10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0, 5.0];

/// The same for waits for another engine.
const WAIT_BUCKETS: [f64; 10] = [1e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0, 5.0, 30.0];

const BAD_FRAMES: &Metric = Event::BadFrame.metric();
const REGISTERED: &Metric = Event::WorkerRegistered.metric();
const REFUSED: &Metric = Event::Refused.metric();
const ANSWERED: &Metric = Event::Answered.metric();
const HAND_OFFS: &Metric = Event::HandOff.metric();
const HAND_OFF_WAITED: &Metric = Event::HandOffWaited.metric();

/// Counts what happens, and keeps what was read last.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// By call.
    durations: Vec<Histogram>,
}

impl Metrics {
    pub(crate) fn install() -> Self {
        let full = |metric: &Metric| Matcher::Full(metric.name.into());
        let builder = PrometheusBuilder::new()
            .set_buckets_for_metric(full(ANSWERED), &BUCKETS)
            .and_then(|builder| builder.set_buckets_for_metric(full(HAND_OFF_WAITED), &WAIT_BUCKETS))
            .unwrap_or_else(|_| PrometheusBuilder::new());
        let recorder = builder.build_recorder();
        let durations = with_local_recorder(&recorder, || {
            for metric in METRICS {
                match metric.kind {
                    MetricKind::Counter => metrics::describe_counter!(metric.name, metric.help),
                    MetricKind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
                    MetricKind::Histogram => {
                        metrics::describe_histogram!(metric.name, Unit::Seconds, metric.help)
                    }
                }
            }
            CALLS.iter().map(|call| histogram!(ANSWERED.name, ANSWERED.labels => call.name)).collect()
        });
        let handle = recorder.handle();
        Self { recorder, handle, durations }
    }

    pub(crate) fn answered(&self, call: Call, took: Duration, refused: bool) {
        self.durations[call as usize].record(took);
        if refused {
            self.count(REFUSED, Some(call.row().name));
        }
    }

    pub(crate) fn bad_frame(&self) {
        self.count(BAD_FRAMES, None);
    }

    pub(crate) fn worker_registered(&self, method: &'static str) {
        self.count(REGISTERED, Some(method));
    }

    /// A hand-off is over; `waited` is 0 where nothing was waited for.
    pub(crate) fn hand_off(&self, outcome: &'static str, waited: Duration) {
        self.count(HAND_OFFS, Some(outcome));
        if waited > Duration::ZERO {
            let label = Label::new(HAND_OFF_WAITED.labels, outcome);
            with_local_recorder(&self.recorder, || {
                histogram!(HAND_OFF_WAITED.name, vec![label]).record(waited);
            });
        }
    }

    fn count(&self, metric: &'static Metric, label: Option<&'static str>) {
        let labels: Vec<Label> = label.map(|value| Label::new(metric.labels, value)).into_iter().collect();
        with_local_recorder(&self.recorder, || counter!(metric.name, labels).increment(1));
    }

    /// Keeps what the metrics that are read say now.
    pub(crate) fn keep(&self, scrape: &Scrape) {
        with_local_recorder(&self.recorder, || {
            for metric in METRICS {
                let Source::Read(read) = metric.source else { continue };
                for (label, value) in read(scrape) {
                    let labels: Vec<Label> =
                        label.map(|value| Label::new(metric.labels, value)).into_iter().collect();
                    if metric.kind == MetricKind::Counter {
                        counter!(metric.name, labels).absolute(value as u64);
                    } else {
                        gauge!(metric.name, labels).set(value);
                    }
                }
            }
        });
    }

    /// Sorts what was recorded into buckets. Until then it is kept one by one: to be called now and then, whether or
    /// not anybody reads the page.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// All that was recorded, as Prometheus reads it.
    pub(crate) fn render(&self) -> String {
        self.upkeep();
        self.handle.render()
    }
}
