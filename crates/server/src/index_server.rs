//! `kvlane index`: a replica of a cluster's index, with health, state and metrics over HTTP.

use std::{net::SocketAddr, sync::Arc};

use axum::{Json, Router, extract::State as Held, response::IntoResponse, routing::get};
use kvlane_cluster::{OwnerStatus, Replica, ReplicaOptions, ReplicaStatus, State};
use kvlane_door::{
    CONNECTIONS_MAX, CONTENT_TYPE, Metric,
    MetricKind::{Counter, Gauge},
    Names, PROCESS_METRICS, Pages, Process, Row, Slots, each, total, write_metrics,
};
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::{daemon::StartError, http};

/// The settings of a replica.
#[derive(Debug, Clone)]
pub struct IndexOptions {
    /// Its part in the cluster.
    pub replica: ReplicaOptions,
    /// Where it serves health, state and metrics; None: nowhere.
    pub http: Option<SocketAddr>,
    /// Further host names of these pages.
    pub http_hosts: Vec<String>,
}

/// A running replica.
pub struct IndexServer {
    replica: Arc<Replica>,
    pages: Option<Pages>,
}

impl IndexServer {
    /// Listens for daemons, and serves the pages.
    ///
    /// # Errors
    /// An address is taken, a file of the certificate is not usable, or the system gives no thread.
    pub fn start(options: IndexOptions) -> Result<Self, StartError> {
        let listener = options.http.map(http::bind).transpose()?;
        let replica = Replica::start(options.replica)?;
        let names = Names { program: "index", flag: "--http-host", given: options.http_hosts };
        let pages = listener.map(|listener| {
            let pages = Router::new()
                .route("/health", get(health))
                .route("/owners", get(owners))
                .route("/metrics", get(metrics_page))
                .with_state(Arc::clone(&replica));
            Pages::serve(
                listener,
                pages,
                names,
                Slots::new(CONNECTIONS_MAX, getrlimit(Resource::Nofile).current),
                || {},
            )
        });
        let pages = pages.transpose().inspect_err(|_| replica.stop())?;
        Ok(Self { replica, pages })
    }

    /// Ends pages and replica.
    pub fn stop(self) {
        if let Some(pages) = self.pages {
            pages.stop();
        }
        self.replica.stop();
    }
}

async fn health() -> Json<Value> {
    Json(json!({ "status": "ok", "version": env!("CARGO_PKG_VERSION") }))
}

/// The daemons that it follows.
async fn owners(Held(replica): Held<Arc<Replica>>) -> Json<Value> {
    let owner = |owner: &OwnerStatus| {
        json!({
            "address": &*owner.name, "epoch": owner.epoch, "silent_seconds": owner.age.as_secs_f64(),
            "blocks": owner.keys.count, "state": state(owner),
            "changes_behind": owner.heard_of.saturating_sub(owner.applied),
        })
    };
    let mut owners = replica.status().owners;
    owners.sort_by(|one, other| one.name.cmp(&other.name));
    Json(json!(owners.iter().map(owner).collect::<Vec<_>>()))
}

async fn metrics_page(Held(replica): Held<Arc<Replica>>) -> impl IntoResponse {
    let mut page = String::new();
    write_metrics(&mut page, METRICS, &replica.status());
    write_metrics(&mut page, PROCESS_METRICS, &Process::read());
    ([("content-type", CONTENT_TYPE)], page)
}

const STATES: [&str; 4] = ["following", "catching up", "silent", "gone"];

fn state(owner: &OwnerStatus) -> &'static str {
    match owner.state {
        State::Gone => "gone",
        _ if !owner.is_visible => "silent",
        State::Following => "following",
        State::Lost | State::Asked | State::Receiving => "catching up",
    }
}

/// All metrics of `kvlane index`.
pub fn index_metrics() -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().map(|row| &row.metric).chain(PROCESS_METRICS.iter().map(|row| &row.metric))
}

const METRICS: &[Row<ReplicaStatus>] = &[
    each("kvlane_index_owners", Gauge, "state", "Daemons that announce their blocks.", |status| {
        let count = |wanted: &str| status.owners.iter().filter(|owner| state(owner) == wanted).count();
        STATES.iter().map(|wanted| (vec![(*wanted).to_owned()], count(wanted) as f64)).collect()
    }),
    total("kvlane_index_entries", Gauge, "One for each block of each daemon.", |status| status.entries),
    total("kvlane_index_unswept_entries", Gauge, "Hidden entries that are still to be removed.", |status| {
        status.unswept
    }),
    total("kvlane_index_bytes", Gauge, "Memory of all entries.", |status| status.entry_bytes),
    total("kvlane_index_questions_total", Counter, "Questions of daemons.", |status| status.questions),
    total("kvlane_index_snapshots_total", Counter, "Snapshots that were requested of daemons.", |status| {
        status.counters.snapshots_requested
    }),
    total("kvlane_index_refused_messages_total", Counter, "Messages that were refused.", |status| {
        status.refused
    }),
    total(
        "kvlane_index_stranger_messages_total",
        Counter,
        "Messages of daemons that were not reached under the address that they name.",
        |status| status.strangers,
    ),
];
