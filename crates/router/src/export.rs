//! Starts and ends the export of spans and metrics to an OpenTelemetry collector.

use std::{
    io,
    sync::{Arc, Weak},
};

use kvlane_door::{PROCESS_METRICS, Process};
use kvlane_otlp::{Metrics, OTLP_METRICS, Settings, metrics_of};

use crate::{metrics, request_rows, shared::Shared, traces::Traces};

impl Shared {
    /// Exports spans and metrics from now on. A request without a trace begins one with this probability, from 0 to 1.
    ///
    /// # Errors
    /// The authority is no certificate, or the system gives no thread. Also if it exports already.
    pub fn export(self: &Arc<Self>, settings: &Settings, share: f64) -> io::Result<()> {
        let shared = Arc::downgrade(self);
        let traces = Traces::start(settings, share, move || all_metrics(&shared))?;
        self.traces.set(traces).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Sends what waits to be exported, and exports nothing from then on.
    pub fn stop_export(&self) {
        if let Some(traces) = self.traces.get() {
            traces.stop();
        }
    }
}

/// The same metrics as on the page for Prometheus.
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
